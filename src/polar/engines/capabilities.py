"""Why: servers of one kind differ by version, flags and the router before them, and what one can't give is found out
at the worst moment. So it is asked once, with real calls, and what came is kept here as plain data.
"""

from __future__ import annotations

import msgspec

from polar.contract.completion import LogprobKind


class Shortcoming(msgspec.Struct, frozen=True):
    """Something a server can't give, and what to do about it."""

    what: str
    fix: str


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a server was seen to do. ``None``: it could not be told."""

    kind: str
    version: str | None
    model: str
    context_length: int
    token_route: str | None
    """The path that takes prompt ids and returns sampled ids; ``None``: it has none that works."""
    chat_ids: bool
    """Chat completions return the ids of prompt and reply."""
    weight_versions: bool
    """The token route says under which weights each token was sampled."""
    weight_updates: bool | None
    """It can be paused and given new weights while it serves."""
    renders: bool
    """It renders and parses chats by routes of their own."""
    logprobs: LogprobKind
    structured_outputs: bool | None
    prefix_caching: bool | None
    images: bool | None
    missing: tuple[Shortcoming, ...] = ()

    def summary(self) -> str:
        """One line for people."""
        told = {True: "yes", False: "no", None: "unknown"}
        mode = f"token ids by {self.token_route}" if self.token_route else "chat mode only"
        version = f" {self.version}" if self.version else ""
        parts = [
            f"{self.kind}{version}, {self.model}, context {self.context_length or 'unknown'}",
            mode,
            f"ids in chat {told[self.chat_ids]}",
            f"logprobs {self.logprobs}",
            f"weight versions {told[self.weight_versions]}",
            f"weight updates {told[self.weight_updates]}",
            f"render route {told[self.renders]}",
            f"structured outputs {told[self.structured_outputs]}",
            f"prefix caching {told[self.prefix_caching]}",
            f"images {told[self.images]}",
        ]
        return "; ".join(parts)
