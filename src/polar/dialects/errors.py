"""Why in one place: which status a harness gets decides whether it asks again, gives up or compacts, whatever API it
speaks. Each API then has its own names for the same thing, and its own words for a prompt over the context.
"""

from __future__ import annotations

from typing import NamedTuple

from polar.dialects.base import CallError, ErrorKind


class Told(NamedTuple):
    """One kind of error: its status, OpenAI's type and code, Anthropic's type, Google's status."""

    status: int
    openai: str
    code: str | None
    anthropic: str
    google: str


ERRORS: dict[ErrorKind, Told] = {
    "bad_request": Told(400, "invalid_request_error", None, "invalid_request_error", "INVALID_ARGUMENT"),
    "unauthorized": Told(401, "authentication_error", "invalid_api_key", "authentication_error", "UNAUTHENTICATED"),
    "not_found": Told(404, "invalid_request_error", "not_found", "not_found_error", "NOT_FOUND"),
    "conflict": Told(400, "idempotency_error", "idempotency_key_reused", "invalid_request_error", "INVALID_ARGUMENT"),
    "gone": Told(410, "invalid_request_error", "session_closed", "invalid_request_error", "FAILED_PRECONDITION"),
    "too_large": Told(413, "invalid_request_error", "request_too_large", "request_too_large", "INVALID_ARGUMENT"),
    "context_length": Told(
        400, "invalid_request_error", "context_length_exceeded", "invalid_request_error", "INVALID_ARGUMENT"
    ),
    # Anthropic's own status is 529, after which some clients give up sooner than after 503.
    "overloaded": Told(503, "server_error", "overloaded", "overloaded_error", "UNAVAILABLE"),
    "unavailable": Told(502, "server_error", "engine_unavailable", "api_error", "UNAVAILABLE"),
    "internal": Told(500, "server_error", "internal_error", "api_error", "INTERNAL"),
}


def error_text(error: CallError, over: str, over_unknown: str) -> str:
    """The message of an error; of a prompt over the context, in words that make harnesses compact.

    Args:
        over: with ``{prompt}`` and ``{limit}``, tokens.
        over_unknown: with ``{message}``, where the engine did not say how many tokens.
    """
    if error.kind == "unavailable":
        return f"Server error: {error.message}"  # in a stream there is no status, and pi asks again by these words
    if error.kind != "context_length":
        return error.message
    if error.prompt_tokens is None or error.max_tokens is None:
        return over_unknown.format(message=error.message)
    return over.format(prompt=error.prompt_tokens, limit=error.max_tokens)


def retry_headers(error: CallError) -> dict[str, str]:
    """When to ask again, where that is known."""
    return {"retry-after": str(error.retry_after)} if error.retry_after is not None else {}
