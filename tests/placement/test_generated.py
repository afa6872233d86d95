"""The files for Slurm and Kubernetes: our own command line and settings take what is in them, and no token is."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from polar.cli import command_line
from polar.settings import ServeConfig, load_settings
from tests.cli.making import Forked, refused

SETTINGS = {
    "insecure": True,
    "port": 9000,
    "out": "/scratch/it's polar",
    "engines": [{"kind": "vllm", "url": "http://engine:8000"}],
    "limits": {"drain_seconds": 400},
    "server": "http://server:8080",
}
TOKEN = "node-token-that-nobody-may-see"


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "polar.yaml"
    path.write_text(yaml.safe_dump(SETTINGS))
    return path


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "node.token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def parsed(args: list[str]) -> dict[str, Any]:
    """What ``polar ARGS`` is told, by its own parser."""
    name, *rest = args
    command: Any = get_command(command_line([name]))
    command = getattr(command, "commands", {name: command})[name]
    return dict(command.make_context(name, rest).params)


def served(args: list[str], path: Path | None) -> ServeConfig:
    """The settings with which ``polar serve ARGS`` would begin."""
    told = parsed(args)
    names = ("role", "host", "port", "server", "node_id", "public_url", "store", "out")
    said = {name: told[name] for name in names if told[name] is not None}
    return load_settings(path, {**said, **({"insecure": True} if told["insecure"] else {})})


# ---- Slurm -----------------------------------------------------------------------------------------------


def make_script(polar: Forked, settings: Path, token_file: Path, *more: str) -> str:
    line = ["up", "--slurm", "-c", settings, "--token-file", token_file, "--nodes", "3", *more]
    done = polar(line, settings.parent)
    assert (done.code, done.err) == (0, "")
    return done.out


STUBS = {
    # The job's own node is the only one; the last call's step runs beside.
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexport SLURMD_NODENAME=n1\nexec "$@"\n',
    "scontrol": 'echo "NodeName=n1 Arch=x86_64 NodeAddr=10.9.8.7 NodeHostName=n1"\n',
    "polar": """printf '%s\\n' "$@" >"$OUT/args-$(ls "$OUT" | wc -l)"
printf %s "$POLAR_NODE_TOKEN" >"$OUT/../token"
[ -e "$OUT/../crash" ] && { rm "$OUT/../crash"; exit 1; }
[ -e "$OUT/../refuse" ] && exit 2
trap 'kill $!; exit 0' TERM
echo up >"$OUT/../up"
sleep 60 &
wait
""",
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on a cluster that is stubs."""
    for name, text in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text("#!/bin/bash\n" + text)
        stub.chmod(0o700)
    (tmp_path / "calls").mkdir()
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": "7", "OUT": str(tmp_path / "calls"), "TMPDIR": str(tmp_path)}


def begin(script: str, job: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", script], env=job, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)


def test_the_script_is_bash_and_asks_for_its_last_call(polar: Forked, settings: Path, token_file: Path):
    script = make_script(polar, settings, token_file)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    asked = re.findall(r"^#SBATCH (\S+)$", script, re.MULTILINE)
    assert {"--nodes=3", "--ntasks-per-node=1", "--signal=B:TERM@460"} <= set(asked)
    assert TOKEN not in script


def test_a_gateway_is_begun_as_the_command_line_takes_it(
    polar: Forked, settings: Path, token_file: Path, job: dict[str, str], tmp_path: Path
):
    process = begin(make_script(polar, settings, token_file), job)
    wait_for(tmp_path / "up", process)
    process.terminate()
    assert process.wait(30) == 0, process.stdout
    (args,) = (tmp_path / "calls").iterdir()
    line = args.read_text().splitlines()
    assert TOKEN not in args.read_text()
    assert (tmp_path / "token").read_text() == TOKEN
    config = served(line, settings)
    assert (config.role, config.server, config.name) == ("gateway", "http://server:8080", "n1")
    assert (config.public_url, config.port) == ("http://10.9.8.7:9000", 9000)
    assert config.out == "/scratch/it's polar/n1"


@pytest.mark.slow
def test_a_gateway_that_breaks_is_begun_again(
    polar: Forked, settings: Path, token_file: Path, job: dict[str, str], tmp_path: Path
):
    (tmp_path / "crash").touch()
    process = begin(make_script(polar, settings, token_file), job)
    wait_for(tmp_path / "up", process)
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "has ended (1); begun again" in out
    assert len(list((tmp_path / "calls").iterdir())) == 2


def test_a_gateway_that_can_not_begin_ends_the_job(
    polar: Forked, settings: Path, token_file: Path, job: dict[str, str], tmp_path: Path
):
    (tmp_path / "refuse").touch()
    process = begin(make_script(polar, settings, token_file), job)
    assert process.wait(30) == 2


def test_a_token_that_others_can_read_is_refused(
    polar: Forked, settings: Path, token_file: Path, job: dict[str, str], tmp_path: Path
):
    token_file.chmod(0o644)
    process = begin(make_script(polar, settings, token_file), job)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "chmod 600" in out
    assert not list((tmp_path / "calls").iterdir())


# ---- Kubernetes ------------------------------------------------------------------------------------------


def objects(polar: Forked, settings: Path, *more: str) -> dict[str, dict[str, Any]]:
    done = polar(["up", "--kubernetes", "-c", settings, "--nodes", "4", *more], settings.parent)
    assert (done.code, done.err) == (0, "")
    found = {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(done.out)}
    assert all(each["apiVersion"] in ("v1", "apps/v1") for each in found.values())
    return found


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def check_workload(workload: dict[str, Any], others: dict[str, dict[str, Any]]) -> None:
    """What a cluster would refuse: names that lead nowhere."""
    spec = workload["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    pod, container = spec["template"]["spec"], container_of(workload)
    made = {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])}
    volumes = {each["name"] for each in pod.get("volumes", [])} | made
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    for volume in pod.get("volumes", []):
        if "configMap" in volume:
            assert f"ConfigMap/{volume['configMap']['name']}" in others
        if "persistentVolumeClaim" in volume:
            assert f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}" in others
    given = {each["name"] for each in container["env"]}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert used <= given
    assert all("value" not in each for each in container["env"])


