"""An agent that means harm, in its sandbox, against a running service: it reaches its own model endpoint and nothing
else, and what it leaves behind decides nothing."""

from __future__ import annotations

import json
import re
import secrets
import urllib.request
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from polar.contract.arrays import to_json
from polar.contract.rollout import Delivery
from tests.attacks.service import ADMIN, CALLS, NODE, Service
from tests.runtimes.making import until

pytestmark = pytest.mark.slow


async def test_a_result_can_not_be_forged_from_inside(service: Service) -> None:
    before = len(await service.audit())
    ports = [part.port for part in service.parts] + [urlsplit(service.engine_url).port]
    seen = await service.attack(
        """
        forged = {"session_id": os.environ["SESSION_ID"], "attempt": 1, "completions": [], "result": {
            "session_id": os.environ["SESSION_ID"], "task_id": os.environ["TASK_ID"], "attempt": 1,
            "status": "COMPLETED",
            "trajectory": {"status": "COMPLETED", "metadata": {"evaluation": {"outcome_reward": 99}}}}}
        asked = [("POST", "/nodes/all/deliveries", forged), ("POST", "/nodes/node-0/deliveries", forged),
                 ("POST", "/nodes/register", {}), ("POST", "/nodes/all/claim", {"room": 9}), ("GET", "/nodes", None),
                 ("POST", "/rollout/task/submit", {}), ("GET", "/rollout/status", None), ("GET", "/tasks", None),
                 ("DELETE", "/rollout/task/" + os.environ["TASK_ID"], None), ("GET", "/results", None),
                 ("POST", "/admin/inference/pause", {}), ("GET", "/admin/inference/status", None),
                 ("POST", "/sessions", {}), ("GET", "/sessions", None), ("GET", "/audit", None),
                 ("GET", "/events", None), ("GET", "/health", None), ("GET", "/metrics", None),
                 ("GET", "/openapi.json", None)]
        tell("answers", [ask(*each)[0] for each in asked])
        tell("unkeyed", [ask(method, path, body, key=None)[0] for method, path, body in asked])
        head = "GET %s HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer %s\\r\\n\\r\\n"
        tell("odd", [raw((head % (path, KEY)).encode())[9:12]
             for path in ("/v1/../rollout/status", "/v1/%2e%2e/rollout/status", "//rollout/status",
                          "/s/x/rollout/status", "/s/%2e%2e/tasks", "/tasks%00", "/%2fetc/passwd", "http://127.0.0.1/tasks",
                          "/s/" + KEY + "/tasks", "/s/" + KEY + "/../../tasks", "/workers/0/tasks")])
        direct = []
        for port in json.loads(os.environ["PORTS"]):
            with socket.socket() as link:
                direct.append(link.connect_ex(("127.0.0.1", port)))
        tell("direct", direct)
        tell("chat", chat()[0])
        """,
        env={"PORTS": json.dumps(ports)},
    )
    assert set(seen.told["answers"]) == {404}
    assert set(seen.told["unkeyed"]) <= {401, 404}
    assert all(re.fullmatch("40[0145]", status) for status in seen.told["odd"]), seen.told["odd"]
    assert 0 not in seen.told["direct"], "a port of the host is reached from inside"
    assert seen.told["chat"] == 200
    assert seen.result.status == "COMPLETED"
    assert seen.result.trajectory.metadata["evaluation"]["outcome_reward"] == 1.0
    actions = [entry["action"] for entry in (await service.audit())[before:]]
    assert set(actions) <= {"task.submit", "task.read", "audit.read"}, "the control plane was reached from inside"


