"""Inference over HTTP: a trainer stops it, changes the weights, says their version, and lets it go on."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from polar.rollout.auth import Role
from polar.rollout.hosting import Inference
from polar.rollout.http import Call, Query, Refused, Route, reply

LONGEST_PAUSE = 3600.0


class NewVersion(msgspec.Struct, forbid_unknown_fields=True):
    """The name of the weights from here on."""

    version: int | str


class InferenceAPI:
    """The routes of inference.

    Args:
        role: who may; a node has the same routes, for its server.
    """

    def __init__(self, inference: Inference | None, role: Role = "admin") -> None:
        self._inference = inference
        self._role = role

    def routes(self) -> list[Route]:
        """Their lines in the table."""
        base, role = "/admin/inference/", self._role
        timeout = Query("timeout_seconds", "How long calls may take to end.", float, 60.0, most=LONGEST_PAUSE)
        return [
            Route("GET", base + "status", "inference.status", role, self.status, "How inference stands."),
            Route(
                "POST", base + "pause", "inference.pause", role, self.pause, "Hold new calls, let the others end.",
                query=(timeout,), statuses=(504,), audited=_always,
            ),
            Route(
                "POST", base + "resume", "inference.resume", role, self.resume, "Go on.", audited=_always,
            ),
            Route(
                "POST", base + "version", "inference.version", role, self.version, "The weights have a new version.",
                body=NewVersion, audited=_always,
            ),
        ]  # fmt: skip

    async def status(self, call: Call) -> Response:
        return reply(await self._gate().status())

    async def pause(self, call: Call) -> Response:
        found = await self._gate().pause(call.query["timeout_seconds"])
        return reply(found, 200 if found["paused"] else 504)

    async def resume(self, call: Call) -> Response:
        return reply(await self._gate().resume())

    async def version(self, call: Call) -> Response:
        version = str(call.body.version)
        if not version.isprintable() or not 1 <= len(version) <= 128:
            raise Refused(422, "version must be 1 to 128 printable characters")
        return reply(await self._gate().set_version(version))

    def _gate(self) -> Inference:
        if self._inference is None:
            raise Refused(503, "there is no gateway here")
        return self._inference


def _always(_: Any) -> bool:
    return True
