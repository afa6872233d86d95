"""From captured calls to what a trainer takes: builders make traces, exporters write them, ``show`` prints
them.

A new builder is one file and one line in ``BUILDERS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from polar.contract.errors import UsageError
from polar.contract.loading import make_named
from polar.contract.task import BuilderSpec
from polar.trajectories.base import Builder
from polar.trajectories.per_request import PerRequest, PerRequestConfig
from polar.trajectories.prefix_merging import PrefixMerging, PrefixMergingConfig

BUILDERS: dict[str, tuple[Callable[[Any], Builder], type[msgspec.Struct]]] = {
    PrefixMerging.name: (PrefixMerging, PrefixMergingConfig),
    PerRequest.name: (lambda _: PerRequest(), PerRequestConfig),
}
"""Each builder and the type of its config, by name."""


def make_builder(spec: BuilderSpec, allow_import: bool = False) -> Builder:
    """The builder that a task asks for.

    Args:
        allow_import: ``module:Class`` may be imported, and gets the config as keyword arguments.

    Raises:
        UsageError: no such builder, or a config that it does not take.
    """
    if ":" in spec.strategy:
        return _import_builder(spec, allow_import)
    if spec.strategy not in BUILDERS:
        known = ", ".join(BUILDERS)
        raise UsageError(f"unknown builder {spec.strategy!r}: use {known}, or module:Class for your own")
    make, config_type = BUILDERS[spec.strategy]
    try:
        config = msgspec.convert(spec.config, config_type)
    except msgspec.ValidationError as error:
        keys = ", ".join(config_type.__struct_fields__) or "none"
        raise UsageError(f"builder {spec.strategy}: {error} (config keys: {keys})") from None
    return make(config)


def _import_builder(spec: BuilderSpec, allow_import: bool) -> Builder:
    if not allow_import:
        raise UsageError(f"builder {spec.strategy!r} is not allowed unless you pass --allow-import")
    builder: Builder = make_named(spec.strategy, "builder", **spec.config)
    if not callable(getattr(builder, "build", None)):
        raise UsageError(f"builder {spec.strategy!r} has no build(completions)")
    return builder