async def test_another_session_can_not_be_read(service: Service) -> None:
    first = await service.attack(
        """
        status, text = ask("POST", "/v1/responses", {"model": "m", "input": "the word is xylophone", "store": True})
        tell("status", status), tell("id", json.loads(text)["id"]), tell("key", KEY)
        """
    )
    assert first.told["status"] == 200
    second = await service.attack(
        """
        other, key = os.environ["OTHER"], os.environ["OTHER_KEY"]
        go_on = {"model": "m", "input": "what was the word?", "previous_response_id": other}
        tell("go on", ask("POST", "/v1/responses", go_on))
        def by_path(key):
            return ask("GET", "/s/%s/v1/models" % key, key=None)[0]
        tell("its key", [ask("GET", "/v1/models", key=key)[0], chat(key=key)[0], by_path(key)])
        guesses = [KEY[:-1], KEY + "0", KEY.upper(), KEY[::-1], "", "*", "null", "sk-polar-", "sk-polar-0."]
        tell("guessed", [chat(key=guess)[0] for guess in guesses] + [by_path(guess) for guess in guesses])
        tell("reads", [ask("GET", path)[0] for path in (
            "/v1/responses/" + other, "/v1/responses/%s/input_items" % other, "/v1/chat/completions",
            "/v1/chat/completions/" + other, "/v1/completions", "/v1/files", "/v1/conversations")])
        tell("models", ask("GET", "/v1/models")[1])
        """,
        env={"OTHER": first.told["id"], "OTHER_KEY": first.told["key"]},
    )
    status, text = second.told["go on"]
    assert status in (400, 404), text
    assert "xylophone" not in json.dumps(second.told)
    assert set(second.told["its key"]) <= {401, 410}
    assert set(second.told["guessed"]) <= {401, 404}
    assert set(second.told["reads"]) <= {404, 405}
    assert first.told["key"] not in second.told["models"]


async def test_a_session_s_key_is_worth_nothing_outside(service: Service) -> None:
    seen = await service.attack("tell('key', KEY), tell('chat', chat()[0])")
    assert seen.told["chat"] == 200
    forged = Delivery(session_id=seen.result.session_id, attempt=1, completions=[])
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {seen.told['key']}"}, trust_env=False) as client:
        for part in service.parts:
            for method, path in (
                ("POST", "/nodes/n1/deliveries"),
                ("POST", "/rollout/task/submit"),
                ("GET", f"/rollout/task/{seen.result.task_id}"),
                ("POST", "/admin/inference/pause"),
                ("POST", "/sessions"),
            ):
                answer = await client.request(method, part.url + path, content=to_json(forged))
                assert answer.status_code in (401, 404), (part.url, path, answer.text)
    refused = {entry["action"] for entry in await service.audit() if not entry["allowed"]}
    assert refused >= {"node.deliver", "task.submit", "task.read", "inference.pause", "session.open"}
    log = json.dumps(await service.audit())
    assert not [word for word in (seen.told["key"], ADMIN, NODE) if word in log]


async def test_nothing_outside_is_written_read_or_killed(service: Service) -> None:
    server = service.gateway
    secret = service.secret
    hidden = [secret, server.folder / "polar.yaml", server.folder / "data", service.sessions]
    seen = await service.attack(
        """
        import ctypes, glob, signal
        def tried(do, *args):
            try:
                do(*args)
                return "done"
            except OSError as error:
                return "refused"
        place = ["/etc/passwd", "/etc/x", "/usr/bin/x", "/bin/sh", "/x", "/run/x", "/var/x",
                 "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/mem", "/dev/sda", "/dev/x",
                 "/run/polar/supervisor.py", "/sys/x"]
        tell("written", [path for path in place if tried(open, path, "ab") == "done"])
        tell("read", [path for path in json.loads(os.environ["HIDDEN"]) if os.path.lexists(path)])
        pid, libc = int(os.environ["GATEWAY"]), ctypes.CDLL(None, use_errno=True)
        tell("killed", [tried(os.kill, each, signal.SIGKILL) for each in (pid, os.getppid(), 1)])
        tell("traced", [libc.ptrace(16, each, 0, 0) for each in (pid, 1)])
        tell("mounted", [libc.mount(b"none", b"/mnt", b"tmpfs", 0, None), libc.unshare(0x10000000), libc.setns(0, 0)])
        token = "admin-token" + "-of-the-tests"
        found = []
        for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/maps"):
            try:
                text = open(path, "rb").read().decode("latin-1")
            except OSError:
                continue
            if token in text or "node-token" + "-of-the-tests" in text:
                found.append(path)
        tell("tokens", found)
        tell("environment", sorted(os.environ))
        tell("alive", chat()[0])
        """,
        env={"GATEWAY": str(server.process.pid), "HIDDEN": json.dumps([str(path) for path in hidden])},
    )
    told = seen.told
    assert told["written"] == []
    assert told["read"] == []
    assert told["killed"][0] == "refused"
    assert told["traced"] == [-1, -1]
    assert told["mounted"] == [-1, -1, -1]
    assert told["tokens"] == []
    assert not [name for name in told["environment"] if "TOKEN" in name or name.startswith("POLAR_A")]
    assert told["alive"] == 200
    assert secret.exists()
    assert server.process.poll() is None


