"""The embedded default: sandboxes on this machine, in milliseconds, without a daemon, root or an image.

``BubblewrapBackend`` puts walls around every session: namespaces of its own for users, processes, network,
IPC and names, the system's programs read-only, and nothing of the user's. The model is reached at
``http://127.0.0.1:8080``, through a socket that listens inside and is served by the gateway outside.

What it does not do: the kernel is shared. Memory and processes are sampled four times a second (where memory is not
limited, once), and a breach ends the session's commands: a fast enough one is seen late. ``cpus`` is an affinity that
a program may undo. Disk use is not limited. With ``allow_internet`` the network is the host's own, loopback included.
Give work that you believe hostile a machine of its own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from polar.contract.runtime import Command, Mount, RuntimeFailure
from polar.contract.task import RuntimeSpec
from polar.runtimes import bubblewrap
from polar.runtimes.base import Probe
from polar.runtimes.sandbox import OWN_PROGRAMS, LocalRuntime, Place, absolute, prepare_folder, refuse_unsupported
from polar.runtimes.supervised import Limits, Supervised, interpreter

HOME = "/home/agent"
WORKDIR = "/workspace"
PORT = 8080
NOT_FOUND = "bubblewrap is not installed"
INSTALL = "apt-get install bubblewrap, or pip install 'polar[sandbox]'"
REFUSED = (
    "use Linux 5.8 or newer, allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined), or pass --no-sandbox where no isolation is needed"
)


class BubblewrapBackend:
    """Sandboxes made by bubblewrap.

    Args:
        limits: processes and output a sandbox may have; cpus and memory come from the task.
    """

    name = "local"

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()

    async def probe(self) -> Probe:
        """Start a sandbox, run a command in it, and see that its listener is there."""
        bwrap = bubblewrap.find_bwrap()
        if bwrap is None:
            return Probe(False, NOT_FOUND, INSTALL)
        with tempfile.TemporaryDirectory(prefix="polar-probe-") as name:
            folder = Path(name)
            try:
                runtime = await self.create(RuntimeSpec(), folder=folder / "sandbox")
                try:
                    result = await runtime.exec(Command("true | true"), timeout=20, logs=folder, name="probe")
                finally:
                    await runtime.close()
            except RuntimeFailure as error:
                return Probe(False, f"{bwrap}: {error}", REFUSED)
            if result.exit_code != 0:
                return Probe(False, f"{bwrap}: a command inside ended with {result.exit_code}", REFUSED)
        return Probe(True, f"bubblewrap at {bwrap}: isolated, without network, commands run")

    async def create(self, spec: RuntimeSpec, *, folder: Path, mounts: Sequence[Mount] = ()) -> LocalRuntime:
        """A sandbox under ``folder`` (made if need be).

        Raises:
            RuntimeFailure: bubblewrap is missing or refused; the message says what to do.
            UsageError: the spec asks for what this backend hasn't.
        """
        return await self._make(spec, folder, tuple(mounts), port=None if spec.allow_internet else PORT)

    def check(self, spec: RuntimeSpec) -> None:
        """See that the spec asks for nothing that this backend hasn't."""
        refuse_unsupported(spec)
        _plan(spec, Path("/"), ()).check()

    async def _make(
        self, spec: RuntimeSpec, folder: Path, mounts: tuple[Mount, ...], *, port: int | None
    ) -> LocalRuntime:
        refuse_unsupported(spec)
        bwrap = bubblewrap.find_bwrap()
        if bwrap is None:
            raise RuntimeFailure(f"{NOT_FOUND}: {INSTALL}")
        folder = absolute(folder)
        plan = _plan(spec, folder, mounts)
        plan.check()
        lock = await prepare_folder(folder)
        place = Place(folder, lock, spec.workdir or WORKDIR, HOME, plan.writable, read_only=plan.read_only)
        try:
            await asyncio.to_thread(bubblewrap.fill_root, plan.root)
            inner = await Supervised.start(
                bubblewrap.walls(bwrap, plan),
                limits=self._limits.of(spec),
                port=port,
                log=folder / "root" / ".start.log",
            )
        except BaseException:
            await place.remove()
            raise

        async def another(target: Path) -> LocalRuntime:
            return await self._make(spec, target, mounts, port=None)

        return LocalRuntime(place, inner, env=_environment(spec), another=another)


def _plan(spec: RuntimeSpec, folder: Path, mounts: tuple[Mount, ...]) -> bubblewrap.Plan:
    workdir = spec.workdir or WORKDIR
    writable = {"/tmp": folder / "tmp", HOME: folder / "home", workdir: folder / "workspace"}
    return bubblewrap.Plan(folder / "root", writable, mounts, network=spec.allow_internet)


def _environment(spec: RuntimeSpec) -> dict[str, str]:
    path = f"{HOME}/{OWN_PROGRAMS}:{bubblewrap.PATH}"
    if bubblewrap.python_prefix():
        path += f":{interpreter().parent}"
    return {"PATH": path, "USER": "agent", "LOGNAME": "agent", "TMPDIR": "/tmp", **spec.env}
