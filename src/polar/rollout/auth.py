"""Who may do what. A credential is a token with a name and a role; its holder may do what the role may.

``admin`` may do what ``submit`` may, and ``submit`` what ``read`` may; ``node`` is for gateway nodes alone, and an
admin can't pass for one. A node's token may be bound to the names of some nodes, and then speaks for no other. Tokens
are compared as digests, all of them each time, so that time tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from polar.contract.errors import UsageError
from polar.contract.rollout import AuditEntry
from polar.store.ledger import Ledger

Role = Literal["admin", "submit", "read", "node"]

_MAY: dict[Role, frozenset[Role]] = {
    "admin": frozenset({"admin", "submit", "read"}),
    "submit": frozenset({"submit", "read"}),
    "read": frozenset({"read"}),
    "node": frozenset({"node"}),
}
ADMIN_ENV = "POLAR_ADMIN_TOKEN"
NODE_ENV = "POLAR_NODE_TOKEN"
CALLBACK_ENV = "POLAR_CALLBACK_SECRET"
SHORTEST = 16
"""Characters that a token must have at least."""
REFUSALS_PER_SECOND = 20
"""So many refusals of unknown callers are logged one by one; the rest of that second as a number."""
SHARED_NODE = "node"
"""The name of the node token that is always there, and good for any node."""
_NODES = r"[A-Za-z0-9*?][A-Za-z0-9_.*?-]{0,127}"


class TokenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further token: whose it is, what it may do, and the environment variable that has it.

    ``nodes``, with the role ``node``: the only names under which it is good, or patterns of them (``*``, ``?``)."""

    name: str
    role: Role
    env: str
    nodes: tuple[str, ...] | None = None


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``anonymous`` is what a caller without a credential may do, for trainers that send none: nothing by default."""

    tokens: tuple[TokenConfig, ...] = ()
    anonymous: Literal["read", "submit"] | None = None


class Actor(msgspec.Struct, frozen=True):
    """Who calls: the name of the credential, its role, and the nodes that it may speak for (``None``: any)."""

    name: str
    role: Role
    nodes: tuple[str, ...] | None = None

    def may(self, role: Role) -> bool:
        """Whether it may do what this role may."""
        return role in _MAY[self.role]

    def not_for(self, node_id: str) -> str | None:
        """Why it may not speak for this node, and what to do; ``None``: it may."""
        if self.nodes is None or any(fnmatchcase(node_id, pattern) for pattern in self.nodes):
            return None
        return (
            f"the token {self.name} is good for the nodes {', '.join(self.nodes)}, and not for {node_id[:128]}: "
            "start that one under another name (--node-id) or with another token, or add it to nodes in auth.tokens"
        )


class Credentials:
    """The tokens that are good, by digest, and the secrets that this server itself uses.

    Args:
        tokens: a name, a role and the token, each.
        anonymous: the role of a caller without a token.
        bound: the names of those tokens that are good for some nodes only, and which.
    """

    def __init__(
        self,
        tokens: Sequence[tuple[str, Role, str]],
        *,
        anonymous: Role | None = None,
        bound: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        self._known = [(_digest(token), Actor(name, role, bound.get(name))) for name, role, token in tokens]
        self._of_nodes = {name: token for name, role, token in tokens if role == "node"}
        self._anonymous = Actor("anonymous", anonymous) if anonymous else None

    def of_node(self, credential: str) -> str | None:
        """The node token of this name: what this server shows to a node that has shown it. Never another one, which
        would be given to whoever listens there."""
        return self._of_nodes.get(credential)

    def who(self, token: str | None) -> Actor | None:
        """Whose token this is; ``None``: nobody's."""
        if token is None:
            return self._anonymous
        shown = _digest(token)
        found: Actor | None = None
        for digest, actor in self._known:
            if hmac.compare_digest(shown, digest):
                found = actor
        return found


def load_credentials(
    config: AuthConfig, folder: Path, environ: Mapping[str, str] | None = None
) -> tuple[Credentials, list[Path]]:
    """The credentials of a server, and the files in which it keeps those that it made itself.

    The admin and the node token come from ``POLAR_ADMIN_TOKEN`` and ``POLAR_NODE_TOKEN``; where one is not set, it is
    made at the first start, in a file in ``folder`` that only its user can read.

    Raises:
        UsageError: a token's variable is not set, a token is too short or is there twice, or a file is readable by
            others.
    """
    env = os.environ if environ is None else environ
    files: list[Path] = []
    tokens: list[tuple[str, Role, str]] = []
    for name, role, variable in (("admin", "admin", ADMIN_ENV), (SHARED_NODE, "node", NODE_ENV)):
        token = env.get(variable)
        if not token:
            path = folder / f"{name}.token"
            token = kept_secret(path)
            files.append(path)
        tokens.append((name, role, _long_enough(token, variable)))  # type: ignore[arg-type]
    for each in config.tokens:
        given = env.get(each.env)
        if not given:
            raise UsageError(f"auth.tokens: {each.name}: the environment variable {each.env} is not set")
        tokens.append((each.name, each.role, _long_enough(given, each.env)))
    return Credentials(_all_apart(tokens), anonymous=config.anonymous, bound=_bound(config)), files


