"""Why: the same scripted model behind what SGLang 0.5.23 really sends: ``/generate`` with a stream that repeats the
reply so far (or not), errors inside a stream that began with 200, aborts by the beginning of a name.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support import oracle
from tests.support.model import Generation, Plan, ScriptedModel
from tests.support.script import Script, Step
from tests.support.scripted import Cut, ScriptedServer
from tests.support.shapes import logprob_of

INITIAL = "default"
PROBE = "-polar-probe"
"""How the names of the questions end that are asked at the start: those are no part of a script."""


class ScriptedSGLang(ScriptedServer):
    """SGLang's routes over a ``ScriptedModel``.

    Args:
        incremental: as with ``--incremental-streaming-output``.
        stripped: fields of ``/generate``'s events that a router between us takes away.
        flags: more of ``/server_info``, or other values.
    """

    def __init__(
        self, model: ScriptedModel, *, incremental: bool, stripped: Sequence[str] = (), flags: dict[str, Any]
    ) -> None:
        super().__init__(model)
        self.incremental = incremental
        self.stripped = stripped
        self.flags = {"version": "0.5.23", "incremental_streaming_output": incremental, "disable_radix_cache": False}
        self.flags |= flags
        self.aborted: list[str] = []
        """Names that came to ``/abort_request``."""
        self.administration: list[tuple[str, dict[str, Any]]] = []
        """What came to the routes that pause and load, in order."""
        self.loads = True
        """Whether weights can be loaded."""
        self.hung = False
        """The scheduler answers nothing, while the process before it goes on."""
        self._running: dict[str, asyncio.Event] = {}
        self.app = web.Application(client_max_size=1 << 28)
        self.app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._administer),
                web.post("/update_weights_from_disk", self._administer),
                web.post("/continue_generation", self._administer),
                web.post("/scripted/release", self._release),
                web.get("/scripted/log", self._log),
            ]
        )

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": self.name, "object": "model", "owned_by": "sglang", "root": self.name, "parent": None}
        return web.json_response({"data": [card | {"max_model_len": self.model.max_model_len}]})

    async def _model_info(self, _request: web.Request) -> web.Response:
        folder = str(self.model.model_dir)
        told = {"model_path": folder, "tokenizer_path": folder, "served_model_name": self.name}
        return web.json_response(told | {"is_generation": True, "has_image_understanding": False})

    async def _server_info(self, _request: web.Request) -> web.Response:
        await self._scheduled()
        return web.json_response(self.flags)

    async def _scheduled(self) -> None:
        if self.hung:
            await asyncio.Event().wait()

    async def _administer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.administration.append((request.path, body))
        if request.path != "/update_weights_from_disk":
            return web.json_response({"message": "done", "status": "ok"})
        if not self.loads:
            return web.json_response({"success": False, "message": "no such folder"}, status=400)
        self.model.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if not rid.endswith(PROBE):
            self.aborted.append(rid)
        for name, aborted in self._running.items():
            if name.startswith(rid):
                aborted.set()
        await self.model.log.changed()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await self._scheduled()
        stream = body.get("stream", False)
        if probed := _answer_to_probe(body):
            return await self._send(request, probed, stream=stream)
        prompt, settings = body["input_ids"], body["sampling_params"]
        if refused := _refused(prompt, settings, self.model.max_model_len):
            return await self._send(request, [_error(400, refused)], stream=stream)
        step = self.model.script.step(self.model.conversation(prompt, None))
        await asyncio.sleep(step.delay)
        if step.status is not None:
            return web.json_response(
                {"object": "error", "message": step.error, "code": step.status}, status=step.status
            )
        plan = self.model.plan(step, prompt, max_tokens=settings["max_new_tokens"], stop=settings.get("stop") or ())
        generation = self.model.log.begin("generate", request.headers.get("X-Request-Id", ""), prompt)
        generation.request = body
        self._running[body["rid"]] = asyncio.Event()
        try:
            return await self._answer_stream(request, plan, generation)
        finally:
            del self._running[body["rid"]]
            await asyncio.shield(self.model.log.changed())

    async def _answer_stream(self, request: web.Request, plan: Plan, generation: Generation) -> web.StreamResponse:
        try:
            stream = generation.request.get("stream", False)
            response = await self._send(request, self._events(plan, generation), stream=stream)
        except (asyncio.CancelledError, ConnectionError):
            self.model.log.end(generation, "cancelled")
            raise
        except Cut:
            self.model.log.end(generation, "cut")
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        return response

    async def _send(
        self, request: web.Request, events: AsyncIterator[dict[str, Any]] | list[dict[str, Any]], *, stream: bool
    ) -> web.StreamResponse:
        if not stream:
            told = [event async for event in _each(events)][-1]
            status = told["error"]["code"] if "error" in told else 200
            return web.json_response({key: told[key] for key in told if key not in self.stripped}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        async for event in _each(events):
            kept = {key: event[key] for key in event if key not in self.stripped}
            await response.write(b"data: " + json.dumps(kept).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _events(self, plan: Plan, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        step, aborted = plan.step, self._running[generation.request["rid"]]
        for start in range(0, len(plan.ids), step.chunk_tokens):
            end = min(start + step.chunk_tokens, len(plan.ids))
            if step.token_delay:
                await asyncio.sleep(step.token_delay)
            if step.hold_after is not None and start <= step.hold_after < end:
                await self._hold(step.hold, aborted)
            if step.error_after is not None and start >= step.error_after:
                yield _error(500, step.error)
                break
            if step.cut_after is not None and end > step.cut_after:
                raise Cut
            if aborted.is_set():
                end, stopped = start, True
            else:
                stopped = False
                generation.sampled_ids += plan.ids[start:end]
                generation.logprobs += plan.logprobs[start:end]
                generation.weight_versions += [self.model.weight_version] * (end - start)
            if stopped or end == len(plan.ids):
                generation.finish_reason = "abort" if stopped else plan.finish_reason
            yield self._event(plan, start, end, generation)
            if stopped:
                break
        self.model.log.end(generation, "done")  # who reads the log when the stream has ended finds it there

    async def _hold(self, name: str, aborted: asyncio.Event) -> None:
        await self.model.log.changed()
        waits = [asyncio.create_task(self.model.hold(name)), asyncio.create_task(aborted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _event(self, plan: Plan, start: int, end: int, generation: Generation) -> dict[str, Any]:
        begin = start if self.incremental and generation.request.get("stream") else 0
        bare = plan.step.logprobs == "omit" or plan.step.omit_token_ids
        pairs = None if bare else [[logprob_of(plan, k), plan.ids[k], None] for k in range(begin, end)]
        meta = {
            "id": generation.request["rid"],
            "finish_reason": _finish(plan, generation),
            "prompt_tokens": len(generation.context_ids),
            "weight_version": self.model.weight_version,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": pairs,
            "completion_tokens": end + plan.step.usage_extra,
            "cached_tokens": 0,
        }
        if generation.finish_reason is not None:
            meta |= {"weight_versions": _spans(generation.weight_versions), "e2e_latency": 0.1}
        event = {"text": "".join(plan.pieces[begin:end]), "output_ids": plan.ids[begin:end], "meta_info": meta}
        return {key: event[key] for key in event if not (key == "output_ids" and plan.step.omit_token_ids)}


def _finish(plan: Plan, generation: Generation) -> dict[str, Any] | None:
    match generation.finish_reason:
        case None:
            return None
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "length":
            return {"type": "length", "length": len(plan.ids)}
        case _:
            return {"type": "stop", "matched": plan.stop_string or plan.ids[-1]}


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans, start = [], 0
    for version, group in itertools.groupby(versions):
        end = start + len(list(group))
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans or [{"version": INITIAL, "start": 0, "end": 0}]


def _refused(prompt: list[int], settings: dict[str, Any], context: int) -> str | None:
    if len(prompt) >= context:
        return f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
    total = len(prompt) + settings["max_new_tokens"]
    if total > context:
        return (
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {total} tokens: {len(prompt)} tokens from the input messages and {settings['max_new_tokens']} "
            "tokens for the completion. Please reduce the number of tokens in the input messages or the completion "
            "to fit within the limit."
        )
    return None


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "internal_error"
    return {"error": {"message": message, "type": kind, "code": status, "retryable": False}}


def _answer_to_probe(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What the questions that are asked at the start get."""
    prompt, settings = body["input_ids"], body["sampling_params"]
    if prompt[:3] != [1, 2, 3]:
        return None
    if "regex" in settings:
        return [{"text": "polar", "output_ids": [5, 2], "meta_info": {}}]
    sampled = [4, 5, 6, 7]
    meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": 4}, "prompt_tokens": len(prompt)}
    if body.get("logprob_start_len") == 0:
        scored = [[None, 1, None], *[[-2.0, token, None] for token in prompt[1:]]]
        return [{"text": "", "output_ids": [8], "meta_info": meta | {"input_token_logprobs": scored}}]
    pairs = [[value, token, None] for value, token in zip(oracle.logprobs(prompt, sampled), sampled, strict=True)]
    meta |= {"completion_tokens": 4, "output_token_logprobs": pairs, "weight_version": INITIAL}
    meta |= {"weight_versions": [{"version": INITIAL, "start": 0, "end": 4}]}
    return [{"text": "abcd", "output_ids": sampled, "meta_info": meta}]


async def _each(events: AsyncIterator[dict[str, Any]] | list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    if isinstance(events, list):
        for event in events:
            yield event
    else:
        async for event in events:
            yield event


@dataclass(frozen=True, slots=True)
class RunningSGLang:
    """Where it listens, the model behind it, and the server itself."""

    url: str
    model: ScriptedModel
    server: ScriptedSGLang


@asynccontextmanager
async def scripted_sglang(
    model_dir: Path | str,
    script: Script | list[Step],
    *,
    incremental: bool = False,
    stripped: Sequence[str] = (),
    max_model_len: int = 32768,
    **flags: Any,
) -> AsyncIterator[RunningSGLang]:
    """A scripted SGLang on loopback, in this process, until the block ends."""
    script = script if isinstance(script, Script) else Script(script)
    model = ScriptedModel(model_dir, script, max_model_len=max_model_len)
    server = ScriptedSGLang(model, incremental=incremental, stripped=stripped, flags=flags)
    runner = web.AppRunner(server.app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield RunningSGLang(f"http://127.0.0.1:{runner.addresses[0][1]}", model, server)
    finally:
        await runner.cleanup()
