"""The models of the conformance table: a real template each, a real tokenizer, and how the model writes.

Where a family's own tokenizer is not to be had from a package registry, another stands in, with the control
tokens that the template writes added to it: a bridge is proven on text and control tokens, so what it says of a
template does not depend on the vocabulary between them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from polar.rendering.base import Prompt
from polar.rendering.generic import TemplateRenderer
from polar.rendering.template import ChatTemplate, special_variables
from polar.rendering.tokenizer import Tokenizer, load_stop_ids, read_json
from tests.rendering.talk import counted_ids
from tests.rendering.written import CALLS, Arguments

QWEN = ("<think>\n", "\n</think>\n\n")
TIGHT = ("<think>", "</think>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_KIMI = (
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_GEMMA = (
    *("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", '<|"|>', "<|think|>"),
)
_MISTRAL = (
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]"),
    *("[THINK]", "[/THINK]", "<s>", "</s>"),
)
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
_HERMES_DEFAULT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Model:
    """``call`` is a form of ``written.CALLS`` (``None``: its template writes no calls); ``think``: what the model
    writes around its thinking (``None``: it does not think); ``args``: template arguments; ``end``: the token that
    ends an ordinary reply, ``call_end`` one that calls, if another; ``unthought``: what it writes where it does not
    think; ``behind_calls``: between its calls and the end; ``added``: control tokens that the tokenizer in its place
    lacks; ``default``: the template without tools, where ``template`` is only for those with."""

    family: str
    template: str | None
    tokenizer: str
    call: str | None
    end: str
    think: tuple[str, str] | None = None
    args: dict[str, Any] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    call_end: str | None = None
    unthought: str = ""
    behind_calls: str = ""
    stands_in: bool = False
    default: str | None = None

    @property
    def name(self) -> str:
        """The template's name with its arguments."""
        args = ", ".join(f"{key}={str(value).lower()}" for key, value in self.args.items())
        return f"{self.template or 'of the tokenizer package'}{f' ({args})' if args else ''}"

    def reply(self, prompt: Prompt, thought: str | None = None, text: str = "", *calls: tuple[str, Arguments]) -> str:
        """The text that the model samples, with the token that ends it."""
        written = "".join(CALLS[self.call](*call) for call in calls) if self.call else ""
        end = (self.call_end if calls else None) or self.end
        if self.call == "harmony":
            parts = [f"<|channel|>analysis<|message|>{thought}"] if thought else []
            parts += [f"<|channel|>{'commentary' if calls else 'final'}<|message|>{text}"] if text else []
            parts += [written.removeprefix("<|start|>assistant")] if calls else []
            return "<|end|><|start|>assistant".join(parts) + end
        opening, closing = self.think or ("", "")
        if prompt.state.opened:
            thinking = f"{thought}{closing}" if thought else closing.lstrip("\n")
        else:
            thinking = f"{opening}{thought}{closing}" if thought else self.unthought
        return f"{thinking}{text}{written}{self.behind_calls if calls else ''}{end}"


IM_END, EOT, DS_END = "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}

