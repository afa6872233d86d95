"""The embedded engine as the rest of Polar sees it: asyncio outside, one thread that computes inside.

A call is a queue that the thread fills, one chunk a step. Whatever goes wrong in the thread reaches every
call as an ``EngineError``: nobody waits for a thread that is gone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polar.contract.arrays import Floats, Ids
from polar.contract.chat import Sampling
from polar.contract.errors import MissingExtra, UsageError
from polar.engines.base import EngineError, EngineInfo, TokenChunk
from polar.engines.models import ensure_model

if TYPE_CHECKING:
    from torch import Tensor

    from polar.engines.local.config import ModelConfig
    from polar.engines.local.worker import Worker

KV_BYTES = 8 * 2**30
"""Default bound on the memory for keys and values, if half of the machine's free memory is not less."""


class LocalEngine:
    """A token engine on PyTorch, float32, on this machine's CPU.

    Args:
        model: a Hugging Face folder, or a name that ``engines.models.ensure_model`` knows.
        context_length: a shorter context than the model's own.
        max_running: calls that are computed at once; the rest wait in order.
        kv_tokens: bound on the tokens whose keys and values are in memory: what running calls may come to
            hold, plus ended sequences kept for their prefixes. By default what fits into 8 GiB, or into half
            of the free memory if that is less.
        threads: threads of the matrix kernels; by default one for each CPU that this process may use. Threads
            wait for each other at every layer, so where other programs keep the CPUs busy fewer are faster.
        version: the name of the weights that are loaded first.
        progress: takes one line of text at a time while a model is fetched.

    A reply's logprobs are those of ``log_softmax(logits / temperature)``; see ``sampler`` for the details. The
    temperature is 1.0 where a call names none. ``max_tokens`` is cut to what the context leaves. Every chunk
    of a reply has the same ``cached_tokens``: how much of the prompt was not computed again.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        context_length: int | None = None,
        max_running: int = 32,
        kv_tokens: int | None = None,
        threads: int | None = None,
        version: str = "0",
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._name = model
        self._context_length = context_length
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._threads = threads or len(os.sched_getaffinity(0))
        self._version = version
        self._progress = progress
        self._info: EngineInfo | None = None
        self._config: ModelConfig | None = None
        self._worker: Worker | None = None

    @property
    def info(self) -> EngineInfo:
        """What it serves; known after ``start``."""
        if self._info is None:
            raise EngineError("unavailable", "the embedded engine has not been started")
        return self._info

    @property
    def weight_version(self) -> str:
        """The name of the weights that the next token is sampled from."""
        return self._version

    async def start(self) -> None:
        """Fetch the model if need be, load it, start the thread.

        Raises:
            MissingExtra: PyTorch or safetensors is not installed.
            UsageError: no such model, or one that this engine cannot run.
        """
        if self._worker is None:
            await asyncio.to_thread(self._start)

    def _start(self) -> None:
        try:
            import safetensors  # noqa: F401
            import torch
        except ImportError as error:
            raise MissingExtra("the embedded engine", "engine") from error
        from polar.engines.local.config import read_config
        from polar.engines.local.worker import Worker

        folder = ensure_model(self._name, progress=self._progress)
        config = read_config(folder)
        context = min(self._context_length or config.context_length, config.context_length)
        per_token = 2 * config.layers * config.kv_heads * config.head_dim * 4
        kv_tokens = self._kv_tokens or min(KV_BYTES, _free_memory() // 2) // per_token
        model = _packed(folder, config)
        self._config = config
        self._worker = Worker(
            model, self._version, max_running=self._max_running, kv_tokens=kv_tokens, threads=self._threads
        )
        name = self._name if isinstance(self._name, str) and not Path(self._name).is_dir() else folder.name
        self._info = EngineInfo(
            "local", name, context, str(folder), f"torch {torch.__version__}", logprobs="temperature"
        )

    async def close(self) -> None:
        """End every generation (finish reason "abort") and let go of the weights. Safe to call twice."""
        if self._worker is not None:
            await asyncio.to_thread(self._worker.close)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        affinity: str,
        response_format: dict[str, Any] | None = None,
        stream: bool = True,
    ) -> AsyncIterator[TokenChunk]:
        """Sample a reply, a chunk a token. A stop id is part of the reply and ends it.

        ``request_id`` and ``affinity`` change nothing here: every call can start from every known prefix. There is
        no grammar here, so ``response_format`` is never given (``info.structured``). ``stream`` makes no difference.

        Raises:
            EngineError: ``context_length``: the prompt fills the context; ``bad_request``: an empty prompt, ids
                outside the vocabulary, sampling settings that make no sense; ``internal``: the thread failed.
        """
        worker, config = self._ready()
        prompt = self._checked(prompt_ids, config)
        room = self.info.context_length - len(prompt)
        if room <= 0:
            raise EngineError(
                "context_length",
                f"the prompt has {len(prompt)} tokens, and the model's context is {self.info.context_length}",
            )
        from polar.engines.local.sampler import check_sampling

        check_sampling(sampling, config.vocab_size)
        queue: asyncio.Queue[TokenChunk | EngineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(item: TokenChunk | EngineError) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        call = worker.submit(prompt, sampling, stop_ids, min(sampling.max_tokens or room, room), emit)
        try:
            while True:
                item = await queue.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish_reason:
                    return
        finally:
            call.cancelled = True

    async def load_weights(self, source: str | Path | Mapping[str, Tensor], version: str) -> None:
        """Put other weights in, between two steps: from a Hugging Face folder or a state dict with its names.

        Running generations go on from the next token with the new weights and keep the keys and values they
        have (an in-flight update); each chunk names the version that it was sampled under. What was cached
        under the old weights serves no new call. On return the new weights are in place, and ``source`` may
        change again.

        Raises:
            UsageError: the weights do not fit the model; nothing has changed then.
            EngineError: the engine is closed or has failed.
        """
        worker, config = self._ready()
        where = Path(source) if isinstance(source, str | Path) else source
        model = await asyncio.to_thread(_packed, where, config)
        await asyncio.wrap_future(worker.load(model, version))
        self._version = version

    async def score(self, ids: Ids, temperature: float = 1.0) -> Floats:
        """Logprob of each of ``ids`` given those before it, under the weights as they are now: float32 [n], the
        first 0.0. Computed afresh, without any cache.

        Raises:
            EngineError: as ``generate``.
        """
        worker, config = self._ready()
        ids = self._checked(ids, config)
        if len(ids) > self.info.context_length:
            raise EngineError(
                "context_length",
                f"the sequence has {len(ids)} tokens, and the model's context is {self.info.context_length}",
            )
        return await asyncio.wrap_future(worker.score(ids, temperature))

    def _ready(self) -> tuple[Worker, ModelConfig]:
        if self._worker is None or self._config is None:
            raise EngineError("unavailable", "the embedded engine has not been started")
        return self._worker, self._config

    def _checked(self, ids: Ids, config: ModelConfig) -> Ids:
        checked = np.array(ids, dtype=np.int32)
        if not len(checked):
            raise EngineError("bad_request", "the prompt is empty")
        outside = checked[(checked < 0) | (checked >= config.vocab_size)]
        if len(outside):
            raise EngineError(
                "bad_request", f"token id {outside[0]} is outside the vocabulary of {config.vocab_size}"
            )
        return checked


def _packed(source: Path | Mapping[str, Tensor], config: ModelConfig) -> Any:
    import torch

    from polar.engines.local.packed import PackedModel
    from polar.engines.local.weights import check_weights, read_weights

    with torch.inference_mode():
        weights = read_weights(source, config) if isinstance(source, Path) else check_weights(source, config)
        return PackedModel(config, weights)


def _free_memory() -> int:
    """Bytes that can be had without pushing other things out."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError as error:
        raise UsageError("cannot tell the free memory here: give the engine kv_tokens") from error
    raise UsageError("cannot tell the free memory here: give the engine kv_tokens")
