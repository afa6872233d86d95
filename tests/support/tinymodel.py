"""Why: tests need a real tokenizer and a real template, and must not download one. ``make_tiny_model`` trains
a byte-level BPE on a few pages of text and puts ChatML with tools beside it: the files of a model folder,
without weights, in some milliseconds.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One token each, but part of the text: decoding keeps them, as in the Qwen3 family."""

_TEMPLATE = """\
{%- set rewrites_history = REWRITES_HISTORY %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- macro text(content) %}
    {%- if content is string %}{{ content }}
    {%- elif content %}
        {%- for part in content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{ text(messages[0].content) + '\\n\\n' }}{% endif %}
    {{- 'You can call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\nA call is a JSON object with name and arguments inside <tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first and tools %}{% continue %}{% endif %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content and (not rewrites_history or loop.index0 > ns.last_user) %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- text(message.content) }}
    {%- for call in message.tool_calls or [] %}
        {%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {%- if call.function.arguments is string %}{{ call.function.arguments }}
        {%- else %}{{ call.function.arguments | tojson }}{% endif %}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

_CORPUS = [
    "The capital of France is Paris. The capital of Italy is Rome. The weather in Paris is sunny today.",
    "You are a helpful assistant. You can call these functions to answer the question of the user.",
    "I will read the file first, then write the test, and run it. The test passes now, so the work is done.",
    "Let me think about it. The user wants to know the weather, so I should call the function get_weather.",
    "system user assistant tool name arguments type function description parameters properties required",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    '{"name": "read_file", "arguments": {"path": "src/main.py"}}',
    '{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}',
    '{"command": "ls -la", "timeout": 10}\n{"a": 15, "b": 27}',
    '{"value": true, "list": [1, 2, 3], "none": null}',
    "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n",
    "for i in range(10):\n    print(i)\nif __name__ == '__main__':\n    main()\nimport os\nimport sys\n",
    "Error: no such file or directory. Exit code 1. Please try again with another path, or make the folder.",
    "Résumé, naïve, Straße, 東京, こんにちは, привет, 🙂🚀: text is more than letters from a to z.",
]


def make_tiny_model(folder: Path | str, *, rewrites_history: bool = False) -> Path:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja.

    With ``rewrites_history`` the template drops the reasoning of assistant messages before the last user
    message, so a new user turn is no extension of the tokens before it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    template = _TEMPLATE.replace("REWRITES_HISTORY", "true" if rewrites_history else "false")
    (folder / "chat_template.jinja").write_text(template)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 32768,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0})
    return folder


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_CORPUS * 2, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False))
