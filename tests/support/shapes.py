"""Why: what vLLM 0.32 really sends, in one place: the events of a stream and the whole reply, for
``/v1/chat/completions`` and ``/inference/v1/generate``, and the ways in which a step bends them.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from typing import Any, Protocol

from tests.support.hermes import HermesReader, whole_message
from tests.support.model import Generation, Plan

_WRONG: dict[str, Any] = {"null": None, "nan": math.nan, "inf": math.inf, "sentinel": -9999.0, "bool": True}


class Shapes(Protocol):
    """The wire shapes of one route, for one reply."""

    def first(self, plan: Plan) -> list[dict[str, Any]]: ...

    def chunk(self, plan: Plan, start: int, end: int, generation: Generation) -> list[dict[str, Any]]: ...

    def last(self, plan: Plan, generation: Generation) -> list[dict[str, Any]]: ...

    def whole(self, plan: Plan, generation: Generation) -> dict[str, Any]: ...


class ChatShapes:
    """``/v1/chat/completions``."""

    def __init__(self, model: str, body: dict[str, Any], prompt: list[int], *, tools: bool) -> None:
        self._model = model
        self._body = body
        self._prompt = prompt
        self._reader = HermesReader(tools=tools)
        self._id = f"chatcmpl-{uuid.uuid4().hex[:16]}"
        self._called = False

    def first(self, plan: Plan) -> list[dict[str, Any]]:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        event = self._object("chat.completion.chunk", [choice])
        return [event | self._prompt_ids(plan)]

    def chunk(self, plan: Plan, start: int, end: int, generation: Generation) -> list[dict[str, Any]]:
        deltas = self._reader.feed("".join(plan.pieces[start:end]))
        is_last = end == len(plan.ids)
        if is_last:
            deltas += self._reader.finish()
        self._called = self._called or any("tool_calls" in delta for delta in deltas)
        if not deltas and plan.step.drop_empty_deltas and not is_last:
            return []
        events = []
        for place, delta in enumerate(deltas or [{}]):
            is_end = place == max(len(deltas) - 1, 0)
            choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            if is_end:
                choice |= self._tokens(plan, start, end)
            if is_end and is_last:
                choice |= self._finish(plan)
            events.append(self._object("chat.completion.chunk", [choice]))
        return events

    def last(self, plan: Plan, generation: Generation) -> list[dict[str, Any]]:
        if not (self._body.get("stream_options") or {}).get("include_usage"):
            return []
        return [self._object("chat.completion.chunk", []) | {"usage": _usage(plan, self._prompt)}]

    def whole(self, plan: Plan, generation: Generation) -> dict[str, Any]:
        deltas = [delta for piece in plan.pieces for delta in self._reader.feed(piece)] + self._reader.finish()
        message = whole_message(deltas)
        self._called = bool(message["tool_calls"])
        choice = {"index": 0, "message": message, "logprobs": None, "token_ids": None}
        choice |= self._tokens(plan, 0, len(plan.ids)) | self._finish(plan)
        reply = self._object("chat.completion", [choice])
        return reply | {"usage": _usage(plan, self._prompt)} | self._prompt_ids(plan)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
        }

    def _prompt_ids(self, plan: Plan) -> dict[str, Any]:
        wanted = self._body.get("return_token_ids") and not plan.step.omit_prompt_ids
        return {"prompt_token_ids": self._prompt if wanted else None}

    def _finish(self, plan: Plan) -> dict[str, Any]:
        reason = "tool_calls" if self._called and plan.finish_reason == "stop" else plan.finish_reason
        return {"finish_reason": reason, "stop_reason": plan.stop_string}

    def _tokens(self, plan: Plan, start: int, end: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self._body.get("return_token_ids") and not plan.step.omit_token_ids:
            out["token_ids"] = plan.ids[start:end]
        if self._body.get("logprobs") and plan.step.logprobs != "omit":
            out["logprobs"] = {"content": [self._entry(plan, place) for place in range(start, end)]}
        return out

    def _entry(self, plan: Plan, place: int) -> dict[str, Any]:
        text = f"token_id:{plan.ids[place]}" if plan.step.ids_in_logprobs else plan.pieces[place]
        entry = {
            "token": text,
            "logprob": logprob_of(plan, place),
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }
        top = self._body.get("top_logprobs") or 0
        return entry | ({"top_logprobs": [dict(entry, top_logprobs=None)]} if top else {})


class GenerateShapes:
    """``/inference/v1/generate``: ids in, ids out."""

    def __init__(self, model: str, body: dict[str, Any], prompt: list[int]) -> None:
        self._body = body
        self._prompt = prompt
        self._id = f"generate-tokens-{body.get('request_id') or uuid.uuid4().hex[:16]}"
        self._first = True

    def first(self, plan: Plan) -> list[dict[str, Any]]:
        return []

    def chunk(self, plan: Plan, start: int, end: int, generation: Generation) -> list[dict[str, Any]]:
        choice = self._choice(plan, start, end)
        if end == len(plan.ids):
            choice |= self._finish(plan, generation)
        event = {"request_id": self._id, "usage": None, "output_mode": "tokens", "choices": [choice]}
        if self._first:
            event |= self._prompt_ids(plan)
        self._first = False
        return [event]

    def last(self, plan: Plan, generation: Generation) -> list[dict[str, Any]]:
        usage = _usage(plan, self._prompt)
        return [{"request_id": self._id, "usage": usage, "output_mode": "tokens", "choices": []}]

    def whole(self, plan: Plan, generation: Generation) -> dict[str, Any]:
        choice = self._choice(plan, 0, len(plan.ids)) | self._finish(plan, generation)
        usage = _usage(plan, self._prompt)
        reply = {"request_id": self._id, "usage": usage, "output_mode": "tokens", "choices": [choice]}
        return reply | self._prompt_ids(plan)

    def _prompt_ids(self, plan: Plan) -> dict[str, Any]:
        wanted = self._body.get("return_token_ids") and not plan.step.omit_prompt_ids
        return {"prompt_token_ids": self._prompt if wanted else None}

    def _choice(self, plan: Plan, start: int, end: int) -> dict[str, Any]:
        wanted = self._body["sampling_params"].get("logprobs") is not None and plan.step.logprobs != "omit"
        entries = [self._entry(plan, place) for place in range(start, end)] if wanted else []
        return {
            "index": 0,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": None if plan.step.omit_token_ids else plan.ids[start:end],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
            "logprobs": {"content": entries} if wanted else None,
        }

    def _entry(self, plan: Plan, place: int) -> dict[str, Any]:
        token = plan.ids[place]
        named = {"token": f"token_id:{token}"} if plan.step.ids_in_logprobs else {"token_id": token}
        return {**named, "logprob": logprob_of(plan, place), "rank": 1, "top_logprobs": []}

    def _finish(self, plan: Plan, generation: Generation) -> dict[str, Any]:
        spans, start = [], 0
        for version, group in itertools.groupby(generation.weight_versions):
            end = start + len(list(group))
            spans.append({"version": version, "start": start, "end": end})
            start = end
        return {"finish_reason": plan.finish_reason, "stop_reason": plan.stop_string, "weight_versions": spans}


class CompletionsShapes:
    """``/v1/completions`` with ids as its prompt."""

    def __init__(self, model: str, body: dict[str, Any], prompt: list[int]) -> None:
        self._body = body
        self._prompt = prompt
        self._object = {"id": f"cmpl-{uuid.uuid4().hex[:16]}", "object": "text_completion", "model": model}
        self._first = True

    def first(self, plan: Plan) -> list[dict[str, Any]]:
        return []

    def chunk(self, plan: Plan, start: int, end: int, generation: Generation) -> list[dict[str, Any]]:
        choice = self._choice(plan, start, end)
        choice["prompt_token_ids"] = self._prompt if self._first and self._body.get("return_token_ids") else None
        self._first = False
        if end == len(plan.ids):
            choice |= {"finish_reason": plan.finish_reason, "stop_reason": plan.stop_string}
        return [{**self._object, "choices": [choice]}]

    def last(self, plan: Plan, generation: Generation) -> list[dict[str, Any]]:
        return [{**self._object, "choices": [], "usage": _usage(plan, self._prompt)}]

    def whole(self, plan: Plan, generation: Generation) -> dict[str, Any]:
        choice = self._choice(plan, 0, len(plan.ids))
        choice |= {"finish_reason": plan.finish_reason, "stop_reason": plan.stop_string}
        return {**self._object, "choices": [choice], "usage": _usage(plan, self._prompt)}

    def _choice(self, plan: Plan, start: int, end: int) -> dict[str, Any]:
        out: dict[str, Any] = {"index": 0, "text": "".join(plan.pieces[start:end]), "logprobs": None}
        out |= {"finish_reason": None, "stop_reason": None, "token_ids": None}
        if self._body.get("return_token_ids") and not plan.step.omit_token_ids:
            out["token_ids"] = plan.ids[start:end]
        if self._body.get("logprobs") is not None and plan.step.logprobs != "omit":
            named = self._body.get("return_tokens_as_token_ids") and plan.step.ids_in_logprobs
            tokens = [f"token_id:{plan.ids[place]}" if named else plan.pieces[place] for place in range(start, end)]
            values = [logprob_of(plan, place) for place in range(start, end)]
            out["logprobs"] = {"text_offset": [0], "token_logprobs": values, "tokens": tokens, "top_logprobs": []}
        return out


def logprob_of(plan: Plan, place: int) -> Any:
    if plan.step.logprobs is not None and place == len(plan.ids) - 1:
        return _WRONG[plan.step.logprobs]
    return plan.logprobs[place]


def _usage(plan: Plan, prompt: list[int]) -> dict[str, Any]:
    sampled = len(plan.ids) + plan.step.usage_extra
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}