MODELS = [
    Model("Qwen2.5", "Qwen-Qwen2.5-7B-Instruct", "qwen3", "hermes", IM_END, stands_in=True),
    Model("Qwen3", "Qwen-Qwen3-0.6B", "qwen3", "hermes", IM_END, QWEN),
    Model("Qwen3", "Qwen-Qwen3-0.6B", "qwen3", "hermes", IM_END, args=OFF),
    Model("Qwen3-Coder", "Qwen3-Coder", "qwen3", "qwen_xml", IM_END),
    Model("QwQ", "Qwen-QwQ-32B", "qwen3", "hermes", IM_END, QWEN, stands_in=True),
    Model("Qwen3.5", "Qwen3.5-4B", "qwen3", "qwen_xml", IM_END, QWEN, stands_in=True),
    Model("Qwen3.5", "Qwen3.5-4B", "qwen3", "qwen_xml", IM_END, args=OFF, stands_in=True),
    Model("Llama 3.1", "meta-llama-Llama-3.1-8B-Instruct", "llama3_1", "llama3_json", EOT),
    Model("Llama 3.2", "meta-llama-Llama-3.2-3B-Instruct", "llama3_1", "llama3_json", EOT),
    Model("Llama 3.3", "meta-llama-Llama-3.3-70B-Instruct", "llama3_1", "llama3_json", EOT),
    Model(
        *("gpt-oss", "openai-gpt-oss-120b", "gptoss", "harmony", "<|return|>"),
        think=("<|channel|>analysis<|message|>", "<|end|>"),
        call_end="<|call|>",
    ),
    Model(
        *("GLM-4.5, 4.6", "GLM-4.6", "qwen3", "glm", "<|user|>", ("\n<think>", "</think>\n")),
        unthought="\n<think></think>\n",
        added=_GLM,
        call_end="<|observation|>",
        stands_in=True,
    ),
    Model(
        *("GLM-4.5, 4.6", "GLM-4.6", "qwen3", "glm", "<|user|>"),
        args=OFF,
        unthought="\n",
        added=_GLM,
        call_end="<|observation|>",
        stands_in=True,
    ),
    Model(
        *("GLM-4.7", "GLM-4.7-Flash", "qwen3", "glm_tight", "<|user|>", TIGHT),
        added=_GLM,
        call_end="<|observation|>",
        stands_in=True,
    ),
    Model(
        *("GLM-4.7", "GLM-4.7-Flash", "qwen3", "glm_tight", "<|user|>", TIGHT),
        args={"clear_thinking": False},
        added=_GLM,
        call_end="<|observation|>",
        stands_in=True,
    ),
    Model("DeepSeek V3", None, "deepseek_v3", "deepseek_fenced", DS_END),
    Model(
        *("DeepSeek R1 (distilled)", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_v3", "deepseek_fenced"),
        *(DS_END, QWEN),
        args=ON,
        stands_in=True,
    ),
    Model("DeepSeek V3.1", "deepseek-ai-DeepSeek-V3.1", "deepseek_v3", "deepseek", DS_END),
    Model("DeepSeek V3.1", "deepseek-ai-DeepSeek-V3.1", "deepseek_v3", "deepseek", DS_END, TIGHT, args=ON),
    Model(
        *("DeepSeek V3.2", "deepseek-ai-DeepSeek-V3.2", "deepseek_v3", "deepseek_v32", DS_END, TIGHT),
        args=ON,
        stands_in=True,
    ),
    Model("DeepSeek V3.2", "deepseek-ai-DeepSeek-V3.2", "deepseek_v3", "deepseek_v32", DS_END, stands_in=True),
    Model(
        *("DeepSeek V4", "deepseek-ai-DeepSeek-V4", "deepseek_v3", "deepseek_v4", DS_END, TIGHT),
        args=ON,
        stands_in=True,
    ),
    Model("DeepSeek V4", "deepseek-ai-DeepSeek-V4", "deepseek_v3", "deepseek_v4", DS_END, stands_in=True),
    Model("Kimi K2", "moonshotai-Kimi-K2", "qwen3", "kimi", IM_END, added=_KIMI, stands_in=True),
    Model("Kimi K2", "Kimi-K2-Instruct", "qwen3", "kimi", IM_END, added=_KIMI, stands_in=True),
    Model("Kimi K2 Thinking", "Kimi-K2-Thinking", "qwen3", "kimi", IM_END, TIGHT, added=_KIMI, stands_in=True),
    Model(
        *("MiniMax M2", "MiniMax-M2", "qwen3", "minimax", "[e~[", QWEN),
        added=("]~!b[", "]~b]", "[e~["),
        stands_in=True,
    ),
    Model("Gemma 3", None, "gemma3", None, "<end_of_turn>"),
    Model(
        *("Gemma 4", "google-gemma-4-31B-it", "gemma3", "gemma", "<turn|>", ("<|channel>thought\n", "\n<channel|>")),
        args=ON,
        added=_GEMMA,
        call_end="<|tool_response>",
        stands_in=True,
    ),
    Model(
        *("Gemma 4", "google-gemma-4-31B-it", "gemma3", "gemma", "<turn|>"),
        added=_GEMMA,
        call_end="<|tool_response>",
        stands_in=True,
    ),
    Model(
        *("Mistral Nemo", "mistralai-Mistral-Nemo-Instruct-2407", "qwen3", "mistral_list", "</s>"),
        added=_MISTRAL,
        stands_in=True,
    ),
    Model(
        *("Mistral Small 3.2", "Mistral-Small-3.2-24B-Instruct-2506", "qwen3", "mistral_id", "</s>"),
        added=_MISTRAL,
        stands_in=True,
    ),
    Model(
        *("Devstral", "unsloth-mistral-Devstral-Small-2507", "qwen3", "mistral", "</s>"),
        added=_MISTRAL,
        stands_in=True,
    ),
    Model(
        *("Ministral 3", "mistralai-Ministral-3-14B-Reasoning-2512", "qwen3", "mistral", "</s>"),
        *(("[THINK]", "[/THINK]"),),
        added=_MISTRAL,
        stands_in=True,
    ),
    Model(
        *("Nemotron Nano v2", "NVIDIA-Nemotron-Nano-v2", "qwen3", "json_list", "<SPECIAL_12>", QWEN),
        added=("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        stands_in=True,
    ),
    Model(
        *("Nemotron 3 Nano", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3", "qwen_xml", IM_END),
        *(("<think>\n", "\n</think>\n"),),
        behind_calls="\n",
        stands_in=True,
    ),
    Model(
        *("Hermes 3", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "llama3_1", "hermes", IM_END),
        added=("<|im_start|>", IM_END),
        stands_in=True,
        default=_HERMES_DEFAULT,
    ),
    Model("SmolLM3", "HuggingFaceTB-SmolLM3-3B", "qwen3", None, IM_END, QWEN, stands_in=True),
    Model(
        *("Granite 4", "ibm-granite-granite-4.0", "qwen3", "hermes", "<|end_of_text|>"),
        added=_GRANITE,
        stands_in=True,
    ),
]


def load(assets: Path, model: Model) -> TemplateRenderer:
    """The model's renderer. Stop ids are those that the tokenizer names and what the renderer finds out itself."""
    folder = assets / model.tokenizer
    raw = _raw(folder, model.added)
    tokenizer = Tokenizer(raw)
    config = read_json(folder / "tokenizer_config.json")
    if model.added:
        config = {"eos_token": model.end, "bos_token": "<s>" if "<s>" in model.added else ""}
    if model.template is None:
        template = ChatTemplate.load(folder)
    else:
        source = (assets / "templates" / f"{model.template}.jinja").read_text(encoding="utf-8")
        sources = {"default": model.default, "tool_use": source} if model.default else {"default": source}
        template = ChatTemplate(sources, special_variables(config))
    end = tokenizer.token_id(model.end)
    assert end is not None
    stops = {end} if model.added else {end, *load_stop_ids(folder, tokenizer)}
    return TemplateRenderer(tokenizer, template, stop_ids=frozenset(stops), new_id=counted_ids())


@functools.lru_cache(maxsize=2)
def _json(folder: Path) -> str:
    return (folder / "tokenizer.json").read_text(encoding="utf-8")


def _raw(folder: Path, added: tuple[str, ...]) -> RawTokenizer:
    raw = RawTokenizer.from_str(_json(folder))
    if added:
        raw.add_special_tokens(list(added))
    return raw
