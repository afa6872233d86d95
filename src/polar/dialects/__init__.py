"""Provider APIs, one pure file each. A new one is a file here and a line in ``DIALECTS``."""

from __future__ import annotations

from polar.dialects.anthropic import AnthropicMessages
from polar.dialects.base import Dialect
from polar.dialects.openai_chat import OpenAIChat

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), AnthropicMessages())
