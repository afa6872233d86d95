"""Why: the one thing that tests can't have is a strong model. This stands in for it at the edge, in vLLM's wire
shapes over real HTTP, with a real tokenizer and template; everything on our side of the wire stays real.

    python -m tests.support.scripted --model-dir DIR --script FILE --port 0     # prints its URL

``POST /scripted/release {"hold": NAME}`` and ``GET /scripted/log`` reach it from another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support import oracle
from tests.support.hermes import HermesReader, whole_message
from tests.support.model import Generation, Log, Plan, Route, ScriptedModel
from tests.support.script import Script, Step, load_script
from tests.support.shapes import ChatShapes, CompletionsShapes, GenerateShapes, Shapes

_ROUTES: dict[str, Route] = {
    "/v1/chat/completions": "chat",
    "/inference/v1/generate": "generate",
    "/v1/completions": "completions",
}


class Cut(Exception):
    """The step wants the connection to break here."""


PROBE = Step(text="ok")


class ScriptedServer:
    """vLLM's routes over a ``ScriptedModel``. Calls that only ask what it can do (their request id is
    ``polar-probe``) are answered by ``probe`` and stand in no log. Paths in ``off`` are refused, as vLLM refuses
    generate where it was not asked for."""

    def __init__(
        self, model: ScriptedModel, *, name: str = "scripted", off: tuple[str, ...] = (), probe: Step = PROBE
    ) -> None:
        self.model = model
        self.name = name
        self.off = off
        self.probe = probe
        self.refuse: str | None = None
        """What its template says to every conversation that is to be counted."""
        self.app = web.Application(client_max_size=1 << 28)
        self.app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/version", self._version),
                web.get("/health", self._health),
                web.post("/v1/chat/completions", self._chat),
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions/render", self._render),
                web.post("/v1/chat/completions/derender", self._derender),
                web.post("/tokenize", self._tokenize),
                web.post("/scripted/release", self._release),
                web.get("/scripted/log", self._log),
            ]
        )

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": self.name, "object": "model", "owned_by": "vllm", "root": str(self.model.model_dir)}
        return web.json_response(
            {"object": "list", "data": [{**card, "parent": None, "max_model_len": self.model.max_model_len}]}
        )

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "0.0.scripted"})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _release(self, request: web.Request) -> web.Response:
        self.model.release((await request.json())["hold"])
        return web.json_response({})

    async def _log(self, _request: web.Request) -> web.Response:
        return web.json_response([asdict(generation) for generation in self.model.log.generations])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["model"] != self.name:
            return _error(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        try:
            prompt = self.model.render(body["messages"], tools, body.get("chat_template_kwargs") or {})
        except Exception as error:  # a template's own words, whatever they are
            return _error(400, str(error), "BadRequestError")
        limit = body.get("max_tokens")
        shapes = ChatShapes(self.name, body, prompt, tools=bool(tools))
        return await self._serve(request, body, prompt, body["messages"], limit, shapes)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.path in self.off:
            return _error(404, "Not Found", "NotFoundError")
        if self.refuse is not None:
            return _error(400, self.refuse, "BadRequestError")
        ids = self.model.render(body["messages"], body.get("tools"), body.get("chat_template_kwargs") or {})
        return web.json_response({"count": len(ids), "max_model_len": self.model.max_model_len, "tokens": ids})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["token_ids"]
        shapes = GenerateShapes(self.name, body, prompt)
        return await self._serve(request, body, prompt, None, body["sampling_params"].get("max_tokens"), shapes)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "prompt_logprobs" in body:
            return web.json_response({"choices": [{"index": 0, "prompt_logprobs": _scores(body["prompt"])}]})
        shapes = CompletionsShapes(self.name, body, body["prompt"])
        return await self._serve(request, body, body["prompt"], None, body.get("max_tokens"), shapes)

    async def _render(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.off:
            return _error(403, "Scale-out endpoints are disabled.", "PermissionDeniedError")
        body = await request.json()
        try:
            found = self.model.render(body["messages"], body.get("tools"), body.get("chat_template_kwargs") or {})
        except Exception as error:  # a template's own words, whatever they are
            return _error(400, str(error), "BadRequestError")
        return web.json_response({"request_id": "render", "token_ids": found})

    async def _derender(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        (choice,) = body["generate_response"]["choices"]
        reader = HermesReader(tools=bool(body["chat_request"].get("tools")))
        deltas = reader.feed(str(self.model.tokenizer.decode(choice["token_ids"]))) + reader.finish()
        return web.json_response({"choices": [{"index": 0, "message": whole_message(deltas)}]})

    async def _serve(
        self,
        request: web.Request,
        body: dict[str, Any],
        prompt: list[int],
        messages: list[dict[str, Any]] | None,
        limit: int | None,
        shapes: Shapes,
    ) -> web.StreamResponse:
        if request.path in self.off:
            return _error(403, "Scale-out endpoints are disabled.", "PermissionDeniedError")
        too_long = _too_long(len(prompt), limit, self.model.max_model_len)
        if too_long:
            return _error(400, too_long, "BadRequestError")
        is_probe = request.headers.get("X-Request-Id") == "polar-probe"
        try:
            step = self.probe if is_probe else self.model.script.step(self.model.conversation(prompt, messages))
        except LookupError as error:
            return _error(500, str(error), "InternalServerError")
        await asyncio.sleep(step.delay)
        if step.status is not None:
            return _error(step.status, step.error, "ScriptedError")
        stop = body.get("stop") or body.get("sampling_params", {}).get("stop") or ()
        plan = self.model.plan(step, prompt, max_tokens=limit, stop=[stop] if isinstance(stop, str) else stop)
        request_id = request.headers.get("X-Request-Id") or body.get("request_id") or uuid.uuid4().hex
        route = _ROUTES[request.path]
        log = Log() if is_probe else self.model.log
        generation = log.begin(route, request_id, prompt)
        generation.request = body
        return await self._answer(request, body, plan, generation, shapes, log)

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        plan: Plan,
        generation: Generation,
        shapes: Shapes,
        log: Log,
    ) -> web.StreamResponse:
        try:
            if body.get("stream"):
                response = await self._stream(request, plan, generation, shapes, log)
            else:
                async for _ in self._sample(plan, generation):
                    pass
                response = _json(shapes.whole(plan, generation))
                log.end(generation, "done")
            return response
        except (asyncio.CancelledError, ConnectionError):
            log.end(generation, "cancelled")
            raise
        except Cut:
            log.end(generation, "cut")
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        finally:
            await asyncio.shield(log.changed())

    async def _stream(
        self, request: web.Request, plan: Plan, generation: Generation, shapes: Shapes, log: Log
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in shapes.first(plan):
            await response.write(_event(event))
        async for start, end in self._sample(plan, generation):
            if plan.step.error_after is not None and start >= plan.step.error_after:
                error = {"message": plan.step.error, "type": "InternalServerError", "param": None, "code": 500}
                await response.write(_event({"error": error}))
                break
            for event in shapes.chunk(plan, start, end, generation):
                await response.write(_event(event))
        else:
            for event in shapes.last(plan, generation):
                await response.write(_event(event))
        log.end(generation, "done")  # who reads the log when the stream has ended finds it there
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _sample(self, plan: Plan, generation: Generation) -> AsyncIterator[tuple[int, int]]:
        """The chunks of a reply as spans of its ids, at the step's own pace."""
        step = plan.step
        for start in range(0, len(plan.ids), step.chunk_tokens):
            end = min(start + step.chunk_tokens, len(plan.ids))
            if step.token_delay:
                await asyncio.sleep(step.token_delay)
            if step.hold_after is not None and start <= step.hold_after < end:
                await self.model.log.changed()
                await self.model.hold(step.hold)
            if step.cut_after is not None and end > step.cut_after:
                raise Cut
            generation.sampled_ids += plan.ids[start:end]
            generation.logprobs += plan.logprobs[start:end]
            generation.weight_versions += [self.model.weight_version] * (end - start)
            yield start, end
        generation.finish_reason = plan.finish_reason


