"""Why: a logprob is of some distribution, and engines differ in which. Where it is not the one that a reply was
sampled from, a trainer that compares it with its own is misled without noticing. So each call says what its
logprobs are of, and where that is a trap one line says so.
"""

from __future__ import annotations

from typing import Literal

from polar.contract.chat import Sampling
from polar.contract.completion import LogprobKind

Distribution = Literal[
    "sampling",  # the one that the tokens were drawn from
    "temperature",  # the model's at the sampling temperature; truncation or penalties came after
    "raw",  # the model's own; temperature, truncation or penalties came after
    "masked",  # after a grammar's mask: what it forces has logprob 0
    "unknown",
]

GREEDY_BELOW = 1e-5


def distribution(
    kind: LogprobKind, sampling: Sampling, *, constrained: bool = False, engine_defaults: bool = False
) -> tuple[Distribution, str | None]:
    """What a call's logprobs are of, and one line where that misleads a trainer.

    Args:
        kind: what the engine's logprobs are of.
        sampling: the call's; what it leaves open counts as temperature 1 and nothing else.
        constrained: a grammar decided which tokens were allowed.
        engine_defaults: what the call leaves open is the engine's to fill in (servers take it from the model's
            own generation config), and it does not say how.
    """
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    shaped = _shaped(sampling)
    if constrained:
        return "masked", "a grammar (tool_choice or response_format) forced tokens: logprobs are after its mask"
    if temperature < GREEDY_BELOW:
        line = "temperature 0 is greedy: there was no distribution to sample from, whatever the logprobs are of"
        return ("unknown" if kind == "processed" else kind), line
    left_open = [name for name in ("temperature", "top_p", "top_k") if getattr(sampling, name) is None]
    if engine_defaults and left_open and kind != "processed":
        line = "are left to the engine, whose defaults may be the model's own: set them in the task's sampling"
        return "unknown", f"{', '.join(left_open)} {line}"
    if kind == "processed" or (not shaped and (kind == "temperature" or temperature == 1.0)):
        return "sampling", None
    if temperature != 1.0 and kind != "temperature":
        shaped.insert(0, f"temperature {temperature:g}")
    settings = ", ".join(shaped)
    if kind == "unknown":
        return kind, f"the engine does not say whether its logprobs are before or after {settings}: sample without"
    return kind, f"the engine's logprobs are before {settings}: sample without, or have it report processed ones"


def _shaped(sampling: Sampling) -> list[str]:
    """The settings beside the temperature that change what is drawn from."""
    off = {
        "top_p": (None, 1.0),
        "top_k": (None, 0, -1),
        "min_p": (None, 0.0),
        "presence_penalty": (None, 0.0),
        "frequency_penalty": (None, 0.0),
        "repetition_penalty": (None, 1.0),
    }
    found = [f"{name} {value:g}" for name, values in off.items() if (value := getattr(sampling, name)) not in values]
    return [*found, "logit_bias"] if sampling.logit_bias else found
