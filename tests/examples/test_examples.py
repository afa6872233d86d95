"""What the README and ``examples/`` tell a trainer to do works against a real service."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.making import REPO
from tests.examples.conftest import Service
from tests.support.ports import free_port

pytestmark = pytest.mark.slow
PATIENCE = 60.0


def until(done: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for it, as long as the program runs."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def names(path: Path) -> list[tuple[str, int]]:
    if not path.exists():
        return []
    return [(each["session_id"], each["attempt"]) for each in map(json.loads, path.read_text().splitlines())]


def test_the_trainer_that_pulls_has_each_result_once_though_it_is_killed(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    program = REPO / "examples" / "trainer_pull.py"
    service.submit("pull-a", num_samples=2)
    first = service.run(program, service.url, "puller", file)
    try:
        until(lambda: len(names(file)) >= 1, first)
    finally:
        first.kill()
        first.communicate()
    service.submit("pull-b", num_samples=2)
    # To a consumer that has acknowledged nothing all of it comes again, as if the kill had come before each of those.
    again = service.run(program, service.url, "puller-again", file)
    try:
        wanted = {(f"pull-{task}-{sample}", 1) for task in "ab" for sample in (0, 1)}
        until(lambda: wanted <= set(names(file)), again)
        until(lambda: json.loads(service.ask("/results?consumer=puller-again"))["results"] == [], again)
    finally:
        again.kill()
        again.communicate()
    assert len(names(file)) == len(set(names(file)))
    for each in map(json.loads, file.read_text().splitlines()):
        assert [sum(trace["loss_mask"]) > 0 for trace in each["trajectory"]["traces"]] == [True]


def test_the_trainer_that_is_called_takes_what_is_signed_and_nothing_else(service: Service, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/done"
    receiver = service.run(REPO / "examples" / "trainer_callback.py", str(port), tmp_path / "deliveries")
    try:
        service.submit("called", num_samples=2, callback_url=url)
        until(lambda: bool(list((tmp_path / "deliveries").glob("*.json"))), receiver)
        (file,) = (tmp_path / "deliveries").glob("*.json")
        told = json.loads(file.read_text())
        assert (told["task_id"], told["status"], told["delivery_id"]) == ("called", "completed", file.stem)
        assert [each["session_id"] for each in told["results"]] == ["called-0", "called-1"]
        forged = {"webhook-id": "forged", "webhook-timestamp": str(int(time.time())), "webhook-signature": "v1,AAAA"}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(url, file.read_bytes(), forged), timeout=10)
        assert list((tmp_path / "deliveries").iterdir()) == [file]
    finally:
        receiver.kill()
        receiver.communicate()


def test_the_trainer_in_the_readme_runs(service: Service) -> None:
    (program,) = re.findall(r"```python\n(.*?RolloutClient.*?)```", (REPO / "README.md").read_text(), re.S)
    agent = {"harness": "shell", "custom_shell": {"command": "true"}, "settings": {"allow_no_model_call": True}}
    process = service.run("-c", re.sub(r'"agent": \{.*?\}', f'"agent": {agent}', program))
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "step-1-0" in out


def test_a_service_in_short_is_read_at_a_glance(service: Service) -> None:
    service.submit("short")
    service.ask("/rollout/task/short?wait=30&results=none")
    out, err = service.run("-c", "from polar.cli import main; main()", "status").communicate(timeout=PATIENCE)
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert err == ""
    assert lines["nodes"].strip() == "1, of which 1 healthy, 0 draining"
    assert "completed" in lines["tasks"]
    assert "completed" in lines["sessions"]


def test_the_service_page_has_every_metric(service: Service) -> None:
    service.submit("measured")
    service.ask("/rollout/task/measured?wait=30&results=none")
    families = set(re.findall(r"^# TYPE (polar_\w+) ", service.ask("/metrics").decode(), re.M))
    families = {name for name in families if not name.endswith("_created")}
    page = set(re.findall(r"`(polar_\w+)(?:\{[a-z,]+\})?`", (REPO / "docs" / "service.md").read_text()))
    assert families == page
