"""Any input at all gets a reply in the shape that the OpenAPI page promises, and never a server error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from polar.contract.rollout import Delivery, NodeSpec
from polar.contract.task import AgentSpec, TaskRequest
from polar.gateway.inference import InferenceControl
from polar.gateway.server import GatewayServer
from polar.rollout.auth import Credentials
from polar.rollout.hosting import LocalInference
from polar.rollout.openapi import openapi
from polar.rollout.server import RolloutServer
from polar.store import SQLiteStore
from tests.rollout.making import TOKENS, Host, completion, result

CHECKS = [checks.not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


async def _serve(folder: Path, started: threading.Event, found: dict[str, Any]) -> None:
    """A server with a task that has run, until ``found["stop"]`` is set."""
    ledger = SQLiteStore(folder / "polar.db")
    await ledger.open()
    tokens: list[Any] = [(role, role, token) for role, token in TOKENS.items()]
    server = RolloutServer(
        ledger,
        Credentials(tokens),
        callback_secret="a secret of callbacks",
        capture=Host("bare"),
        inference=LocalInference(InferenceControl()),
    )
    await server.start()
    http = GatewayServer(server.app)
    await http.start()
    await ledger.submit(TaskRequest(task_id="t1", instruction="do it", agent=AgentSpec(harness="shell")), 1.0)
    spec = NodeSpec(
        node_id="n1", gateway_url="http://127.0.0.1:1", max_init_workers=1, max_run_workers=1, max_postrun_workers=1
    )
    await ledger.put_node(spec, 1.0)
    await ledger.claim("n1", 1, 1e12, 1.0)
    await ledger.deliver(
        "n1", Delivery(session_id="t1-0", attempt=1, completions=[completion()], result=result()), 2.0
    )
    found |= {"url": http.url, "page": openapi(server.routes), "stop": asyncio.Event()}
    found["loop"] = asyncio.get_running_loop()
    started.set()
    await found["stop"].wait()
    await http.close()
    await server.close()
    await ledger.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    started, found = threading.Event(), dict[str, Any]()
    folder = tmp_path_factory.mktemp("serving")
    thread = threading.Thread(target=lambda: asyncio.run(_serve(folder, started, found)), daemon=True)
    thread.start()
    assert started.wait(60)
    yield found
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join(60)


Use = Callable[[schemathesis.Case], None]


def each_operation(serving: dict[str, Any], examples: int, use: Use) -> int:
    """Generate cases for every operation but the endless one, in a fixed order; how many operations there were."""
    page = schemathesis.openapi.from_dict(serving["page"])
    page.config.update(base_url=serving["url"])
    count = 0
    for found in page.exclude(path="/events").get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
            phases=(Phase.generate,),
        )
        @given(case=operation.as_strategy())
        def run(case: schemathesis.Case) -> None:
            for name in ("wait", "timeout_seconds"):
                if name in (case.query or {}):
                    case.query[name] = 0
            if isinstance(case.body, dict) and "wait" in case.body:
                case.body["wait"] = 0
            use(case)

        run()
        count += 1
    return count


def check(case: schemathesis.Case) -> None:
    of_nodes = "`node`" in (case.operation.definition.raw.get("description") or "")
    headers = {"Authorization": f"Bearer {TOKENS['node' if of_nodes else 'admin']}"}
    case.call_and_validate(headers=headers, checks=CHECKS, timeout=30)


@pytest.mark.slow
def test_any_input_gets_a_reply_in_shape(serving: dict[str, Any]) -> None:
    assert each_operation(serving, 25, check) > 25


@pytest.mark.slow
def test_so_it_does_for_a_task_a_session_and_a_node_that_are_there(serving: dict[str, Any]) -> None:
    known = {"task_id": "t1", "session_id": "t1-0", "node_id": "n1"}

    def use(case: schemathesis.Case) -> None:
        if case.method == "GET" and case.path_parameters:
            case.path_parameters = {name: known[name] for name in case.path_parameters}
            check(case)

    assert each_operation(serving, 8, use) > 25
