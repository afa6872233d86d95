"""Tool calls and thinking as the models of each family write them, by the name of the family's parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]


def bare(value: Any) -> str:
    """A value as it stands between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: Arguments) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def llama3_json(name: str, arguments: Arguments) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'


def qwen_xml(name: str, arguments: Arguments) -> str:
    parameters = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm(name: str, arguments: Arguments, between: str = "\n") -> str:
    pairs = [f"<arg_key>{key}</arg_key>{between}<arg_value>{bare(arguments[key])}</arg_value>" for key in arguments]
    return between.join([f"<tool_call>{name}", *pairs, "</tool_call>"])


def deepseek(name: str, arguments: Arguments) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def deepseek_fenced(name: str, arguments: Arguments) -> str:
    fence = f"```json\n{json.dumps(arguments, ensure_ascii=False)}\n```"
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{fence}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def _invoke(section: str, mark: str, name: str, arguments: Arguments, *, typed: bool) -> str:
    out = [f"<{section}>", f'<{mark}invoke name="{name}">']
    for key, value in arguments.items():
        kind = f' string="{json.dumps(isinstance(value, str))}"' if typed else ""
        out.append(f'<{mark}parameter name="{key}"{kind}>{bare(value)}</{mark}parameter>')
    return "\n".join([*out, f"</{mark}invoke>", f"</{section}>"])


def deepseek_v32(name: str, arguments: Arguments) -> str:
    return "\n\n" + _invoke("｜DSML｜function_calls", "｜DSML｜", name, arguments, typed=True)


def deepseek_v4(name: str, arguments: Arguments) -> str:
    return "\n\n" + _invoke("｜DSML｜tool_calls", "｜DSML｜", name, arguments, typed=True)


def minimax(name: str, arguments: Arguments) -> str:
    return "\n" + _invoke("minimax:tool_call", "", name, arguments, typed=False)


def kimi(name: str, arguments: Arguments) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    call = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{text}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def mistral(name: str, arguments: Arguments) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def mistral_id(name: str, arguments: Arguments) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def mistral_list(name: str, arguments: Arguments) -> str:
    call = {"name": name, "arguments": arguments, "id": "a1B2c3D4e"}
    return f"[TOOL_CALLS][{json.dumps(call, ensure_ascii=False)}]"


def json_list(name: str, arguments: Arguments) -> str:
    return f"<TOOLCALL>[{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}]</TOOLCALL>"


def gemma(name: str, arguments: Arguments) -> str:
    def value(item: Any) -> str:
        if isinstance(item, str):
            return f'<|"|>{item}<|"|>'
        if isinstance(item, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ",".join(map(value, item)) + "]"
        return json.dumps(item)

    return f"<|tool_call>call:{name}{value(arguments)}<tool_call|>"


def harmony(name: str, arguments: Arguments) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}"


CALLS: dict[str, Callable[[str, Arguments], str]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "qwen_xml": qwen_xml,
    "glm": glm,
    "glm_tight": lambda name, arguments: glm(name, arguments, ""),
    "deepseek": deepseek,
    "deepseek_fenced": deepseek_fenced,
    "deepseek_v32": deepseek_v32,
    "deepseek_v4": deepseek_v4,
    "minimax": minimax,
    "kimi": kimi,
    "mistral": mistral,
    "mistral_id": mistral_id,
    "mistral_list": mistral_list,
    "json_list": json_list,
    "gemma": gemma,
    "harmony": harmony,
}

PARSER = {name: name for name in CALLS} | {
    "glm_tight": "glm",
    "deepseek_fenced": "deepseek",
    "mistral_id": "mistral",
    "mistral_list": "mistral",
}
"""Which parser reads each form."""