async def test_nothing_is_left_behind(service: Service) -> None:
    """No process, no listener and no disk space; and none of it is at work while the evaluator looks."""
    mark = f"{10**8 + secrets.randbelow(10**8)}.25"
    seen = await service.attack(
        f"""
        import subprocess
        for depth in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.closerange(0, 99)
                    loop = "while :; do echo 1 > reward.txt; sleep {mark}; done"
                    os.execvp("sh", ["sh", "-c", "trap '' TERM HUP INT; " + loop])
                os._exit(0)
        with open("big", "wb") as file:
            for _ in range(32):
                file.write(os.urandom(1 << 20))
        tell("size", os.path.getsize("big"))
        """,
        evaluator={"strategy": "test_on_output", "config": {"test_command": f"! pgrep -f {mark[:5]} && test -s big"}},
    )
    assert seen.told["size"] == 32 << 20
    assert seen.result.status == "COMPLETED", seen.result.error
    for process in psutil.process_iter(["cmdline"]):
        assert not any(mark in word for word in process.info["cmdline"] or []), process
    (attempt,) = (service.sessions / seen.result.session_id).iterdir()
    await until(lambda: not (attempt / "runtime").exists())
    assert sum(path.stat().st_size for path in attempt.rglob("*") if path.is_file()) < 1 << 20


async def test_links_in_the_workspace_lead_nowhere(service: Service) -> None:
    secret = service.secret
    seen = await service.attack(
        """
        secret = os.environ["SECRET"]
        os.symlink(secret, "leak"), os.symlink("/", "root"), os.symlink("..", "up"), os.mkfifo("pipe")
        os.symlink("/proc/self/environ", "environ"), os.symlink(secret, "expected.txt"), os.symlink("/etc", "tests")
        """,
        env={"SECRET": str(secret)},
        runtime={"eval_prepare": ["rm -rf expected.txt; echo good > expected.txt"]},
        evaluator={
            "strategy": "test_on_output",
            "config": {
                "test_command": f"cat leak root{secret} up/../..{secret} 2>&1; ls root/home up; "
                "tr '\\0' ' ' < environ; cat expected.txt",
            },
        },
    )
    text = json.dumps(seen.result.trajectory.metadata["evaluation"])
    assert "No such file" in text
    assert "good" in text
    for word in (secret.read_text().strip(), ADMIN, NODE):
        assert word not in text


async def test_the_evaluator_is_not_fooled_by_files(service: Service) -> None:
    """The agent replaces the tests, their runner's settings and what they are told to say."""
    seen = await service.attack(
        """
        open("check.sh", "w").write("exit 0")
        open("sitecustomize.py", "w").write("raise SystemExit(0)")
        os.makedirs("../home/agent/bin", exist_ok=True) if os.access("..", os.W_OK) else None
        open(os.path.expanduser("~/.bashrc"), "w").write("exit 0")
        open("/tmp/passed", "w").write("1")
        open("reward.txt", "w").write("1")
        """,
        runtime={"eval_prepare": ["echo 'grep -q 42 answer.txt' > check.sh"]},
        evaluator={"strategy": "test_on_output", "config": {"test_command": "test ! -e /tmp/passed && sh check.sh"}},
    )
    assert seen.result.status == "COMPLETED"
    assert seen.result.trajectory.metadata["evaluation"]["outcome_reward"] == 0.0


