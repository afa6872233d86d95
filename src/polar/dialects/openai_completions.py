"""OpenAI plain completions: ``POST /v1/completions``, which is refused in words that say what to do.

Why it is served at all: a harness that tries it should read a reason and not a missing page. Why it is refused:
a plain prompt is text or token ids of no conversation. Made a user message it would be put through the chat
template, so the model would be trained on tokens that the harness never sent; and Polar tells which call
continues which, what is a side call and what is a sub-agent by messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polar.dialects.base import Call, CallError, Route
from polar.dialects.openai_chat import OpenAIChat


class OpenAICompletions(OpenAIChat):
    """The dialect (see ``polar.dialects.base.Dialect``): errors and models are those of the Chat API."""

    name = "openai_completions"
    routes: Sequence[Route] = (Route("POST", r"/v1/completions", "generate"),)

    def parse(self, body: bytes, headers: Mapping[str, str], path: Mapping[str, str]) -> Call:
        raise CallError(
            "bad_request",
            "Plain completions are not served: a prompt without messages can't be recorded as a conversation. "
            "Send the conversation as messages to /v1/chat/completions",
        )
