"""Gateways in a job of a real Slurm cluster of two hosts: the last call drains them, a lost node loses no session."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polar.client import RolloutClient
from tests.cli.making import environment
from tests.cli.making import run as run_polar
from tests.faults.fleet import NODE, check_all, until
from tests.placement.conftest import TURNS
from tests.placement.hosts import Host
from tests.placement.site import OnSite, Site, short_folder, two_host_site
from tests.support.missing import missing

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
SBIN = f"{os.environ['PATH']}:/usr/sbin"
pytestmark = [pytest.mark.real, pytest.mark.slurm, pytest.mark.slow]
CONF = """
ClusterName=polar
SlurmctldHost={host}({first})
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
NodeName=n1 NodeAddr={first} NodeHostname={host} CPUs=2
NodeName=n2 NodeAddr={second} NodeHostname={host} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE
"""


class Slurm:
    """A cluster whose controller is on the first host."""

    def __init__(self, folder: Path, here: Host, there: Host) -> None:
        self.folder = folder
        conf = folder / "slurm.conf"
        text = CONF.format(host=socket.gethostname(), first=here.address, second=there.address, folder=folder)
        conf.write_text(text)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        path = f"{Path(sys.executable).parent}:{SBIN}"
        self.env = environment(SLURM_CONF=str(conf), PATH=path, TMPDIR=str(folder))
        self._daemons: list[subprocess.Popen[bytes]] = []
        files = [
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log",
        ]
        self._daemon(["munged", "--foreground", "--force", *files, f"--seed-file={folder}/seed", f"--key-file={key}"])
        self._daemon(["slurmctld", "-D"])
        self._daemon(["slurmd", "-D", "-N", "n1"])
        self._there = there
        self.begin_there()

    def begin_there(self) -> None:
        """The second node."""
        self._daemon(self._there.inside(["slurmd", "-D", "-N", "n2"]))

    def _daemon(self, line: list[str]) -> None:
        with (self.folder / "daemons.txt").open("ab") as out:
            process = subprocess.Popen(line, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self._daemons.append(process)

    def ask(self, *line: str, cwd: Path | None = None) -> str:
        done = subprocess.run(line, env=self.env, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout + done.stderr

    async def ready(self) -> None:
        await until(lambda: self.ask("sinfo", "-h", "-o", "%t %D").split() == ["idle", "2"], "two idle nodes")

    async def ended(self, job: str) -> None:
        await until(lambda: "JobState=COMPLETED" in self.ask("scontrol", "show", "job", job), f"job {job} completed")


@dataclass
class World(OnSite):
    slurm: Slurm
    client: RolloutClient

    def submit(self, nodes: int) -> str:
        """The script that we make, given to sbatch; the job's id."""
        line = ["up", "--slurm", "-c", "polar.yaml", "--token-file", "node.token", "--nodes", str(nodes)]
        made = run_polar(line, self.site.folder, env=self.slurm.env)
        assert made.code == 0, made.err
        (self.site.folder / "polar.sbatch").write_text(made.out)
        said = self.slurm.ask("sbatch", "polar.sbatch", cwd=self.site.folder)
        found = re.search(r"Submitted batch job (\d+)", said)
        assert found, said
        return found[1]

    async def healthy(self, count: int) -> set[str]:
        return set((await self.site.healthy(self.client, count)).values())

    async def clear(self) -> None:
        """End all jobs; two nodes wait for the next one."""
        self.slurm.ask("scancel", "--full", "--signal=KILL", "--user=root")
        self.slurm.ask("scancel", "--user=root")
        await self.slurm.ready()
        await self.healthy(0)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Slurm]]:
    if any(shutil.which(name, path=SBIN) is None for name in PROGRAMS):
        missing("Slurm is not installed (Debian: slurmctld slurmd slurm-client munge)")
    with short_folder("slurm") as folder, two_host_site(tmp_path_factory.mktemp("site")) as site:
        (site.folder / "node.token").write_text(NODE)
        (site.folder / "node.token").chmod(0o600)
        yield site, Slurm(folder, site.here, site.there)


@pytest.fixture
async def world(begun: tuple[Site, Slurm]) -> AsyncIterator[World]:
    site, slurm = begun
    await slurm.ready()
    async with site.fleet.client() as client:
        world = World(site, slurm, client)
        yield world
        await world.clear()


async def test_the_last_call_drains_and_another_job_goes_on(world: World):
    job = world.submit(2)
    assert await world.healthy(2) == {"n1", "n2"}
    await world.client.submit(world.fleet.a_task("drained", samples=64, turns=TURNS))
    await world.fleet.replies(8)
    for process in world.here.processes() + world.there.processes():
        assert NODE not in " ".join(process.cmdline())
    world.slurm.ask("scancel", "--batch", "--signal=TERM", job)
    await world.slurm.ended(job)
    assert (await world.client.status("drained")).completed_sessions < 64
    world.submit(2)
    status = await check_all(world.fleet, world.client, "drained", 64)
    assert {result.status for result in status.results} == {"COMPLETED"}, "no agent was ended by the last call"


async def test_a_node_of_the_job_is_killed_and_another_job_hands_over_what_it_had(world: World):
    world.submit(2)
    await world.healthy(2)
    await world.client.submit(world.fleet.a_task("killed", samples=24, turns=TURNS))
    await world.fleet.replies(8)
    world.there.kill(but="tests.support.scripted")
    status = await world.client.wait("killed")
    assert max(result.attempt for result in status.results) > 1, "a session was cut off"
    assert await world.healthy(1) == {"n1"}, "the job goes on without it"
    await until(lambda: world.slurm.ask("sinfo", "-h", "-n", "n2", "-o", "%t").startswith("down"), "n2 is down")
    world.slurm.begin_there()
    world.submit(1)
    assert await world.healthy(2) == {"n1", "n2"}
    await check_all(world.fleet, world.client, "killed", 24)
