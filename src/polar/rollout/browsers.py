"""Why: where an operator lets callers without a token in (``auth.anonymous``), a page of any web site that somebody
has open on a machine of that network could call this server, too: by a form (no permission is asked for that), or
under a name of its own that it lets point here. A page can't send a token that it does not know. So what a browser
says of a page of another place, and what is addressed to a name that is not the server's, needs one.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit


class OwnNames:
    """The names of this server.

    Args:
        urls: its addresses; their hosts are its names, besides those of the machine. A name without a dot and an
            address are always right: no web site can have them.
    """

    def __init__(self, urls: Sequence[str] = ()) -> None:
        self._names = {socket.gethostname().lower()}
        self._names |= {(urlsplit(url).hostname or "").lower() for url in urls}

    def foreign(self, headers: Mapping[str, str]) -> str | None:
        """Why a request without a token may come from a page of another place, in one line; ``None``: it does not."""
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return "a page of another site needs a token: send one as 'Authorization: Bearer TOKEN'"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "a page of another site needs a token: send one as 'Authorization: Bearer TOKEN'"
        if not self._own(host):
            return f"without a token this server is called by its own names, not {host[:100]!r}: set public_url"
        return None

    def _own(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if "." not in name and ":" not in name:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True
