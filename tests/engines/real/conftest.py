"""One real vLLM and one real SGLang for the whole test session, on this machine's CPU."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from safetensors.numpy import load_file, save_file

from polar.contract.completion import Completion
from polar.contract.result import Trajectory
from polar.contract.task import BuilderSpec
from polar.engines.base import Engine
from polar.engines.models import ensure_model
from polar.gateway.node import Node
from polar.gateway.session import LiveSession
from polar.store import open_store
from polar.store.base import SessionRecord
from polar.trajectories.assemble import assemble
from tests.engines.real.install import running, sglang_command, sglang_router_command, vllm_command
from tests.support.ports import free_port

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def weights() -> Path:
    """The model folder, converted by our own code."""
    return ensure_model(MODEL)


@pytest.fixture(scope="session")
def other_weights(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a final norm that makes it another."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(weights, folder)
    tensors = load_file(weights / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def vllm(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a vLLM that has everything switched on."""
    options = {
        "--served-model-name": "smollm2",
        "--dtype": "float32",
        "--max-model-len": "8192",
        "--max-num-seqs": "32",
        "--tool-call-parser": "hermes",
    }
    flags = ["--enforce-eager", "--enable-auto-tool-choice", "--enable-scale-out"]
    line = [*vllm_command(), "serve", str(weights), *(word for pair in options.items() for word in pair), *flags]
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with running(line, env, log, health="/health") as url:
        yield url


@pytest.fixture(scope="session")
def sglang(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an SGLang."""
    options = {
        "--model-path": str(weights),
        "--device": "cpu",
        "--dtype": "float32",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--context-length": "8192",
        "--max-total-tokens": "16384",
        "--max-running-requests": "16",
        "--mem-fraction-static": "0.3",
    }
    flags = ["--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle"]
    line = [*sglang_command(), *(word for pair in options.items() for word in pair), *flags]
    # Of two threads on cores that others use as well, each waits for the other, spinning.
    env = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with running(line, env, log, health="/health") as url:
        yield url


@pytest.fixture(scope="session")
def sglang_router(sglang: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of SGLang's own router before it."""
    line = [*sglang_router_command(), "--worker-urls", sglang, "--prometheus-port", str(free_port())]
    with running(line, {}, tmp_path_factory.mktemp("router") / "router.log", health="/health") as url:
        yield url


@dataclass
class World:
    """A gateway before a real engine, with one open session."""

    node: Node
    session: LiveSession

    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.node.server.url}/v1", api_key=self.session.key, max_retries=0)

    async def completions(self) -> list[Completion]:
        for call in list(self.session.calls):
            await call.settled()
        return await self.node.store.completions(self.session.session_id)

    async def trajectory(self) -> Trajectory:
        return assemble(await self.completions(), BuilderSpec(), status="COMPLETED")


MakeWorld = Callable[..., Any]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[MakeWorld]:
    async with AsyncExitStack() as stack:

        async def make(engine: Engine, name: str = "polar") -> World:
            node = Node(engine, open_store(str(tmp_path / f"{name}.db")), tmp_path)
            await node.start()
            stack.push_async_callback(node.close)
            record = SessionRecord(
                session_id="s", task_id="t", sample_index=0, state="RUNNING", created_at=0.0, updated_at=0.0
            )
            await node.store.put_session(record)
            session = LiveSession(session_id="s")
            node.gateway.open(session)
            return World(node, session)

        yield make
