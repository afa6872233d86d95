"""A process that writes completions from several callers at once and prints each id once it was told it is kept.

    python -m tests.store.writer_process DATABASE SESSION COUNT

Prints ``ready``, then the ids; ends only when its standard input ends (or it is killed).
"""

from __future__ import annotations

import asyncio
import sys

from polar.contract.completion import Completion
from polar.store import Store, open_store
from tests.store import making

CALLERS = 6


def tokens(seq: int) -> int:
    """From nothing to 12 kB a reply, so that kills fall into small commits and large ones."""
    return (seq * 37) % 1000


def written(session: str, seq: int) -> Completion:
    return making.completion(session, seq, tokens=tokens(seq), tools=making.large_tools(3))


async def _call(store: Store, session: str, seqs: range) -> None:
    for seq in seqs:
        completion = written(session, seq)
        await store.put_completion(completion)
        print(completion.completion_id, flush=True)


async def main(database: str, session: str, count: int) -> None:
    store = open_store(database)
    await store.open()
    await store.put_session(making.session(session))
    print("ready", flush=True)
    await asyncio.gather(*(_call(store, session, range(i, count, CALLERS)) for i in range(CALLERS)))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
