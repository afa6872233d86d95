"""The audit log over HTTP: who read, exported, changed or was refused what. Reading it is written to it."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from polar.contract.rollout import AuditEntry
from polar.rollout.http import Call, Query, Route, reply
from polar.store.ledger import Ledger


class AuditLog(msgspec.Struct):
    """Entries, oldest first."""

    entries: list[AuditEntry]


class AuditAPI:
    """The route of the audit log."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def routes(self) -> list[Route]:
        """Its line in the table."""
        limit = Query("limit", "How many, the newest.", int, 1000, least=1, most=100_000)
        return [
            Route(
                "GET", "/audit", "audit.read", "admin", self.read, "Who did and was refused what.",
                query=(limit,), answer=AuditLog, audited=lambda _: True,
            ),
        ]  # fmt: skip

    async def read(self, call: Call) -> Response:
        return reply(AuditLog(await self._ledger.audit_log(call.query["limit"])))
