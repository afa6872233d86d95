"""A real PostgreSQL of our own, in a folder of its own: started, killed and started again as a test needs it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import psycopg

from tests.support.missing import missing
from tests.support.ports import free_port

USER, PASSWORD = "polar", "secret"


def binaries() -> Path:
    """The folder with ``initdb`` and ``postgres``; without one the test is skipped, or fails where one must be."""
    found = [each for each in _candidates() if (each / "initdb").is_file() and (each / "postgres").is_file()]
    if not found:
        missing("no PostgreSQL server here (initdb is not on PATH): install one (Debian: postgresql)")
    return found[0]


def _candidates() -> list[Path]:
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    if shutil.which("pg_config"):
        asked = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, timeout=20)
        folders.append(Path(asked.stdout.strip() or "."))
    usual = Path("/usr/lib/postgresql"), Path("/usr/local/pgsql")
    return folders + [found.parent for place in usual for found in sorted(place.glob("**/bin/initdb"), reverse=True)]


class Server:
    """A PostgreSQL on loopback (passwords) and on a socket (none). ``durable``: it syncs to disk as in real use."""

    def __init__(self, *, durable: bool = False) -> None:
        self._bin = binaries()
        self.folder = Path(tempfile.mkdtemp(prefix="polar-pg-"))
        self.port = free_port()
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None
        self._identity: dict[str, object] = {}
        if os.geteuid() == 0:  # which PostgreSQL refuses to run as
            names = [user.pw_name for user in pwd.getpwall()]
            user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
            self._identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        made = self._call(
            *("initdb", "-D", str(self._data), "-U", USER, f"--pwfile={secret}", "-E", "UTF8", "--no-locale"),
            *("--auth-local=trust", "--auth-host=scram-sha-256", "--no-sync"),
        )
        assert made.returncode == 0, made.stderr.decode()

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def url(self, database: str = "postgres", *, user: str = USER, password: str | None = None) -> str:
        """Over the socket, or with a password over loopback."""
        if password is None:
            return f"postgresql://{user}@/{database}?host={self.folder}&port={self.port}"
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Returns when it takes connections."""
        options = [] if self._durable else ["fsync=off", "synchronous_commit=on", "full_page_writes=off"]
        settings = [f"port={self.port}", f"unix_socket_directories={self.folder}", "listen_addresses=127.0.0.1"]
        settings += ["shared_buffers=16MB", "max_connections=40", "autovacuum=off", *options]
        deadline = time.monotonic() + 60
        while True:
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    [str(self._bin / "postgres"), "-D", str(self._data), *(f"-c{each}" for each in settings)],
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    **self._identity,  # type: ignore[call-overload]
                )
            if self._answers(deadline):
                return
            # Killed before, its last backends may still hold the shared memory.
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]

    def _answers(self, deadline: float) -> bool:
        assert self._process is not None
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                psycopg.connect(self.url(), connect_timeout=5).close()
                return True
            except psycopg.OperationalError:
                time.sleep(0.05)
        return False

    def kill(self) -> None:
        """SIGKILL to the server and everything it has started."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        family = [server, *server.children(recursive=True)]
        for each in family:
            each.kill()
        self._process.wait(timeout=30)
        psutil.wait_procs(family, timeout=30)

    def stop(self) -> None:
        """Shut down in order; its folder stays."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(timeout=60)

    def remove(self) -> None:
        """Stop, and leave nothing behind."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, *statements: str) -> list[tuple[object, ...]]:
        """Rows of the last of these statements."""
        with psycopg.connect(self.url(), autocommit=True) as db:
            rows: list[tuple[object, ...]] = []
            for statement in statements:
                cursor = db.execute(statement.encode())
                rows = cursor.fetchall() if cursor.description else []
            return rows

    def clean(self) -> None:
        """As if no store had ever been in it."""
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'polar'",
            "DROP SCHEMA IF EXISTS polar CASCADE",
        )

    def _call(self, program: str, *args: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [str(self._bin / program), *args],
            capture_output=True,
            timeout=120,
            cwd=self.folder,
            **self._identity,  # type: ignore[call-overload]
        )