def node_credentials(config: AuthConfig, node_token: str, environ: Mapping[str, str]) -> Credentials:
    """The credentials of a node that is apart from its server: the node token, by which the server is known, and for
    its numbers ``POLAR_ADMIN_TOKEN`` and those of ``auth.tokens``, as far as they are set here, too: settings may be
    shared with the server. None is made, and no further one is good for what the server asks of a node.

    Raises:
        UsageError: a token is too short or is there twice.
    """
    tokens: list[tuple[str, Role, str]] = [("rollout server", "node", node_token)]
    readers = [("admin", "admin", ADMIN_ENV), *((each.name, each.role, each.env) for each in config.tokens)]
    for name, role, variable in readers:
        if role != "node" and (given := environ.get(variable)):
            tokens.append((name, role, _long_enough(given, variable)))
    return Credentials(_all_apart(tokens))


def _bound(config: AuthConfig) -> dict[str, tuple[str, ...]]:
    """The tokens that are good for some nodes only."""
    found = {each.name: each.nodes for each in config.tokens if each.nodes is not None}
    for each in config.tokens:
        if each.nodes is None:
            continue
        where = f"auth.tokens: {each.name}: nodes"
        if each.role != "node":
            raise UsageError(f"{where} is for tokens of the role node, and this one has {each.role}: leave it out")
        if not each.nodes:
            raise UsageError(f"{where} is empty: name one, or leave it out for a token that is good for any node")
        if odd := [pattern for pattern in each.nodes if not re.fullmatch(_NODES, pattern)]:
            raise UsageError(
                f"{where}: {odd[0][:64]!r} is no name of a node, nor a pattern such as gpu-*: they are of letters, "
                "digits, '_', '.', '-', '*' and '?', 128 at most"
            )
    return found


def _all_apart(tokens: list[tuple[str, Role, str]]) -> list[tuple[str, Role, str]]:
    """These, if no two have the same name or token."""
    for what in (0, 2):
        values = [entry[what] for entry in tokens]
        if len(set(values)) < len(values):
            raise UsageError(f"auth.tokens: two of them have the same {'name' if what == 0 else 'token'}")
    return tokens


def kept_secret(path: Path) -> str:
    """The secret in this file, which is made if it is not there.

    Raises:
        UsageError: others can read it, or it can't be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if path.stat().st_mode & 0o077:
                raise UsageError(f"{path} has a secret that others can read: chmod 600 it, or remove it") from None
            return path.read_text(encoding="ascii").strip()
        secret = secrets.token_urlsafe(32)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secret + "\n")
            file.flush()
            os.fsync(file.fileno())
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{path} can't be used for a secret: {error}") from None
    return secret


class Audit:
    """The audit log of a server: who did or was refused what."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._second = 0
        self._refused = 0

    async def done(self, actor: Actor, action: str, subject: str) -> None:
        """Somebody is about to do this. Durable when it returns, so that nothing is done unseen."""
        await self._ledger.audit(
            AuditEntry(time=time.time(), actor=actor.name, action=action, subject=subject, allowed=True)
        )

    async def refused(self, actor: Actor | None, action: str, subject: str, why: str) -> None:
        """Somebody was refused. A flood of unknown callers does not fill the disk: it becomes a number."""
        now = time.time()
        name, detail = (actor.name if actor else "unknown"), why
        if actor is None:
            if int(now) != self._second:
                more = self._refused - REFUSALS_PER_SECOND
                detail += f"; {more} more in the second before" if more > 0 else ""
                self._second, self._refused = int(now), 0
            self._refused += 1
            if self._refused > REFUSALS_PER_SECOND:
                return
        await self._ledger.audit(
            AuditEntry(time=now, actor=name, action=action, subject=subject, allowed=False, detail=detail)
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _long_enough(token: str, where: str) -> str:
    if len(token) < SHORTEST:
        raise UsageError(f"{where}: a token has {SHORTEST} characters or more: take one of random characters")
    return token
