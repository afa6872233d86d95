"""A model's chat template: Jinja text that turns message dicts into the text the model was trained on.

Templates are other people's programs and are written against transformers' environment, so this one has
the same switches, filters and functions, in a sandbox, without transformers. What a template does with
particular messages is found out by trying it (``traits.py``), not by reading its source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from polar.contract.errors import UsageError
from polar.rendering.base import RenderError
from polar.rendering.tokenizer import read_json, token_string

_SPECIAL_VARIABLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class GenerationBlock(jinja2.ext.Extension):
    """Accepts ``{% generation %}...{% endgeneration %}``, which marks what the model says; prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as it is

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body alone, in a scope of its own as transformers has it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body).set_lineno(line)]


class ChatTemplate:
    """The chat template of one model, compiled.

    Args:
        sources: template texts by name: ``default``, and ``tool_use`` for conversations with tools.
        variables: ``bos_token`` and the like, as the model's tokenizer config has them.

    Raises:
        UsageError: a template is no valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str] | None = None) -> None:
        environment = _environment()
        self.source = "\n".join(sources.values())
        self._variables = dict(variables or {})
        self._compiled: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._compiled[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise UsageError(f"the chat template '{name}' is not valid Jinja: {error}") from None

    @classmethod
    def load(cls, folder: Path, source: str | None = None) -> ChatTemplate:
        """The template of a model folder: ``chat_template.jinja``, else the one in ``tokenizer_config.json``;
        with ``source``, that text instead.

        Raises:
            UsageError: the folder has none, or it can't be read.
        """
        config = read_json(folder / "tokenizer_config.json")
        sources = _sources(folder, config) if source is None else {"default": source}
        if not sources:
            raise UsageError(f"no chat template in {folder} (chat_template.jinja, or tokenizer_config.json)")
        return cls(sources, special_variables(config))

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        args: Mapping[str, Any] | None = None,
        *,
        now: float = 0.0,
        generate: bool = True,
    ) -> str:
        """The text of a conversation. ``now`` (Unix seconds) is what the template's clock says.

        Raises:
            RenderError: the template refuses; its own words, where it has any.
        """
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        template = self._compiled.get(name) or next(iter(self._compiled.values()))
        values = {**self._variables, "strftime_now": _clock(now), **(args or {})}
        values |= {"messages": messages, "tools": tools or None, "add_generation_prompt": generate}
        try:
            return template.render(values)
        except jinja2.TemplateError as error:
            raise RenderError(error.message or type(error).__name__) from error
        except RecursionError:
            raise RenderError("the conversation is nested too deeply for the chat template") from None
        except Exception as error:  # a template may do anything that Python can refuse
            raise RenderError(f"the chat template failed: {type(error).__name__}: {error}") from error


_OF_DICTS = frozenset(dir(dict))
_OF_TEXTS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, but for two methods of lists: some templates (Kimi K2) keep a queue of ids. The lists that they
    get from here are copies."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use ``obj.attr``."""
        queue = isinstance(obj, list) and attr in ("append", "pop")
        return queue or super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``. The sandbox asks a dozen questions each time, and a template reads some thousand
        attributes: it is not asked about what a message holds, methods of text, and numbers and texts that a loop or
        a namespace holds."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _OF_TEXTS:
            return getattr(obj, attribute)
        if kind in (LoopContext, Namespace) and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if type(value) in (bool, int, str):
                return value
        return super().getattr(obj, attribute)


def special_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json that templates may name."""
    found = {name: token_string(config.get(name)) for name in _SPECIAL_VARIABLES}
    return {name: text for name, text in found.items() if text is not None}


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {item["name"]: item["template"] for item in value}
    return {}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escaping, which is what models were trained on (Jinja's own filter escapes)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _clock(now: float) -> Callable[[str], str]:
    return lambda pattern: datetime.fromtimestamp(now).strftime(pattern)
