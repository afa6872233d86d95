"""Why apart: what we ask of an engine is decided by us, not by the client. A ``Chat`` becomes an OpenAI chat
body here, with our own settings on top: token ids, and the logprob of each sampled token, always.
"""

from __future__ import annotations

from typing import Any

from polar.contract.chat import Chat, Image, Message, Part, Sampling, Text, Tool, ToolCall
from polar.surrogates import mend_surrogates

_OURS: dict[str, Any] = {"logprobs": True, "top_logprobs": 0}
_RETURN_IDS: dict[str, dict[str, Any]] = {
    # SGLang refuses ``return_token_ids`` on a stream; its extension chunk works with and without one.
    "sglang": {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
}
_RETURN_IDS_ELSEWHERE: dict[str, Any] = {"return_token_ids": True}


def request_body(
    chat: Chat, *, kind: str, model: str, context_length: int, stream: bool, ask_ids: bool = True
) -> dict[str, Any]:
    """The JSON object for POST /v1/chat/completions.

    Args:
        kind: ``vllm``, ``sglang`` or ``openai``: how token ids are asked for.
        model: the name the engine serves; the client's own may be any.
        context_length: tokens, 0 if unknown. A limit on the reply that is not below it is left out: the
            engine then stops where its context ends, which is what the client asked for.
        ask_ids: whether token ids are asked for at all: some servers refuse a field that they don't know.
    """
    body: dict[str, Any] = {"model": model, "messages": [wire_message(message) for message in chat.messages]}
    if chat.tools:
        body["tools"] = [_tool(tool) for tool in chat.tools]
        if chat.tool_choice is not None:
            body["tool_choice"] = _tool_choice(chat.tool_choice)
    if chat.response_format is not None:
        body["response_format"] = chat.response_format
    if chat.template_args:
        body["chat_template_kwargs"] = chat.template_args
    body.update(sampling_fields(chat.sampling))
    if context_length and body.get("max_tokens", 0) >= context_length:
        del body["max_tokens"]
    body.update(_OURS)
    if ask_ids:
        body.update(_RETURN_IDS.get(kind, _RETURN_IDS_ELSEWHERE))
    body["stream"] = stream
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def wire_message(message: Message) -> dict[str, Any]:
    """A message as engines take it."""
    out: dict[str, Any] = {"role": message.role, "content": _content(message.content)}
    if message.reasoning is not None:
        # Engines read one or the other, by version; a template finds its own.
        out["reasoning_content"] = out["reasoning"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
        if not message.content:
            out["content"] = None
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _arguments(call: ToolCall) -> str:
    """Those of the call, without half characters, for which engines refuse the call and each one after it."""
    if "\\u" not in call.arguments:
        return call.arguments
    return mend_surrogates(call.arguments.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")


def _content(content: str | tuple[Part, ...]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Image(url):
            return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    for field in ("description", "parameters", "strict"):
        value = getattr(tool, field)
        if value is not None:
            function[field] = value
    return {"type": "function", "function": function}


def _tool_choice(choice: str) -> str | dict[str, Any]:
    if choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}


def schema_of(response_format: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema that a reply must follow: any object, where none is given."""
    schema: dict[str, Any] = (response_format.get("json_schema") or {}).get("schema") or {"type": "object"}
    return schema


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Sampling under the names that OpenAI, vLLM and SGLang's chat use. What is ``None`` is left to the engine."""
    out: dict[str, Any] = {
        field: value
        for field in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "max_tokens",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )
        if (value := getattr(sampling, field)) is not None
    }
    if sampling.stop:
        out["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        out["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return out
