"""Gateways on a Ray cluster: one detached actor on each node that has the resource ``gateway``.

Ray starts an actor again when its process dies. What Ray does not do is done here: new nodes (autoscaling) get a
gateway, nodes that are gone are forgotten. Nothing is kept here either: whoever follows the cluster next finds the
actors by their names. A node that was cut off goes on for a while; its leases lapse, and what it writes is refused.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from polar.contract.errors import MissingExtra, PolarError, UsageError
from polar.placement.actor import GatewayActor
from polar.rollout.auth import NODE_ENV
from polar.settings import ServeConfig

NAMESPACE = "polar"
RESOURCE = "gateway"
LOOK_SECONDS = 5.0
"""Ray tells nobody of new nodes: it is asked."""
AGAIN_SECONDS = 60.0
"""After so long a node whose gateway could not go on gets another one."""
_PREFIX = "gateway-"


@dataclass(frozen=True)
class Placed:
    """A gateway on a node: its actor, and what is there once it has ended."""

    node_id: str
    address: str
    actor: Any
    ended: Any


class RayPlacement:
    """Keeps a gateway on each node.

    Args:
        address: of the Ray cluster; ``auto`` is the one of this machine.
        config: the settings of a gateway; host, name and folder are made for each node.
        environ: has the node token.
        say: told, in one line each, what a person must know.

    Raises:
        MissingExtra: Ray is not installed.
        UsageError: there is no cluster, or no node token.
    """

    def __init__(
        self, address: str, config: ServeConfig, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        if not environ.get(NODE_ENV):
            raise UsageError(f"set {NODE_ENV} to the node token of the rollout server ({config.server})")
        if config.workers > 1:
            raise UsageError("workers: on Ray each node has one gateway: leave it out")
        self._ray = connect(address)
        self._config = config
        self._token = environ[NODE_ENV]
        self._say = say
        self._placed: dict[str, Placed] = {}
        self._ended_at: dict[str, float] = {}

    def follow(self, stop: threading.Event) -> None:
        """Until ``stop`` is set (the gateways stay), or until they are taken down.

        Raises:
            PolarError: no gateway can be run.
        """
        try:
            while not stop.is_set():
                self._look()
                if not self._await_one(stop):
                    return
        finally:
            self._ray.shutdown()

    def _look(self) -> None:
        """Place what is missing, forget what is gone."""
        nodes = {each["NodeID"]: each for each in self._ray.nodes() if each["Alive"]}
        for name in set(self._placed) - set(nodes):
            self._lost(self._placed[name])
        tried = time.monotonic() - AGAIN_SECONDS
        for name, node in nodes.items():
            if (
                node["Resources"].get(RESOURCE, 0) >= 1
                and name not in self._placed
                and self._ended_at.get(name, tried) <= tried
            ):
                self._placed[name] = self._place(name, node["NodeManagerAddress"])
                self._say(f"gateway {node_name(self._placed[name].address)} placed")

    def _place(self, name: str, address: str) -> Placed:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        config = msgspec.structs.replace(
            self._config,
            host=address,
            node_id=node_name(address),
            out=str(Path(self._config.out) / node_name(address)),
        )
        actor = (
            self._ray.remote(GatewayActor)
            .options(
                name=f"{_PREFIX}{address}-{name}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                resources={RESOURCE: 1},
                scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=16,
            )
            .remote(msgspec.json.encode(config), self._token)
        )
        return Placed(name, address, actor, actor.ended.remote())

    def _await_one(self, stop: threading.Event) -> bool:
        """Wait for an end of a gateway, for some seconds; whether to go on."""
        if not self._placed:
            stop.wait(LOOK_SECONDS)
            return True
        ended, _ = self._ray.wait([each.ended for each in self._placed.values()], timeout=LOOK_SECONDS)
        for placed in [each for each in self._placed.values() if each.ended in ended]:
            try:
                why = self._ray.get(placed.ended)
            except self._ray.exceptions.RayError:  # Ray has given it up: its node is gone, as Ray will say soon
                self._lost(placed)
                continue
            if why == "":
                self._say("the gateways are taken down")
                return False
            self._say(f"gateway {node_name(placed.address)} has ended: {why}")
            self._forget(placed)
            if not self._placed:
                raise PolarError(f"no gateway runs: {why}")
        return True

    def _lost(self, placed: Placed) -> None:
        self._say(f"gateway {node_name(placed.address)} is lost")
        self._forget(placed)

    def _forget(self, placed: Placed) -> None:
        del self._placed[placed.node_id]
        self._ended_at[placed.node_id] = time.monotonic()
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(placed.actor, no_restart=True)


def down(address: str, say: Callable[[str], None]) -> None:
    """Drain all gateways of a cluster, and end them.

    Raises:
        MissingExtra: Ray is not installed.
        UsageError: there is no cluster.
    """
    ray = connect(address)
    try:
        actors: dict[Any, tuple[str, Any]] = {}
        for each in ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] == NAMESPACE and each["name"].startswith(_PREFIX):
                with suppress(ValueError):  # it has ended meanwhile
                    actor = ray.get_actor(each["name"], namespace=NAMESPACE)
                    actors[actor.drain.remote()] = each["name"].removeprefix(_PREFIX), actor
        left = list(actors)
        while left:
            say(f"draining {', '.join(actors[each][0] for each in left)}")
            ended, left = ray.wait(left, num_returns=len(left), timeout=LOOK_SECONDS)
            for each in ended:
                with suppress(ray.exceptions.RayError):
                    ray.kill(actors[each][1], no_restart=True)
        say(f"{len(actors)} gateways ended")
    finally:
        ray.shutdown()


def node_name(address: str) -> str:
    """The gateway's node id on a node of Ray: by its address, and not by Ray's id, which is another one each time. So
    a node that comes back hands over what it had."""
    return "ray-" + re.sub(r"[^A-Za-z0-9.-]", "-", address)


def connect(address: str) -> Any:
    """Ray itself, connected to a cluster.

    Raises:
        MissingExtra: it is not installed.
        UsageError: it can't be reached.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtra("polar up --ray", "ray") from None
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise UsageError(f"no Ray cluster at {address}: start one with ray start, or name it ({why})") from None
    return ray
