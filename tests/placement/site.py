"""Two hosts with a rollout server and an engine, before anything has placed gateways there."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from polar.client import RolloutClient
from tests.cli.making import scripted_process
from tests.faults.fleet import PATIENCE, Fleet
from tests.placement.conftest import STEPS
from tests.placement.engines import Engines
from tests.placement.hosts import Host, two_hosts
from tests.support.tinymodel import make_tiny_model


@dataclass(frozen=True)
class Site:
    """The rollout server is on the first host; ``polar.yaml`` in ``folder`` is for gateways on both."""

    here: Host
    there: Host
    fleet: Fleet
    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "polar.yaml"

    async def healthy(self, client: RolloutClient, count: int) -> dict[str, str]:
        """Until so many nodes are; their ids, by the hosts' addresses."""
        async with asyncio.timeout(PATIENCE):
            while True:
                nodes = [node for node in await client.nodes() if node.healthy]
                if len(nodes) == count:
                    return {node.gateway_url.split("/")[2].split(":")[0]: node.node_id for node in nodes}
                await asyncio.sleep(0.1)


@dataclass
class OnSite:
    """What a cluster's tests have at hand, on a site."""

    site: Site

    @property
    def here(self) -> Host:
        return self.site.here

    @property
    def there(self) -> Host:
        return self.site.there

    @property
    def fleet(self) -> Fleet:
        return self.site.fleet


@contextmanager
def two_host_site(folder: Path) -> Iterator[Site]:
    """Such a site until the block ends; then nothing runs there any more."""
    with ExitStack() as stack:
        here, there = stack.enter_context(two_hosts())
        model = make_tiny_model(folder / "model")
        engine = stack.enter_context(scripted_process(model, STEPS, folder / "engine"))
        engines = Engines(engine.url, engine.log, engine.process, there)
        engines.start_there(model, folder / "engine")
        fleet = Fleet(folder, engines, gateways=1)
        fleet.server.settings |= {"host": "0.0.0.0", "insecure": True}
        settings = {**fleet.gateways.pop().settings, "insecure": True, "out": str(folder / "nodes")}
        settings["server"] = fleet.server.url.replace("127.0.0.1", here.address)
        del settings["node_id"], settings["role"]
        site = Site(here, there, fleet, folder)
        site.config.write_text(yaml.safe_dump(settings))
        stack.enter_context(fleet)
        stack.callback(there.kill)
        stack.callback(here.kill)
        yield site


@contextmanager
def short_folder(name: str) -> Iterator[Path]:
    """A folder for sockets, whose paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix=f"polar-{name}-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
