"""Why: a callback address comes from whoever may submit a task, and must not become a way to make this server ask
things of machines that it can reach and they can't. Only hosts that the operator has listed are called, and loopback
as long as callers are there themselves; what a name resolves to is checked at the very connection, and redirects are
not followed.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver

from polar.contract.errors import NotAllowed, UsageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class HostNotAllowed(NotAllowed):
    """The address is not one that may be called."""


class AllowedHosts:
    """The hosts that may be called: these, and loopback.

    Args:
        loopback: this machine's own services may be called without being listed.
        listed: names (``trainer.example``), names with any first part (``*.example``), addresses and networks
            (``10.0.0.0/8``).

    Raises:
        UsageError: an entry is none of these.
    """

    def __init__(self, listed: Sequence[str] = (), *, loopback: bool = True) -> None:
        self._loopback = loopback
        self._names: set[str] = set()
        self._networks: list[Network] = []
        for entry in listed:
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError:
                if "/" in entry or ":" in entry or not entry.strip("*."):
                    raise UsageError(
                        f"callbacks.allow: {entry!r} is no host: write a name, *.name, an address or a network"
                    ) from None
                self._names.add(entry.lower().rstrip("."))

    def check_url(self, url: str) -> None:
        """See that this address may be called, as far as it says so itself.

        Raises:
            HostNotAllowed: it may not.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise HostNotAllowed("callback_url is no URL: write http://HOST:PORT/PATH") from None
        if parts.scheme not in ("http", "https") or not host or port == 0 or not url.isprintable() or " " in url:
            raise HostNotAllowed("callback_url must be http://HOST:PORT/PATH or https://HOST/PATH")
        if parts.username is not None or parts.password is not None:
            raise HostNotAllowed("callback_url must not have a user or a password in it")
        if not self._host_allowed(host):
            raise HostNotAllowed(
                f"callback_url: {host} is not a host that this server may call: its operator can add it to "
                "callbacks.allow"
            )

    def check_address(self, host: str, address: str) -> None:
        """See that a name of an allowed host means an address that may be called.

        Raises:
            HostNotAllowed: it means a place that no name may stand for.
        """
        found = _ip(address)
        if found is None or not self._address_allowed(host, found):
            raise HostNotAllowed(f"{host} resolves to {address}, which this server may not call")

    def _host_allowed(self, host: str) -> bool:
        address = _ip(host)
        if address is not None:
            return self._address_listed(address)
        return (host == "localhost" and self._loopback) or self._listed(host)

    def _address_listed(self, address: Address) -> bool:
        return (address.is_loopback and self._loopback) or any(address in network for network in self._networks)

    def _listed(self, host: str) -> bool:
        name = host.lower().rstrip(".")
        return name in self._names or any(
            entry.startswith("*.") and name.endswith(entry[1:]) and name != entry[2:] for entry in self._names
        )

    def _address_allowed(self, host: str, address: Address) -> bool:
        if self._address_listed(address):
            return True
        if not self._listed(host):
            return False  # localhost is here, and nowhere else
        if address.is_loopback:
            return host.lower().rstrip(".") == "localhost"
        # A listed name may be anywhere but where the services of a cloud's own machines are.
        return not (address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved)


class CheckedResolver(AbstractResolver):
    """Resolves names to addresses that may be called, and to no others. What is checked is what is connected to."""

    def __init__(self, allowed: AllowedHosts) -> None:
        self._allowed = allowed
        self._resolver = DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for each in found:
            self._allowed.check_address(host, each["host"])
        return found

    async def close(self) -> None:
        await self._resolver.close()


def _ip(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
