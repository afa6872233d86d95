"""What the pages say is what the code does: settings, tasks, routes, options, links."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import typer
import yaml

from polar.cli import COMMANDS, command_line
from polar.config import load_task
from polar.contract.rollout import HEARTBEAT_SECONDS
from polar.rollout.auth import Credentials
from polar.rollout.dispatch import LEASE_SECONDS
from polar.rollout.http import Route
from polar.rollout.server import RolloutServer
from polar.settings import ServeConfig, load_settings
from polar.store import SQLiteStore
from polar.store.ledger import EVENTS_KEPT, MAX_ATTEMPTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SERVICE = (ROOT / "docs" / "service.md").read_text()
EXAMPLES_IN_SETTINGS = {("engines",), ("auth", "tokens"), ("callbacks", "allow")}


def blocks(*languages: str) -> list[Any]:
    """Every fenced block in these languages, on every page."""
    blocks = []
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
            if found[1] in languages:
                line = text.count("\n", 0, found.start()) + 1
                blocks.append(pytest.param(found[2], id=f"{page.name}:{line}"))
    return blocks


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_loads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.yaml"
    path.write_text(text)
    data = yaml.safe_load(text)
    if "task_id" in data:
        assert load_task(path).task_id == data["task_id"]
    else:
        assert load_settings(path, {}).role in ("all", "rollout", "gateway")


def test_the_settings_page_has_every_setting_with_its_default() -> None:
    text, *_ = re.findall(r"```yaml\n(.*?)```", SERVICE, re.S)
    said, defaults = yaml.safe_load(text), msgspec.json.decode(msgspec.json.encode(ServeConfig()))

    def compare(said: Any, default: Any, path: tuple[str, ...]) -> None:
        if isinstance(default, dict) and isinstance(said, dict):
            assert set(said) == set(default), f"docs/service.md: polar.yaml {'.'.join(path)}"
            for name in default:
                compare(said[name], default[name], (*path, name))
        elif path not in EXAMPLES_IN_SETTINGS:
            assert said == default, path

    compare(said, defaults, ())
    assert set(said["engines"][0]) == set(defaults["engines"][0])


@pytest.mark.parametrize("text", blocks("python"))
def test_python_parses(text: str) -> None:
    assert ast.parse(text).body


def routes_table(routes: list[Route]) -> str:
    """The control plane's routes as the service page shows them."""
    lines = ["| route | role | |", "|---|---|---|"]
    for route in routes:
        if route.role == "node":
            continue
        query = f"`?{'`, `'.join(query.name for query in route.query)}`" if route.query else ""
        about = f"{route.about} {query}".strip()
        lines.append(f"| {route.method} `{route.path}` | {route.role or 'anybody'} | {about} |")
    return "\n".join(lines)


def test_the_service_page_has_every_route(tmp_path: Path) -> None:
    server = RolloutServer(SQLiteStore(tmp_path / "polar.db"), Credentials([]), callback_secret="secret")
    wanted = routes_table(server.routes)
    assert wanted in SERVICE, f"docs/service.md: the table of routes must be\n{wanted}"


def test_the_service_page_has_the_numbers_of_the_code() -> None:
    text = " ".join(SERVICE.split())
    assert f"under a lease of {LEASE_SECONDS:g} s; its heartbeat, every {HEARTBEAT_SECONDS:g} s," in text
    assert f"After {MAX_ATTEMPTS} attempts lost that way" in text
    assert f"The newest {EVENTS_KEPT:,} are kept" in text


def commands() -> list[Any]:
    """Every call of ``polar`` in a shell block, as its words."""
    found = []
    for block in blocks("sh"):
        joined = block.values[0].replace("\\\n", " ")
        for line in joined.splitlines():
            line = line.partition(" #")[0]
            for command in re.split(r"[;|&]", line):
                words = [word for word in command.split() if not re.match(r"[A-Z_]+=", word)]
                if words and Path(words[0]).name == "polar":
                    found.append(pytest.param(words[1:], id=f"{block.id} {' '.join(words)}"[:90]))
    return found


@pytest.mark.parametrize("words", commands())
def test_commands_and_their_options_exist(words: list[str]) -> None:
    name, *rest = words
    assert name in COMMANDS
    group = typer.main.get_command(command_line([name]))
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    known = {option for parameter in group.commands[name].params for option in parameter.opts}  # type: ignore[attr-defined]
    before = rest[: rest.index("--")] if "--" in rest else rest
    unknown = [word for word in before if word.startswith("-") and word.partition("=")[0] not in {*known, "--help"}]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", page.read_text())
    lost = [link for link in links if link and "://" not in link and not (page.parent / link).exists()]
    assert not lost
