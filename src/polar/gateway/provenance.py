"""Where a trajectory comes from: the versions of all that took part in making it."""

from __future__ import annotations

import time
from typing import Any

import polar
from polar.gateway.node import Node


def provenance(node: Node, *, harness: str, started_at: float, **more: Any) -> dict[str, Any]:
    """``metadata["provenance"]`` of a trajectory that ends now."""
    engine = node.engine.info
    return {
        "polar": polar.__version__,
        "engine": engine.kind,
        "engine_version": engine.version,
        "engine_url": engine.url,
        "model": engine.model,
        "harness": harness,
        **more,
        "started_at": started_at,
        "ended_at": time.time(),
    }
