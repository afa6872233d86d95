"""``polar show``: a trajectory in the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column
from rich.text import Text

from polar.cli import options, screen
from polar.cli.screen import Table
from polar.contract.arrays import to_json
from polar.contract.errors import UsageError
from polar.contract.result import TERMINAL_STATES, SessionResult
from polar.results import cut_off, database, open_folder, rebuild, results_so_far
from polar.store.base import Store
from polar.trajectories.show import show_session


def show(
    target: Annotated[str, typer.Argument(metavar="PATH|SESSION", help="A results folder, or a session's id.")],
    session: Annotated[str | None, typer.Argument(help="A session in that folder.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token ids and logprobs.")] = False,
    allow_import: options.AllowImport = False,
    as_json: options.JSONOutput = False,
) -> None:
    """Show a trajectory: turns, mask, logprobs, reward, and why it split."""
    if allow_import:
        sys.path.insert(0, str(Path.cwd()))
    path = Path(target)
    if path.exists():
        asyncio.run(_show(path, session, tokens, allow_import, as_json))
        return
    for folder in _results_folders():
        if asyncio.run(_has(folder, target)):
            asyncio.run(_show(folder, target, tokens, allow_import, as_json))
            return
    raise UsageError(f"{target} is neither a results folder nor a session in one under results/")


def _results_folders() -> Iterator[Path]:
    """The newest first."""
    found = Path("results").glob("*/polar.db")
    return iter(sorted((path.parent for path in found), key=lambda folder: folder.stat().st_mtime, reverse=True))


async def _has(folder: Path, session: str) -> bool:
    store = await open_folder(folder)
    try:
        return await store.session(session) is not None
    finally:
        await store.close()


async def _show(path: Path, session: str | None, tokens: bool, allow_import: bool, as_json: bool) -> None:
    database(path)
    store = await open_folder(path)
    try:
        results = await results_so_far(store)
        if session is None and len(results) != 1:
            await _list(store, results, as_json)
            if not as_json:
                await _say_if_cut_off(store, path)
            return
        chosen = [result for result in results if session in (None, result.session_id)]
        if not chosen:
            raise UsageError(_why_not([result.session_id for result in results], session or ""))
        result = await rebuild(store, chosen[-1], allow_import=allow_import)
        if as_json:
            print(to_json(result).decode())
        else:
            screen.out.print(show_session(result, tokens))
            await _say_if_cut_off(store, path)
    finally:
        await store.close()


async def _list(store: Store, results: list[SessionResult], as_json: bool) -> None:
    """All sessions of a folder, one a line."""
    if as_json:
        for each in results:
            print(to_json(each).decode())
        return
    by_id = {each.session_id: each for each in results}
    heads = ("session", "state", "reward", "calls", "traces", "error")
    table = Table(*(Column(head, no_wrap=head != "error") for head in heads))
    for record in await store.sessions():
        result = by_id.get(record.session_id)
        metadata = result.trajectory.metadata if result else {}
        reward = (metadata.get("evaluation") or {}).get("outcome_reward")
        table.add_row(
            record.session_id,
            record.state,
            "-" if reward is None else f"{reward:g}",
            str(metadata.get("record_count", "-")),
            str(metadata.get("trace_count", "-")),
            Text(record.error or "", no_wrap=True, overflow="ellipsis"),
        )
    screen.out.print(table)
    screen.out.print("Name a session after the folder to see its trajectory.")


async def _say_if_cut_off(store: Store, path: Path) -> None:
    """The states of sessions are those of a moment: where nothing runs any more, they stay at that."""
    running = [each for each in await store.sessions() if each.state not in TERMINAL_STATES]
    if running and cut_off(path):
        screen.out.print(f"Nothing runs here any more: polar run TASK.yaml --out {path} goes on where it stood.")


def _why_not(names: list[str], session: str) -> str:
    few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"no session {session} here" + (f": there are {few}" if names else "")