def _too_long(prompt: int, limit: int | None, context: int) -> str | None:
    if limit is not None and limit > context:
        return f"max_tokens={limit} cannot be greater than max_model_len={context}. Request fewer output tokens."
    if prompt + (limit or 0) > context or prompt >= context:
        return (
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt + (limit or 0)} tokens ({prompt} in the messages, {limit or 0} in the completion). "
            "Please reduce the length of the messages or completion."
        )
    return None


def _scores(prompt: list[int]) -> list[dict[str, Any] | None]:
    """What scoring a prompt gives: the model's own logprob of each token but the first."""
    known = oracle.logprobs([], prompt)
    pairs = zip(prompt[1:], known[1:], strict=True)
    return [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in pairs)]


def _error(status: int, message: str, kind: str) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=_dumps(value), content_type="application/json")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _dumps(value) + b"\n\n"


def _dumps(value: dict[str, Any]) -> bytes:
    """As Python servers write it: NaN and Infinity included, which are no JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@asynccontextmanager
async def scripted_engine(
    model_dir: Path | str,
    script: Script | list[Step],
    *,
    port: int = 0,
    log_path: Path | None = None,
    max_model_len: int = 32768,
    off: tuple[str, ...] = (),
    probe: Step = PROBE,
) -> AsyncIterator[RunningEngine]:
    """A scripted engine on loopback, in this process, until the block ends."""
    script = script if isinstance(script, Script) else Script(script)
    model = ScriptedModel(model_dir, script, log_path=log_path, max_model_len=max_model_len)
    server = ScriptedServer(model, off=off, probe=probe)
    runner = web.AppRunner(server.app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield RunningEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", model, server)
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """Where it listens, the model behind it (its script, its log, ``release``), and what answers for it."""

    url: str
    model: ScriptedModel
    server: ScriptedServer


async def _main(args: argparse.Namespace) -> None:
    options = {"port": args.port, "log_path": args.log, "max_model_len": args.max_model_len}
    async with scripted_engine(args.model_dir, load_script(args.script), **options) as engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.scripted", description=__doc__)
    parser.add_argument("--model-dir", required=True, type=Path)
    parser.add_argument("--script", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--max-model-len", type=int, default=32768)
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
