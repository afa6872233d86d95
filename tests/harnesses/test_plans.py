"""What each harness is given and how it is started."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polar.contract.errors import UsageError
from polar.contract.runtime import Command, ExecResult
from polar.contract.task import AgentSpec, CustomShell
from polar.harnesses import Endpoint, Installed, Plan, by_name, make_harness, names, standard_env
from polar.harnesses.found import interpreter_mounts

ENDPOINT = Endpoint("http://127.0.0.1:8080", "sk-session", "Qwen/Qwen3-0.6B", 32768)
INSTALLED = Installed("1", Path("/opt/harness/bin/it"))


def plan(name: str, instruction: str = "do it", **agent: object) -> Plan:
    spec = AgentSpec(harness=name, **agent)
    return by_name(name).plan(spec, instruction, ENDPOINT, INSTALLED)


def text(command: Command) -> str:
    return command.argv if isinstance(command.argv, str) else shlex.join(command.argv)


# ---- shell -------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60))
@example('it\'s "quoted" $HOME `id` \n; rm -rf / #')
def test_the_instruction_reaches_a_shell_command_as_it_is(instruction: str) -> None:
    made = plan("shell", instruction, custom_shell=CustomShell(command="printf %s {{INSTRUCTION}}"))
    said = subprocess.run(["/bin/sh", "-c", text(made.command)], capture_output=True, check=True).stdout
    assert said == instruction.encode()


@pytest.mark.parametrize("spec", [None, CustomShell(command=""), CustomShell(command="  \n")])
def test_a_shell_without_a_command_is_refused(spec: CustomShell | None) -> None:
    with pytest.raises(UsageError, match=r"custom_shell\.command is empty"):
        plan("shell", custom_shell=spec)


# ---- pi ----------------------------------------------------------------------------------------------------


def test_pi_has_one_provider_with_the_sessions_url_key_and_model() -> None:
    made = plan("pi")
    (provider,) = json.loads(made.files["~/.pi/agent/models.json"])["providers"].values()
    assert provider["baseUrl"] == "http://127.0.0.1:8080/v1"
    assert provider["apiKey"] == "sk-session"
    assert provider["api"] == "openai-completions"
    (model,) = provider["models"]
    assert (model["id"], model["contextWindow"]) == ("Qwen/Qwen3-0.6B", 32768)
    assert model["maxTokens"] < model["contextWindow"]


def test_pi_runs_headless_with_json_events_and_nothing_phoned_home() -> None:
    made = plan("pi", "the instruction")
    words = shlex.split(text(made.command))
    assert words[1:3] == [str(INSTALLED.executable), "-p"]
    assert words[words.index("--mode") + 1] == "json"
    assert words[words.index("--model") + 1] == "Qwen/Qwen3-0.6B"
    assert made.command.env == {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
    assert "the instruction" in made.files.values()


@pytest.mark.parametrize("instruction", ["--help", "@/etc/passwd", "-x", "x" * 500_000])
@pytest.mark.parametrize("name", ["pi", "mini_swe_agent"])
def test_no_instruction_is_taken_for_an_option_or_is_too_long(name: str, instruction: str) -> None:
    made = plan(name, instruction)
    assert instruction not in text(made.command).split()
    assert len(text(made.command)) < 4000
    assert any(instruction in content for content in made.files.values())


@pytest.mark.parametrize(
    ("api", "url"),
    [
        ("openai-responses", "http://127.0.0.1:8080/v1"),
        ("anthropic-messages", "http://127.0.0.1:8080"),
        ("google-generative-ai", "http://127.0.0.1:8080/v1beta"),
    ],
)
def test_pi_speaks_the_dialect_it_is_told(api: str, url: str) -> None:
    (provider,) = json.loads(plan("pi", settings={"api": api}).files["~/.pi/agent/models.json"])["providers"].values()
    assert (provider["api"], provider["baseUrl"]) == (api, url)


# ---- mini-swe-agent ----------------------------------------------------------------------------------------


def test_mini_asks_nothing_spends_nothing_and_fetches_nothing() -> None:
    made = plan("mini_swe_agent")
    command = text(made.command)
    for flag in (" -y ", " -l 0 ", " --exit-immediately ", " -c mini.yaml "):
        assert flag in command
    assert made.command.env["OPENAI_API_BASE"] == "http://127.0.0.1:8080/v1"
    assert made.command.env["OPENAI_API_KEY"] == "sk-session"
    assert made.command.env["MSWEA_CONFIGURED"] == "true"
    assert made.command.env["MSWEA_COST_TRACKING"] == "ignore_errors"
    assert made.command.env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    (config,) = made.files.values()
    assert json.loads(config)["model"]["model_name"] == "openai/Qwen/Qwen3-0.6B"
    assert json.loads(config)["run"]["task"] == "do it"


# ---- all ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    ("field", "agent"),
    [
        ("settings.tempo", {"settings": {"tempo": 1}}),
        ("mcp_servers", {"mcp_servers": ({"name": "x"},)}),
        ("skills_path", {"skills_path": "skills"}),
    ],
)
def test_what_a_harness_would_ignore_is_refused(name: str, field: str, agent: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=field):
        plan(name, **agent)


@pytest.mark.parametrize("name", ["pi", "mini_swe_agent"])
def test_a_shell_command_for_another_harness_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="custom_shell"):
        plan(name, custom_shell=CustomShell(command="true"))


def test_harnesses_are_found_by_name() -> None:
    assert make_harness(AgentSpec(harness="pi")).name == "pi"
    assert make_harness(AgentSpec(harness="mini-swe-agent")).name == "mini_swe_agent"
    assert make_harness(AgentSpec(custom_shell=CustomShell(command="true"))).name == "shell"


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (AgentSpec(harness="pie"), "'pie' is not known: there are shell, pi, mini_swe_agent"),
        (AgentSpec(), "names no harness"),
        (AgentSpec(harness="pi", import_path="a:B"), "both"),
    ],
)
def test_a_harness_that_is_not_one_is_refused(agent: AgentSpec, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_harness(agent)


class Own:
    name = "own"
    pinned = None
    install_hint = ""

    def find(self) -> Installed | None:
        return INSTALLED

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        return Plan(Command(["own", instruction]))

    def judge(self, result: ExecResult) -> str | None:
        return None


def test_an_import_path_needs_the_operators_word() -> None:
    agent = AgentSpec(import_path=f"{__name__}:Own")
    with pytest.raises(UsageError, match="not allowed"):
        make_harness(agent)
    assert make_harness(agent, allow_import=True).name == "own"


@pytest.mark.parametrize("path", ["nothing", ":X", "no.such.module:X", "json:JSONDecoder", "json:Nothing"])
def test_an_import_path_to_no_harness_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="import_path"):
        make_harness(AgentSpec(import_path=path), allow_import=True)


def test_every_client_finds_the_model_in_the_standard_environment() -> None:
    env = standard_env(
        Endpoint("http://gateway.internal:9000", "sk-1", "m", 1), session_id="s-1", task_id="t-1", folder="/f"
    )
    assert env["OPENAI_BASE_URL"] == "http://gateway.internal:9000/v1"
    assert env["ANTHROPIC_BASE_URL"] == env["GOOGLE_GEMINI_BASE_URL"] == "http://gateway.internal:9000"
    keys: Sequence[str] = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY")
    assert {env[key] for key in keys} == {"sk-1"}
    assert (env["POLAR_SESSION_ID"], env["SESSION_ID"], env["TASK_ID"]) == ("s-1", "s-1", "t-1")
    assert {"gateway.internal", "127.0.0.1", "localhost"} <= set(env["NO_PROXY"].split(","))
    assert env["NO_PROXY"] == env["no_proxy"]
    assert all(env[name].startswith("/f") for name in ("SESSION_DIR", "ARTIFACTS_DIR", "AGENT_LOG_DIR"))


def test_an_interpreter_outside_the_system_is_shown_but_never_somebodys_home(tmp_path, monkeypatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    assert interpreter_mounts(Path("/usr/bin/node")) == ()
    (mount,) = interpreter_mounts(home / ".nvm/v20/bin/node")
    assert mount.source == home / ".nvm/v20"
    (mount,) = interpreter_mounts(home / "bin/node")
    assert mount.source == home / "bin/node"