def test_gateways_keep_name_and_journal_and_have_time_to_drain(polar: Forked, settings: Path, tmp_path: Path):
    found = objects(polar, settings)
    workload = found["StatefulSet/polar-gateways"]
    check_workload(workload, found)
    assert workload["spec"]["replicas"] == 4
    assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > SETTINGS["limits"]["drain_seconds"]  # type: ignore[index]
    assert f"Service/{workload['spec']['serviceName']}" in found
    container = container_of(workload)
    own = tmp_path / "own.yaml"
    own.write_text(found["ConfigMap/polar-gateway"]["data"]["polar.yaml"])
    args = [
        each.replace("$(POD_NAME)", "polar-gateways-0").replace("$(POD_IP)", "10.1.2.3") for each in container["args"]
    ]
    config = served(args, own)
    assert (config.role, config.name, config.public_url) == ("gateway", "polar-gateways-0", "http://10.1.2.3:8080")
    assert config.server == "http://polar:8080"
    assert "Service/polar" in found
    assert config.engines[0].url == "http://engine:8000"
    assert container["ports"] == [{"containerPort": config.port}]


def test_the_server_is_one_with_a_file_and_two_with_postgresql(polar: Forked, settings: Path):
    found = objects(polar, settings)
    check_workload(found["Deployment/polar"], found)
    assert found["Deployment/polar"]["spec"]["replicas"] == 1
    assert found["Deployment/polar"]["spec"]["strategy"] == {"type": "Recreate"}
    config = served(container_of(found["Deployment/polar"])["args"], None)
    assert (config.role, config.host, config.store) == ("rollout", "0.0.0.0", None)
    url = "postgresql://polar@database/polar"
    found = objects(polar, settings, "--store", url)
    check_workload(found["Deployment/polar"], found)
    assert found["Deployment/polar"]["spec"]["replicas"] == 2
    assert "PersistentVolumeClaim/polar" not in found
    container = container_of(found["Deployment/polar"])
    assert served(container["args"], None).store == url
    assert "PGPASSWORD" in {each["name"] for each in container["env"]}


def test_tokens_come_from_the_secret(polar: Forked, settings: Path):
    found = objects(polar, settings)
    for name, wanted in (
        ("Deployment/polar", {"POLAR_ADMIN_TOKEN", "POLAR_NODE_TOKEN", "POLAR_CALLBACK_SECRET"}),
        ("StatefulSet/polar-gateways", {"POLAR_NODE_TOKEN"}),
    ):
        env = container_of(found[name])["env"]
        assert {each["name"] for each in env if "secretKeyRef" in each["valueFrom"]} == wanted


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
def test_only_the_sandbox_asks_for_more_than_a_pod_has(polar: Forked, settings: Path, sandbox: str):
    settings.write_text(yaml.safe_dump({**SETTINGS, "runtimes": {"sandbox": sandbox}}))
    found = objects(polar, settings)
    pod = found["StatefulSet/polar-gateways"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert ("hostUsers" in pod) == (sandbox == "bubblewrap")
    assert ("securityContext" in pod["containers"][0]) == (sandbox == "bubblewrap")


# ---- what can't be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--ray", "--slurm", "--kubernetes"]),
        (["--ray", "--slurm"], ["one of"]),
        (["--slurm"], ["server"]),
        (["--slurm", "-c", "polar.yaml"], ["--token-file"]),
        (["--slurm", "-c", "polar.yaml", "--token-file", "x", "--nodes", "0"], ["--nodes"]),
        (["--ray", "-c", "polar.yaml"], ["POLAR_NODE_TOKEN"]),
        (["--ray", "-c", "none.yaml"], ["none.yaml"]),
    ],
)
def test_what_can_not_be_is_said(polar: Forked, settings: Path, args: list[str], words: list[str]):
    assert refused(polar(["up", *args], settings.parent), 2, *words)


def test_a_network_that_is_not_trusted_needs_tls(polar: Forked, settings: Path):
    settings.write_text(yaml.safe_dump({**SETTINGS, "insecure": False}))
    for kind in ("--ray", "--kubernetes"):
        assert refused(polar(["up", kind, "-c", settings], settings.parent), 2, "tls", "insecure")


def test_without_ray_the_extra_is_named(polar: Forked, settings: Path):
    done = polar(["up", "--ray", "-c", settings], settings.parent, POLAR_NODE_TOKEN=TOKEN)
    assert refused(done, 2, "polar[ray]")
