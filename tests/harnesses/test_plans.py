"""What each harness is given and how it is started."""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


AGENTS = tuple(name for name in names() if name != "shell")
WITH_TOOLS = ("codex", "claude_code", "gemini_cli", "qwen_code", "opencode", "openhands_sdk")
WITH_SKILLS = (*WITH_TOOLS, "pi")


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
@pytest.mark.parametrize("name", AGENTS)
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


# ---- the others --------------------------------------------------------------------------------------------


def test_codex_has_one_provider_that_is_its_whole_world() -> None:
    config = tomllib.loads(plan("codex").files["~/.codex/config.toml"])
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8080/v1", "responses")
    assert plan("codex").command.env[provider["env_key"]] == "sk-session"
    assert (config["model"], config["model_context_window"]) == ("Qwen/Qwen3-0.6B", 32768)
    assert config["model_auto_compact_token_limit"] < 32768
    assert (config["approval_policy"], config["sandbox_mode"]) == ("never", "danger-full-access")
    off = config["check_for_update_on_startup"], config["analytics"]["enabled"], config["features"]["plugins"]
    assert off == (False, False, False)


def test_claude_code_keeps_one_tool_list_and_one_system_prompt() -> None:
    env = plan("claude_code").command.env
    assert env["ANTHROPIC_MODEL"] == env["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "Qwen/Qwen3-0.6B"
    assert (env["ENABLE_TOOL_SEARCH"], env["CLAUDE_CODE_ATTRIBUTION_HEADER"]) == ("false", "0")
    assert env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == env["DISABLE_AUTOUPDATER"] == "1"


@pytest.mark.parametrize(("context", "told"), [(32768, None), (131072, "131072")])
def test_claude_code_is_told_of_a_context_in_which_it_can_compact(context: int, told: str | None) -> None:
    endpoint = Endpoint("http://127.0.0.1:8080", "k", "m", context)
    env = by_name("claude_code").plan(AgentSpec(harness="claude_code"), "x", endpoint, INSTALLED).command.env
    assert env.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS") == told
    assert int(env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) <= context // 2


def test_gemini_compacts_by_the_real_context_and_asks_no_other_model() -> None:
    made = plan("gemini_cli")
    settings = json.loads(made.files["~/.gemini/settings.json"])
    assert settings["security"]["auth"]["selectedType"] == "gemini-api-key"
    assert settings["model"]["compressionThreshold"] * 1048576 == 32768 / 2
    assert settings["model"]["disableLoopDetection"] is True
    assert settings["privacy"]["usageStatisticsEnabled"] is settings["general"]["enableAutoUpdate"] is False
    words = shlex.split(text(made.command))
    assert words[words.index("-m") + 1] == "Qwen/Qwen3-0.6B"
    assert words[words.index("--approval-mode") + 1] == "yolo"


@pytest.mark.parametrize(("context", "told"), [(8192, 8192), (32768, 32768), (40960, 33000), (131072, 131072)])
def test_qwen_code_is_told_a_context_of_which_it_can_use_most(context: int, told: int) -> None:
    endpoint = Endpoint("http://127.0.0.1:8080", "k", "m", context)
    made = by_name("qwen_code").plan(AgentSpec(harness="qwen_code"), "x", endpoint, INSTALLED)
    config = json.loads(made.files["~/.qwen/settings.json"])["model"]["generationConfig"]
    assert config["contextWindowSize"] == told
    assert config["samplingParams"]["max_tokens"] <= context // 2


def test_qwen_code_takes_no_notes_and_phones_nobody() -> None:
    made = plan("qwen_code")
    settings = json.loads(made.files["~/.qwen/settings.json"])
    assert settings["memory"] == {"enableManagedAutoMemory": False, "enableManagedAutoDream": False}
    assert settings["privacy"]["usageStatisticsEnabled"] is settings["telemetry"]["enabled"] is False
    assert made.command.env["OPENAI_MODEL"] == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("api", "url"),
    [
        ("openai-compatible", "http://127.0.0.1:8080/v1"),
        ("openai", "http://127.0.0.1:8080/v1"),
        ("anthropic", "http://127.0.0.1:8080/v1"),
        ("google", "http://127.0.0.1:8080/v1beta"),
    ],
)
def test_opencode_speaks_the_dialect_it_is_told(api: str, url: str) -> None:
    made = plan("opencode", settings={"api": api})
    config = json.loads(made.files["~/.config/opencode/opencode.json"])
    (provider,) = config["provider"].values()
    assert (provider["npm"], provider["options"]["baseURL"]) == (f"@ai-sdk/{api}", url)
    assert provider["options"]["apiKey"] == "sk-session"
    limit = provider["models"]["Qwen/Qwen3-0.6B"]["limit"]
    assert (limit["context"], limit["output"] <= 32768 // 2) == (32768, True)
    assert (config["autoupdate"], config["share"], config["permission"]) == (False, "disabled", "allow")
    assert "polar/Qwen/Qwen3-0.6B" in text(made.command)


@pytest.mark.parametrize("name", ["pi", "opencode"])
def test_a_dialect_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"agent\.settings\.api 'soap' is not known"):
        plan(name, settings={"api": "soap"})


