"""Ray on two hosts. It is fetched once, into a venv of its own under ``$POLAR_HOME``: it is large, and no part of the
product needs it but one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.making import POLAR, REPO, environment
from tests.faults.fleet import NODE
from tests.placement.hosts import Host
from tests.support.missing import missing

RAY = "2.60.0"
PORT = 6379
_SETTINGS = {
    "RAY_worker_register_timeout_seconds": "120",  # on a busy machine
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
            try:
                _install(venv)
            except (OSError, subprocess.CalledProcessError) as error:
                missing(f"Ray {RAY} can't be fetched: {error}")
    return venv


def _install(venv: Path) -> None:
    uv = str(Path(sys.executable).with_name("uv"))
    line = [uv, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python")]
    line += ["--constraint", str(REPO / "constraints.txt"), "-r", str(REPO / "pyproject.toml"), f"ray=={RAY}"]
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""
    env = {**os.environ, "UV_FIND_LINKS": links}
    for each in ([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)], line):
        subprocess.run(each, check=True, stdin=subprocess.DEVNULL, env=env)
    (venv / ".installed").touch()


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
        first = ["--head", "--port", str(PORT), "--temp-dir", str(self.folder)]
        first += ["--include-dashboard=false", "--no-monitor"]  # we have no autoscaler
        line = [
            *(str(self._bin / "ray"), "start", "--node-ip-address", host.address, "--disable-usage-stats"),
            *(first if host == self._head else ["--address", self.address]),
            *("--include-log-monitor", "false"),
            *("--num-cpus", "0", "--object-store-memory", str(100 * 2**20)),  # no CPU: no worker before it is needed
            *("--resources", "{" + ", ".join(f'"{name}": {value}' for name, value in resources.items()) + "}"),
        ]
        subprocess.run(host.inside(line), env=self.env, check=True, timeout=START_SECONDS, stdout=subprocess.DEVNULL)

    def need(self, host: Host, **resources: float) -> None:
        """A node there, if there is none."""
        if not host.running("raylet/raylet"):
            self.start(host, **resources)

    @property
    def env(self) -> dict[str, str]:
        """Of Ray, and of all that it starts; the node token is not in it."""
        path = f"{self._bin}:{os.environ['PATH']}"
        return environment(PATH=path, PYTHONPATH=f"{REPO / 'src'}", POLAR_LOG="INFO", **_SETTINGS)

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
