"""``polar up``: gateways on many machines, placed by Ray, Slurm or Kubernetes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from polar.cli import screen
from polar.contract.errors import UsageError
from polar.placement import kubernetes as on_kubernetes
from polar.placement import ray as on_ray
from polar.placement import slurm as on_slurm
from polar.settings import ServeConfig, load_settings


def up(
    ray: Annotated[bool, typer.Option("--ray", help="Keep a gateway on each node of a Ray cluster.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a batch script for sbatch.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Print manifests for kubectl apply.")] = False,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A gateway's settings: a polar.yaml.")] = None,
    server: Annotated[str | None, typer.Option("--server", help="The rollout server, as the nodes reach it.")] = None,
    address: Annotated[str, typer.Option("--address", help="Ray: the cluster's address.")] = "auto",
    down: Annotated[bool, typer.Option("--down", help="Ray: drain the gateways and end them.")] = False,
    nodes: Annotated[int, typer.Option("--nodes", help="Slurm, Kubernetes: so many gateways.")] = 1,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Slurm: a file with the node token, of mode 600.")
    ] = None,
    image: Annotated[str, typer.Option("--image", help="Kubernetes: an image with Polar in it.")] = "polar:latest",
    store: Annotated[
        str | None, typer.Option("--store", help="Kubernetes: a PostgreSQL URL, without a password in it.")
    ] = None,
) -> None:
    """Place gateways on many machines."""
    if ray + slurm + kubernetes != 1:
        raise UsageError("polar up needs one of --ray, --slurm and --kubernetes")
    if nodes < 1:
        raise UsageError("--nodes must be 1 or more")
    if ray and down:
        on_ray.down(address, screen.err.print)
        return
    if kubernetes:
        settings = _settings(config, server or "http://polar:8080")
        print(on_kubernetes.manifests(settings, image=image, gateways=nodes, store=store), end="")
        return
    settings = _settings(config, server)
    if slurm:
        if token_file is None or config is None:
            raise UsageError("polar up --slurm needs -c polar.yaml and --token-file FILE, which all nodes can read")
        print(on_slurm.script(settings, config.resolve(), token_file.resolve(), nodes), end="")
        return
    _follow(on_ray.RayPlacement(address, settings, os.environ, screen.err.print))


def _settings(config: Path | None, server: str | None) -> ServeConfig:
    """A gateway's settings, on an address that other machines reach."""
    said = {"role": "gateway", "host": "0.0.0.0", **({"server": server} if server else {})}
    return load_settings(config, said)


def _follow(placement: on_ray.RayPlacement) -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    placement.follow(stop)
    if stop.is_set():
        screen.err.print("the gateways stay; polar up --ray --down ends them")