def test_openhands_gets_the_model_by_its_configuration() -> None:
    made = plan("openhands_sdk")
    llm = json.loads(made.files["~/.polar/openhands.json"])["llm"]
    assert (llm["model"], llm["base_url"]) == ("openai/Qwen/Qwen3-0.6B", "http://127.0.0.1:8080/v1")
    assert llm["max_input_tokens"] + llm["max_output_tokens"] <= 32768
    compile(made.files["~/.polar/run_openhands.py"], "run_openhands.py", "exec")


# ---- tools and skills --------------------------------------------------------------------------------------

SERVERS = (
    {"name": "bears", "command": "python3", "args": ["s.py", "-x"], "env": {"A": 'b "c" \\ é'}},
    {"name": "far", "url": "http://127.0.0.1:9/mcp"},
)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_mcp_servers_are_in_the_programs_own_configuration(name: str) -> None:
    files = plan(name, mcp_servers=SERVERS).files
    found = [read(path, content) for path, content in files.items() if path.endswith((".json", ".toml"))]
    (servers,) = [config[key] for config in found for key in ("mcp", "mcpServers", "mcp_servers") if config.get(key)]
    bears, far = servers["bears"], servers["far"]
    command = bears["command"] if isinstance(bears["command"], list) else [bears["command"], *bears["args"]]
    assert command == ["python3", "s.py", "-x"]
    assert bears.get("env", bears.get("environment")) == {"A": 'b "c" \\ é'}
    assert far.get("url", far.get("httpUrl")) == "http://127.0.0.1:9/mcp"


def read(path: str, content: str) -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads(content) if path.endswith(".toml") else json.loads(content)
    return loaded


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"command": "x"}, "name"),
        ({"name": "a b", "command": "x"}, "letters, digits"),
        ({"name": "a"}, "either command or url"),
        ({"name": "a", "command": "x", "url": "http://x"}, "either command or url"),
        ({"name": "a", "cmd": "x"}, "cmd"),
        ({"name": "a", "command": "x", "args": "y"}, "args"),
    ],
)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_server_that_is_none_is_refused(name: str, server: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=rf"agent\.mcp_servers\[0\].*{words}"):
        plan(name, mcp_servers=(server,))


@pytest.mark.parametrize("name", WITH_SKILLS)
def test_skills_are_copied_to_where_the_program_looks_and_a_missing_folder_is_an_error(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "home/.polar").mkdir(parents=True)
    (tmp_path / "home/.polar/instruction.md").write_text("x")
    (tmp_path / "my skills/greet").mkdir(parents=True)
    (tmp_path / "my skills/greet/SKILL.md").write_text("hello")
    stand_in = Installed("1", Path("/bin/true"))
    for path, code in (("my skills", 0), ("nothing", 1)):
        spec = AgentSpec(harness=name, skills_path=path)
        command = text(by_name(name).plan(spec, "x", ENDPOINT, stand_in).command).partition(" < ")[0]
        line = command.rpartition(" && ")[0]
        done = subprocess.run(
            ["/bin/sh", "-c", line], cwd=tmp_path, env={"HOME": str(tmp_path / "home")}, check=False
        )
        assert done.returncode == code
    assert [file.read_text() for file in (tmp_path / "home").rglob("greet/SKILL.md")] == ["hello"]


# ---- all ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_a_setting_that_a_harness_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"settings\.tempo"):
        plan(name, settings={"tempo": 1})


@pytest.mark.parametrize("name", sorted({*names()} - {*WITH_TOOLS}))
def test_a_harness_without_mcp_servers_refuses_them(name: str) -> None:
    with pytest.raises(UsageError, match="mcp_servers"):
        plan(name, mcp_servers=({"name": "x", "command": "y"},))


@pytest.mark.parametrize("name", sorted({*names()} - {*WITH_SKILLS}))
def test_a_harness_without_skills_refuses_them(name: str) -> None:
    with pytest.raises(UsageError, match="skills_path"):
        plan(name, skills_path="skills")


@pytest.mark.parametrize("name", AGENTS)
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
        (AgentSpec(harness="pie"), "'pie' is not known: there are shell, codex, claude_code"),
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
