"""The renderer for a model folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from polar.contract.errors import UsageError
from polar.rendering.base import Renderer, RenderError
from polar.rendering.families import FamilyRenderer, family_of
from polar.rendering.generic import TemplateRenderer
from polar.rendering.tokenizer import Tokenizer


def load_renderer(
    model_path: str | Path, *, prefer: str = "auto", parser: str | None = None, chat_template: str | None = None
) -> Renderer:
    """A renderer for the model folder at ``model_path``.

    Args:
        prefer: ``template`` renders by the folder's chat template; ``renderers``, or ``renderers:FAMILY``, by the
            ``renderers`` package; ``auto`` by the template, and by the package where the template is missing or
            fails, or writes tool calls in a way that only the package can read.
        parser: how tool calls are read (a name of ``detect.CALL_PARSERS``, or ``plain``) instead of what the
            template shows.
        chat_template: Jinja text to use instead of the folder's.

    Raises:
        UsageError: the folder lacks what is needed, or an argument is wrong.
        MissingExtra: the package is needed and not installed.
    """
    folder = Path(model_path)
    kind, _, family = prefer.partition(":")
    if kind not in ("auto", "template", "renderers") or (family and kind != "renderers"):
        raise UsageError(f"no renderer '{prefer}': say auto, template, renderers or renderers:FAMILY")
    if kind == "renderers":
        return _from_package(folder, family)
    package = kind == "auto" and parser is None and chat_template is None and family_of(folder) is not None
    try:
        renderer = TemplateRenderer.load(folder, parser=parser, template=chat_template)
    except (UsageError, RenderError) as error:
        if package:
            return _from_package(folder, "")
        raise UsageError(str(error)) from None
    if package and renderer.family.calls is None and importlib.util.find_spec("renderers"):
        return _from_package(folder, "")
    return renderer


def _from_package(folder: Path, family: str) -> FamilyRenderer:
    name = family or family_of(folder)
    if not name:
        raise UsageError(f"cannot tell the model family of {folder}: say renderers:FAMILY")
    return FamilyRenderer(Tokenizer.load(folder), name)
