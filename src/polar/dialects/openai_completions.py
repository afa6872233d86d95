"""OpenAI plain completions: ``POST /v1/completions``.

The dialect of programs that write their own prompts: text, or the token ids themselves, which are then used as they
are. Source of the shapes: the public API reference, and what vLLM adds to it for such programs (``return_token_ids``,
``return_tokens_as_token_ids``, ``add_special_tokens``). Request fields that nothing here reads are named in a
warning; what would change the reply and can't be done is refused.

Logprobs and token ids are told with the end of a stream: which tokens a piece of text is made of is known for sure
only once the reply is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from polar.contract.chat import Chat, Delta, TextDelta
from polar.dialects.base import Answer, Call, CallError, Response, Route, StreamEncoder, Tokens, decode, told_role
from polar.dialects.openai_chat import OpenAIChat, encode_usage, error_body, event
from polar.dialects.openai_fields import SamplingFields, sampling, token_limit, token_names, unread

_DEFAULT_MAX_TOKENS = 16
_ID_LIMIT = 2**31

# ---- parse request ---------------------------------------------------------------------------------------


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Request(SamplingFields, kw_only=True):
    model: str
    prompt: str | list[Any]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class _Options(msgspec.Struct, frozen=True):
    """What the encoder must know: whether usage ends a stream, and what is asked about the tokens."""

    include_usage: bool
    logprobs: bool
    ids: bool
    ids_as_names: bool


_decoder = msgspec.json.Decoder(_Request)


class OpenAICompletions(OpenAIChat):
    """The dialect (see ``polar.dialects.base.Dialect``): errors and models are those of the Chat API."""

    name = "openai_completions"
    routes: Sequence[Route] = (Route("POST", r"/v1/completions", "generate"),)

    def parse(self, body: bytes, headers: Mapping[str, str], path: Mapping[str, str]) -> Call:
        request = decode(_decoder, body)
        _refuse(request)
        plain: dict[str, Any] = {} if request.add_special_tokens is not False else {"add_special_tokens": False}
        chat = Chat(
            model=request.model,
            messages=(),
            sampling=sampling(request, token_limit(request.max_tokens, "max_tokens") or _DEFAULT_MAX_TOKENS),
            template_args=plain,
            prompt=_prompt(request.prompt),
        )
        options = _Options(
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            logprobs=request.logprobs is not None,
            ids=bool(request.return_token_ids),
            ids_as_names=bool(request.return_tokens_as_token_ids),
        )
        warnings = unread(body, _Request)
        if (request.logprobs or 0) > 1:
            warnings.append("logprobs are those of the sampled tokens only")
        return Call(chat, bool(request.stream), options, tuple(warnings), told_role(headers))

    # ---- encode reply ------------------------------------------------------------------------------------

    def encode(self, call: Call, answer: Answer) -> Response:
        body = {
            **_head(answer.completion_id, answer.created, answer.model),
            "choices": [_choice(_text(answer), answer, call.options)],
            "usage": encode_usage(answer.usage),
        }
        return Response(200, orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))

    # ---- encode stream -----------------------------------------------------------------------------------

    def stream(self, call: Call) -> StreamEncoder:
        return _TextStream(call.options)


def _refuse(request: _Request) -> None:
    """What would make another reply than the one that is given."""
    if (request.n or 1) != 1 or (request.best_of or 1) != 1:
        raise CallError("bad_request", "'n' and 'best_of' must be 1: ask again for another sample")
    if request.echo:
        raise CallError("bad_request", "'echo' is not served: the prompt is what you sent")
    if request.suffix:
        raise CallError("bad_request", "'suffix' is not served: models here only go on from a prompt")


def _prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    """Text, or ids; a list of one prompt is that prompt."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise CallError("bad_request", "'prompt' must be one prompt: send each in a call of its own")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not all(type(token) is int and 0 <= token < _ID_LIMIT for token in prompt):
        raise CallError("bad_request", "'prompt' must be text or a list of token ids")
    return tuple(prompt)


def _head(completion_id: str, created: float, model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{completion_id}", "object": "text_completion", "created": int(created), "model": model}


def _text(answer: Answer) -> str:
    content = answer.message.content
    return content if isinstance(content, str) else ""


def _choice(text: str, answer: Answer, options: _Options) -> dict[str, Any]:
    """The reply, or the end of its stream, with what is asked about its tokens."""
    tokens = answer.tokens
    choice: dict[str, Any] = {
        "index": 0,
        "text": text,
        "logprobs": _logprobs(tokens, options) if options.logprobs and tokens is not None else None,
        "finish_reason": "length" if answer.finish_reason == "length" else "stop",
        "stop_reason": answer.stop_sequence,
    }
    if options.ids and tokens is not None:
        choice |= {"token_ids": tokens.ids, "prompt_token_ids": tokens.prompt_ids()}
    return choice


def _logprobs(tokens: Tokens, options: _Options) -> dict[str, Any]:
    """The sampled tokens, the one that ended the reply among them, each with its logprob."""
    names = token_names(tokens, as_ids=options.ids_as_names)
    offsets, at = [], 0
    for name in names:
        offsets.append(at)
        at += len(name)
    logprobs = tokens.logprobs.tolist()
    return {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": [{name: logprob} for name, logprob in zip(names, logprobs, strict=False)],
        "text_offset": offsets,
    }


class _TextStream:
    """One streamed reply as ``text_completion`` chunks."""

    content_type = "text/event-stream; charset=utf-8"
    keepalive = b": keepalive\n\n"

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._head: dict[str, Any] = {}

    def start(self, completion_id: str, created: float, model: str, prompt_tokens: int) -> bytes:
        self._head = _head(completion_id, created, model)
        return b""

    def delta(self, delta: Delta) -> bytes:
        if not isinstance(delta, TextDelta) or not delta.text:
            return b""
        return self._chunk({"index": 0, "text": delta.text, "logprobs": None, "finish_reason": None})

    def finish(self, answer: Answer) -> bytes:
        last = self._chunk(_choice("", answer, self._options))
        if self._options.include_usage:
            last += event({**self._head, "choices": [], "usage": encode_usage(answer.usage)})
        return last + b"data: [DONE]\n\n"

    def error(self, error: CallError) -> bytes:
        return event(error_body(error))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head, "choices": [choice]})
