"""A process that submits, claims and delivers from several callers at once, and prints what it was told is kept.

    python -m tests.store.ledger_process URL NAME COUNT

Prints ``ready``, then lines such as ``submitted:TASK``, ``claimed:SESSION:ATTEMPT``, ``delivered:SESSION:ATTEMPT``;
ends only when its standard input ends (or it is killed).
"""

from __future__ import annotations

import asyncio
import sys

from polar.contract.task import TaskRequest
from polar.store import Ledger, open_store
from tests.store import making

CALLERS = 4
SAMPLES = 3
SECONDS = 10.0


def submitted(name: str, number: int) -> TaskRequest:
    return making.task(f"{name}-{number}", num_samples=SAMPLES, callback_url="http://t")


async def _call(ledger: Ledger, name: str, numbers: range) -> None:
    for number in numbers:
        task = submitted(name, number)
        await ledger.submit(task, 0.0)
        print(f"submitted:{task.task_id}", flush=True)
        for lease in await ledger.claim(name, SAMPLES, SECONDS, 0.0):
            print(f"claimed:{lease.session_id}:{lease.attempt}", flush=True)
            await ledger.deliver(name, making.delivery(lease, calls=2, trained=1), 1.0)
            print(f"delivered:{lease.session_id}:{lease.attempt}", flush=True)


async def main(url: str, name: str, count: int) -> None:
    ledger = open_store(url)
    await ledger.open()
    print("ready", flush=True)
    await asyncio.gather(*(_call(ledger, name, range(i, count, CALLERS)) for i in range(CALLERS)))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await ledger.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
