"""What a hostile agent brings along: it is put before every agent's own code, and runs in its sandbox."""

from __future__ import annotations

import shlex
import textwrap

PRELUDE = r"""
import json, os, socket, sys, urllib.error, urllib.request
BASE, KEY = os.environ["OPENAI_BASE_URL"][:-3], os.environ["OPENAI_API_KEY"]

def tell(name, value):
    print(json.dumps([name, value]), flush=True)

def ask(method, path, body=None, key=KEY, base=BASE, **headers):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": "Bearer " + key} if key else {}), **headers}
    try:
        request = urllib.request.Request(base + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return [reply.status, reply.read().decode()]
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode(errors="replace")]
    except OSError as error:
        return [0, str(error)]

def raw(data, port=8080):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
        link.settimeout(30)
        try:
            link.sendall(data)
            return link.recv(4096).decode("latin-1")
        except OSError as error:
            return str(error)

def chat(text="hello", key=KEY):
    return ask("POST", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": text}]}, key)
"""


def agent(code: str) -> str:
    """The shell command of a hostile agent."""
    return f"python3 -c {shlex.quote(PRELUDE + textwrap.dedent(code))}"
