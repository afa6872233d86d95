"""What the command line says over a ``polar.yaml``, and which settings are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polar.contract.errors import UsageError
from polar.settings import load_settings


def written(folder: Path, **settings: Any) -> Path:
    path = folder / "polar.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_no_sandbox_keeps_what_tasks_may_ask_for(tmp_path: Path):
    path = written(tmp_path, runtimes={"allow": ["local", "internet"]})
    config = load_settings(path, {"runtimes": {"sandbox": "none"}})
    assert (config.runtimes.allow, config.runtimes.sandbox) == (("local", "internet"), "none")


def test_a_misspelt_permission_is_refused_with_those_there_are(tmp_path: Path):
    path = written(tmp_path, runtimes={"allow": ["local", "internets"]})
    with pytest.raises(UsageError, match=r"runtimes\.allow: 'internets' .* local, internet, host_network"):
        load_settings(path, {})


def test_a_misspelt_setting_is_refused_with_what_was_meant(tmp_path: Path):
    path = written(tmp_path, engines=[{"kind": "vllm", "ulr": "http://127.0.0.1:1"}])
    with pytest.raises(UsageError, match=r"`ulr` - at `\$\.engines\[0\]`: did you mean url\?"):
        load_settings(path, {})


def test_options_lie_over_the_one_engine_that_is_configured(tmp_path: Path):
    path = written(tmp_path, engines=[{"kind": "vllm", "url": "http://127.0.0.1:1", "max_inflight": 7}])
    (engine,) = load_settings(path, {"engines": [{"model": "m"}]}).engines
    assert (engine.kind, engine.url, engine.model, engine.max_inflight) == ("vllm", "http://127.0.0.1:1", "m", 7)


def test_options_that_can_not_say_which_engine_they_are_of_are_refused(tmp_path: Path):
    engines = [{"kind": "vllm", "url": f"http://127.0.0.1:{port}"} for port in (1, 2)]
    with pytest.raises(UsageError, match=r"polar\.yaml: 2 engines are configured"):
        load_settings(written(tmp_path, engines=engines), {"engines": [{"model": "m"}]})


@pytest.mark.parametrize("engines", ["vllm", ["vllm"]])
def test_options_over_engines_that_are_none_are_a_line(tmp_path: Path, engines: Any):
    with pytest.raises(UsageError, match="engines"):
        load_settings(written(tmp_path, engines=engines), {"runtimes": {"sandbox": "none"}, "engines": [{}]})


def test_a_server_that_is_no_address_is_refused_at_once():
    with pytest.raises(UsageError, match=r"server must be http://HOST:PORT or .*, and not 10\.0\.0\.1:8080"):
        load_settings(None, {"role": "gateway", "server": "10.0.0.1:8080"})


@pytest.mark.parametrize(
    "where",
    [
        {"role": "gateway", "server": "http://127.0.0.1:1"},
        {"role": "all", "store": "postgresql://127.0.0.1/polar"},
    ],
)
def test_one_of_many_nodes_has_a_name_of_its_own(where: dict[str, Any]):
    with pytest.raises(UsageError, match="node_id"):
        load_settings(None, {"port": 0, **where})
    assert load_settings(None, {"port": 0, "node_id": "n1", **where}).name == "n1"
    assert load_settings(None, {"port": 0}).name.endswith("-0")
