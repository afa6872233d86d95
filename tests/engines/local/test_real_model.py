"""The model that the demo uses, on the embedded engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from polar.contract.arrays import Ids, ids
from polar.engines.models import ensure_model

from .calls import call, scored
from .conftest import StartEngine

pytestmark = pytest.mark.real

END_OF_TURN = 2


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_model("SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def ask(folder: Path, tokenizer: Tokenizer) -> Callable[[str], Ids]:
    """A prompt in the model's own template, with the system text that it was trained with."""
    template = ImmutableSandboxedEnvironment().from_string((folder / "chat_template.original.jinja").read_text())

    def render(question: str) -> Ids:
        messages = [{"role": "user", "content": question}]
        return ids(tokenizer.encode(template.render(messages=messages, add_generation_prompt=True)).ids)

    return render


async def test_it_knows_the_capital_of_france(
    start: StartEngine, folder: Path, tokenizer: Tokenizer, ask: Callable[[str], Ids]
) -> None:
    engine, prompt = await start(folder, threads=None), ask("What is the capital of France?")
    reply = await call(engine, prompt, temperature=0.0, max_tokens=40, stop_ids=[END_OF_TURN])
    assert "Paris" in tokenizer.decode(reply.ids)
    assert (reply.finish_reason, reply.ids[-1]) == ("stop", END_OF_TURN)


async def test_sampled_logprobs_are_what_one_pass_gives_across_two_turns(
    start: StartEngine, folder: Path, tokenizer: Tokenizer, ask: Callable[[str], Ids]
) -> None:
    engine, prompt = await start(folder, threads=None), ask("Write one line about the sea.")
    first = await call(engine, prompt, seed=1, max_tokens=24)
    more = tokenizer.encode("<|im_end|>\n<|im_start|>user\nAnd one more.<|im_end|>\n<|im_start|>assistant\n").ids
    second_prompt = np.concatenate([prompt, ids(first.ids), ids(more)])
    second = await call(engine, second_prompt, seed=2, max_tokens=24)
    assert second.cached_tokens == len(prompt) + len(first.ids) - 1
    assert first.logprobs == pytest.approx(await scored(engine, prompt, first), abs=2e-4)
    assert second.logprobs == pytest.approx(await scored(engine, second_prompt, second), abs=2e-4)
