"""Plain processes, for where no sandbox can be had and none is needed: on explicit choice only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from polar.contract.errors import UsageError
from polar.contract.runtime import Command, Mount, RuntimeFailure
from polar.contract.task import RuntimeSpec
from polar.runtimes.base import Probe
from polar.runtimes.sandbox import OWN_PROGRAMS, LocalRuntime, Place, absolute, prepare_folder, refuse_unsupported
from polar.runtimes.supervised import Limits, Supervised


class ProcessBackend:
    """Commands as plain processes of this user.

    What it does: a folder of its own for each session, with HOME, workspace and TMPDIR in it; a cleared
    environment; time, memory and process limits; the whole process tree ended at a timeout and at the end, also
    children that left their session, and also when the gateway is killed.

    What it does not protect from: a command can read and change whatever the user can, other sessions and
    Polar's own results included; it has the host's network; it can kill what watches it and live on.
    """

    name = "local"

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()

    async def probe(self) -> Probe:
        """Run a command."""
        with tempfile.TemporaryDirectory(prefix="polar-probe-") as name:
            folder = Path(name)
            try:
                runtime = await self.create(RuntimeSpec(), folder=folder / "processes")
                try:
                    result = await runtime.exec(Command("true | true"), timeout=20, logs=folder, name="probe")
                finally:
                    await runtime.close()
            except RuntimeFailure as error:
                return Probe(False, str(error), "use Linux 5.3 or newer")
        return Probe(result.exit_code == 0, "plain processes: no isolation at all")

    def check(self, spec: RuntimeSpec) -> None:
        """See that the spec asks for no other root, network or place than the host's."""
        refuse_unsupported(spec)
        if spec.workdir is not None:
            raise UsageError("runtime.workdir needs a sandbox: without one the workspace is a folder of the session")
        if spec.network == "none":
            raise UsageError("runtime.network none needs a sandbox: plain processes have the host's network")

    async def create(self, spec: RuntimeSpec, *, folder: Path, mounts: Sequence[Mount] = ()) -> LocalRuntime:
        """A session's folder under ``folder`` and a process that watches over its commands.

        Raises:
            UsageError: the spec asks for another root, network or place than the host's.
        """
        self.check(spec)
        for mount in mounts:
            if mount.target not in (None, str(mount.source)):
                raise UsageError(f"{mount.source} can't be shown as {mount.target} without a sandbox")
        folder = absolute(folder)
        lock = await prepare_folder(folder)
        workdir, home, tmp = (str(folder / part) for part in ("workspace", "home", "tmp"))
        place = Place(folder, lock, workdir, home, {path: Path(path) for path in (workdir, home, tmp)})
        path = f"{home}/{OWN_PROGRAMS}:{os.environ.get('PATH', os.defpath)}"
        try:
            inner = await Supervised.start(
                [],
                limits=self._limits.of(spec),
                port=None,
                log=folder / "root" / ".start.log",
            )
        except BaseException:
            await place.remove()
            raise

        async def another(target: Path) -> LocalRuntime:
            return await self.create(spec, folder=target, mounts=mounts)

        return LocalRuntime(place, inner, env={"PATH": path, "TMPDIR": tmp, **spec.env}, another=another)
