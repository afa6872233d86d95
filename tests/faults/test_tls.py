"""A server and a gateway that speak TLS with a certificate of a private CA, which clients know by SSL_CERT_FILE."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from polar.config import parse_task
from polar.contract.arrays import to_json
from tests.cli.making import ScriptedProcess, agent, environment, task
from tests.faults.fleet import ADMIN, NODE, PATIENCE, Part
from tests.support.ports import free_port

READER = "reader-token-of-the-tests"
TRAINER = """
import asyncio, sys
from pathlib import Path
from polar.client import RolloutClient
from polar.contract.arrays import from_json
from polar.contract.task import TaskRequest

async def main():
    async with RolloutClient(sys.argv[1], sys.argv[2], patience=1.0) as polar:
        await polar.submit(from_json(Path(sys.argv[3]).read_bytes(), TaskRequest))
        print((await polar.wait("t")).status)

asyncio.run(main())
"""
"""Submits a task and waits for it."""


def openssl(folder: Path, *line: str) -> None:
    subprocess.run(["openssl", *line], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with ``ca.pem``, and ``cert.pem`` and ``key.pem`` of 127.0.0.1, signed by it."""
    folder = tmp_path / "certificates"
    folder.mkdir()
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    may = ["-days", "2", "-addext", "keyUsage=critical,keyCertSign"]
    openssl(folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=CA", *may)
    openssl(folder, "req", *key, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=polar")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2"]
    openssl(folder, "x509", "-req", "-in", "request.pem", "-out", "cert.pem", *signed)
    return folder


def a_part(folder: Path, certificates: Path, **settings: object) -> Part:
    port = free_port()
    tls = {"cert": str(certificates / "cert.pem"), "key": str(certificates / "key.pem")}
    own = {"port": port, "public_url": f"https://127.0.0.1:{port}", "tls": tls, "out": "data", **settings}
    return Part(folder.name, own, folder)


def trainer(part: Part, body: Path, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", TRAINER, part.url, ADMIN, str(body)]
    return subprocess.run(line, env=environment(**env), capture_output=True, text=True, timeout=PATIENCE)


async def test_a_service_over_tls_is_known_by_its_private_ca_and_by_nothing_else(
    engine: ScriptedProcess, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = tmp_path / "task.json"
    shell = {"harness": "shell", "custom_shell": {"command": agent(1)}, "env": {"RECEIVED": str(tmp_path / "got")}}
    body.write_bytes(to_json(parse_task(task("t", agent=shell))))
    ca = str(certificates / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", ca)
    monkeypatch.setenv("READER", READER)
    server = a_part(tmp_path / "server", certificates, role="rollout")
    node = a_part(
        tmp_path / "node",
        certificates,
        role="gateway",
        server=server.url,
        node_id="node",
        engines=[{"kind": "openai", "url": engine.url}],
        runtimes={"sandbox": "none"},
        auth={"tokens": [{"name": "watcher", "role": "read", "env": "READER"}]},
        log="json",
    )
    try:
        for part in (server, node):
            part.start()
        for part in (server, node):
            await asyncio.to_thread(part.wait)
        done = await asyncio.to_thread(trainer, server, body, SSL_CERT_FILE=ca)
        assert done.stdout.splitlines() == ["completed"], done.stderr
        without = await asyncio.to_thread(trainer, server, body, SSL_CERT_FILE=os.devnull)
        assert "CERTIFICATE_VERIFY_FAILED" in without.stderr
        opened = json.loads(await asyncio.to_thread(ask, f"{server.url}/sessions", ADMIN, b"{}"))
        assert opened["base_urls"]["anthropic"] == node.url  # the server has asked the gateway
        families = await asyncio.to_thread(ask, f"{node.url}/metrics", READER)
        assert 'polar_stage_wait_seconds_count{stage="run"} 1.0' in families
        assert 'polar_engine_wait_seconds_count{reason="pause",url=""} 1.0' in families
        assert "polar_sessions" not in families  # the ledger's
        assert '"session_id": "t-0", "attempt": 1, "status": "COMPLETED"' in node.said()
        assert NODE not in node.said()
    finally:
        for part in (node, server):
            if part.process is not None:
                part.process.kill()
                part.process.wait(30)


def ask(url: str, token: str, body: bytes | None = None) -> str:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20) as reply:
        text: str = reply.read().decode()
    return text