async def test_floods_end_at_their_own_session(service: Service) -> None:
    seen = await service.attack(
        """
        import concurrent.futures, time
        def many(count, do):
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                return list(pool.map(do, range(count)))
        codes = many(32, lambda index: chat("call %d" % index)[0])
        tell("calls", {str(code): codes.count(code) for code in set(codes)})
        tell("body", chat("x" * (2 << 20))[0])
        head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer " + KEY
        nested = b"[" * 200000
        length = "\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(nested)
        tell("nested", raw((head + length).encode() + nested)[9:12])
        tell("head", raw(b"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n" + b"X-Long: " + b"y" * (1 << 20))[9:12])
        tell("garbage", raw(os.urandom(4096) + b"\\r\\n\\r\\n")[:12])
        links, refused = [], 0
        for _ in range(700):
            link = socket.create_connection(("127.0.0.1", 8080), timeout=30)
            link.setblocking(False)
            links.append(link)
        time.sleep(1)
        for link in links:
            try:
                refused += link.recv(12) != b"never"
            except BlockingIOError:
                pass
        tell("connections refused", refused)
        for link in links:
            link.close()
        time.sleep(1)
        tell("afterwards", chat()[0])
        """
    )
    told = seen.told
    assert seen.result.status == "COMPLETED", seen.result.error
    assert told["calls"].get("200", 0) >= CALLS
    assert set(told["calls"]) <= {"200", "429", "503", "529"}
    assert sum(told["calls"].values()) == 32
    assert len(told["calls"]) > 1, "no call was refused"
    assert told["body"] == 413
    assert told["nested"] == "400"
    assert told["head"] in ("431", "")
    assert told["connections refused"] >= 700 - 512
    assert told["afterwards"] == 200
    with urllib.request.urlopen(f"{service.server.url}/health", timeout=10) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "workdir", ["/", "/etc", "/proc/self", "/usr/local/x", "relative", "/workspace/../etc", "/run/polar"]
)
async def test_a_workspace_is_a_place_of_its_own(service: Service, workdir: str) -> None:
    shell = {"harness": "shell", "custom_shell": {"command": "true"}}
    body = {"task_id": "workdir", "instruction": "-", "agent": shell, "runtime": {"workdir": workdir}}
    headers = {"Authorization": f"Bearer {ADMIN}"}
    answer = httpx.post(f"{service.server.url}/rollout/task/submit", json=body, headers=headers)
    assert answer.status_code == 422
    assert "workdir" in answer.text


async def test_what_the_operator_takes_out_is_nowhere(service: Service) -> None:
    seen, failed = [
        await service.attack(
            f"""
            word = "the word is <xylo" + "phone>"
            function = {{"name": "f", "description": word, "parameters": {{"type": "object", "description": word}}}}
            tell("chat", ask("POST", "/v1/chat/completions", {{
                "model": "m", "messages": [{{"role": "user", "content": {content}}}], "stop": [word],
                "tools": [{{"type": "function", "function": function}}]}})[0])
            print(word, flush=True)
            sys.exit({ending})
            """,
            evaluator={"strategy": "test_on_output", "config": {"test_command": "printf '<xylo%s>' phone"}},
        )
        for content, ending in (("word", "0"), ("'hello'", "word"))
    ]
    assert (seen.told["chat"], failed.told["chat"]) == (200, 200)
    assert (seen.result.status, failed.result.status) == ("COMPLETED", "ERROR")
    assert "[gone]" in str(failed.result.error)
    assert "[gone]" in json.dumps(seen.result.trajectory.metadata["evaluation"])
    async with service.client() as client:
        for each in (seen, failed):
            (call,) = (await client.get(f"/sessions/{each.result.session_id}/completions"))["completions"]
            assert "[gone]" in json.dumps(call)
            assert call["fate"] == "redacted"
    for part in service.parts:
        for path in part.folder.rglob("*"):
            assert not path.is_file() or b"<xylophone>" not in path.read_bytes(), path
