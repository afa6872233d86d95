"""A real harness, a real sandbox, a real engine, and a trainer that puts in new weights while the harness works: the
session stays exact, and each token is of the weights that it says it is of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.contract.chat import Sampling
from polar.contract.result import Trace
from polar.contract.task import AgentSpec, TaskRequest
from polar.engines import make_engine
from polar.engines.weights import update_weights
from polar.gateway.lifecycle import Pools
from polar.gateway.node import Node
from polar.gateway.tasks import make_parts, run_tasks
from polar.harnesses.install import install
from polar.results import rebuild
from polar.store import open_store
from tests.e2e.oracle import check_accounts
from tests.engines.real.scoring import CLOSE, response_scores

pytestmark = [pytest.mark.real, pytest.mark.slow]
TASK = TaskRequest(
    task_id="t",
    instruction="Make greeting.txt with the word hello in it.",
    agent=AgentSpec(harness="mini_swe_agent", model_name="some/model"),
    sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=100),
    timeout_seconds=240.0,
)
"""A model this small calls no tool, and is told so until the harness has enough: a session of three calls. Of a reply
that was cut off the harness keeps nothing, so that a new trace begins."""


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_harness_whose_model_learns_while_it_works(
    kind: str, weights: Path, other_weights: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url: str = request.getfixturevalue(kind)
    install("mini_swe_agent")
    await update_weights(url, kind, weights, "1")
    node = Node(make_engine(kind, url=url, mode="tito"), open_store(str(tmp_path / "polar.db")), tmp_path)
    await node.start()
    try:
        running = asyncio.create_task(run_tasks(node, [(TASK, await make_parts(TASK))], pools=Pools()))
        await first_call(node, running)
        await update_weights(url, kind, other_weights, "2")
        await running
        (result,) = [await rebuild(node.store, each) for each in await node.store.results()]
        completions = await node.store.completions(result.session_id)
        assert result.status == "COMPLETED", result.error
        assert {each.outcome for each in completions} == {"ok"}
        check_accounts(result, completions)
        traces = result.trajectory.traces
        assert sum(len(trace.completion_ids) for trace in traces) == len(completions) > 1
        old = np.concatenate([under_the_old_weights(trace) for trace in traces])
        off = np.concatenate([await difference(url, kind, trace) for trace in traces])
        assert 0 < old.sum() < len(old)
        print(
            f"{kind}: {len(completions)} calls, {len(traces)} traces; {old.sum()} tokens of the old weights, off by "
            f"{off[old].max():.2f} at most, {(~old).sum()} of the new ones, by {off[~old].max():.1e}"
        )
        assert off[old].max() > 10 * CLOSE
        assert off[~old].max() < CLOSE
    finally:
        await update_weights(url, kind, weights, "default", mode="abort")
        await node.close()


async def first_call(node: Node, running: asyncio.Task[Any]) -> None:
    """Until the first reply is on disk; the harness is at work on the second."""
    async with asyncio.timeout(120):
        while not await node.store.completions("t-0"):
            assert not running.done(), "the session made no call"
            await asyncio.sleep(0.05)


def under_the_old_weights(trace: Trace) -> np.ndarray[Any, Any]:
    """Which of the trained tokens say that they are older than the update: those before it, and none after."""
    versions = trace.weight_versions[trace.loss_mask == 1]
    assert (np.diff(versions) >= 0).all()
    assert set(versions.tolist()) <= {1, 2}
    return versions == 1


async def difference(url: str, kind: str, trace: Trace) -> np.ndarray[Any, Any]:
    """How far the trained tokens' logprobs are from what the engine says of them now."""
    return np.abs(await response_scores(url, kind, trace) - trace.response_logprobs)[trace.loss_mask == 1]
