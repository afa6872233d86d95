"""Provider APIs, one pure file each. A new one is a file here and a line in ``DIALECTS``."""

from __future__ import annotations

from polar.dialects.anthropic import AnthropicMessages
from polar.dialects.base import Dialect
from polar.dialects.gemini import Gemini
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_completions import OpenAICompletions
from polar.dialects.openai_responses import OpenAIResponses

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), AnthropicMessages(), OpenAIResponses(), Gemini(), OpenAICompletions())
