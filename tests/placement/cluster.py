"""Ray on two hosts. It is fetched once, into a venv of its own under ``$POLAR_HOME``: it is large, and no part of the
product needs it but one."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.making import POLAR, REPO, environment
from tests.faults.fleet import NODE
from tests.placement.hosts import Host

RAY = "2.60.0"
PORT = 6379
_DETECT = {
    # A node that is cut off is found out in 8 seconds, not in a minute.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
START_SECONDS = 300


def ray_venv() -> Path:
    """A venv with Ray and what Polar needs; of two builders at once the second waits."""
    home = Path(os.environ.get("POLAR_HOME") or Path.home() / ".cache" / "polar") / "ray"
    home.mkdir(parents=True, exist_ok=True)
    venv = home / f"{RAY}-py{sys.version_info.major}{sys.version_info.minor}"
    with (home / f".{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / ".installed").is_file():
            shutil.rmtree(venv, ignore_errors=True)
            _run(sys.executable, "-m", "venv", str(venv))
            pip = str(venv / "bin" / "pip")
            _run(pip, "install", "--quiet", "uv>=0.9,<1")
            install = [
                str(venv / "bin" / "uv"),
                "pip",
                "install",
                "--quiet",
                "--python",
                str(venv / "bin" / "python"),
            ]
            install += ["--constraint", str(REPO / "constraints.txt"), "-r", str(REPO / "pyproject.toml")]
            _run(*install, f"ray=={RAY}")
            (venv / ".installed").touch()
    return venv


def _run(*line: str) -> None:
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""
    subprocess.run(line, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "UV_FIND_LINKS": links})


class Cluster:
    """A Ray cluster: ``start`` puts a node on a host."""

    def __init__(self, head: Host, folder: Path, venv: Path) -> None:
        self.address = f"{head.address}:{PORT}"
        self.folder = folder
        """Its files and logs. Short: there are sockets in it."""
        self._head = head
        self._bin = venv / "bin"

    def start(self, host: Host, **resources: float) -> None:
        """A node that has ``resources``, once it is there."""
        first = ["--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", str(self.folder)]
        line = [
            *(str(self._bin / "ray"), "start", "--node-ip-address", host.address, "--disable-usage-stats"),
            *(first if host == self._head else ["--address", self.address]),
            *("--num-cpus", "2", "--object-store-memory", str(100 * 2**20)),
            *("--resources", "{" + ", ".join(f'"{name}": {value}' for name, value in resources.items()) + "}"),
        ]
        subprocess.run(host.inside(line), env=self.env, check=True, timeout=START_SECONDS, stdout=subprocess.DEVNULL)

    @property
    def env(self) -> dict[str, str]:
        """Of Ray, and of all that it starts; the node token is not in it."""
        path = f"{self._bin}:{os.environ['PATH']}"
        return environment(PATH=path, PYTHONPATH=f"{REPO / 'src'}", POLAR_LOG="INFO", **_DETECT)

    @contextmanager
    def up(self, args: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """``polar up --ray ARGS`` until the block ends; what it says is in ``log``."""
        line = [str(self._bin / "python"), *POLAR[1:], "up", "--ray", "--address", self.address, *args]
        with log.open("wb") as out:
            process = subprocess.Popen(
                line, env={**self.env, "POLAR_NODE_TOKEN": NODE}, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)
