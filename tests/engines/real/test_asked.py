"""What a harness may ask for beside a reply, at real engines: a schema, a count, a prompt of its own."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from polar.engines.base import Engine
from polar.engines.sglang import SGLangEngine
from polar.engines.vllm import VLLMEngine
from tests.engines.real.conftest import MakeWorld, World

pytestmark = [pytest.mark.real, pytest.mark.slow]

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
MESSAGES: Any = [{"role": "user", "content": "Tell me of a city, in JSON."}]
PROMPT = "<|im_start|>user\nName a city.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(params=["vllm", "sglang"])
def make(request: pytest.FixtureRequest) -> Any:
    """An engine of either kind, in either mode."""
    url = request.getfixturevalue(request.param)
    kind = VLLMEngine if request.param == "vllm" else SGLangEngine

    def made(mode: Any = None) -> Engine:
        return kind(url, mode=mode)

    return made


@pytest.mark.parametrize("mode", [None, "chat"], ids=["tito", "chat"])
async def test_a_reply_is_held_to_its_schema(make: Any, gateway: MakeWorld, mode: Any) -> None:
    world: World = await gateway(make(mode))
    for _ in range(6):  # the grammar allows any white space, and so small a model may write it up to its limit
        reply = await world.client().chat.completions.create(
            model="m", messages=MESSAGES, response_format=FORM, max_tokens=60
        )
        if reply.choices[0].finish_reason == "stop":
            break
    said = json.loads(reply.choices[0].message.content or "")
    assert set(said) == {"city", "big"}
    for completion in await world.completions():
        assert (completion.outcome, completion.metadata["logprobs"]) == ("ok", "masked")


async def test_a_count_in_chat_mode_is_the_prompt_of_the_call(make: Any, gateway: MakeWorld) -> None:
    world: World = await gateway(make("chat"))
    client = anthropic.AsyncAnthropic(base_url=world.node.server.url, api_key=world.session.key)
    counted = await client.messages.count_tokens(model="m", messages=MESSAGES, system="Be brief.")
    reply = await client.messages.create(model="m", messages=MESSAGES, system="Be brief.", max_tokens=4)
    [completion] = await world.completions()
    assert counted.input_tokens == completion.prompt_len
    assert reply.stop_reason in ("max_tokens", "end_turn")


async def test_a_client_of_token_ids_is_one_trace(make: Any, gateway: MakeWorld) -> None:
    world: World = await gateway(make())
    prompt: Any = PROMPT
    for _ in range(3):
        reply: Any = await world.client().completions.create(
            model="m", prompt=prompt, max_tokens=8, logprobs=0, extra_body={"return_token_ids": True}
        )
        [choice] = reply.choices
        assert len(choice.token_ids) == len(choice.logprobs.token_logprobs) > 0
        prompt = [*choice.prompt_token_ids, *choice.token_ids]
    completions = await world.completions()
    assert [completion.split for completion in completions] == [None] * 3
    [trace] = (await world.trajectory()).traces
    assert [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()] == prompt
    assert trace.loss_mask.tolist() == [1] * len(trace.response_ids)
