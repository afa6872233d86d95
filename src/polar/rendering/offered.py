"""Why: a template that knows no tools renders a conversation with tools as it would without, and says nothing. The
model then never hears of them, and the run looks like one of a model that does not want to call. So whether tools
reach the prompt is found by rendering one message with them and without.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from polar.contract.chat import Chat, Message
from polar.rendering.base import Prompt, RenderError

DROPPED = (
    "tools were dropped: the model's template has no place for them; give one that has by --tokenizer FOLDER "
    "(its chat_template.jinja)"
)
UNREAD = (
    "tool calls stay text: the model's template shows no form of them that is known here; give one that does by "
    "--tokenizer FOLDER (its chat_template.jinja)"
)
MOST = 256
"""Sets of tools whose answer is remembered."""


def probes(chat: Chat) -> tuple[Chat, Chat]:
    """One message with this call's tools, and without: rendered alike, the tools are lost."""
    without = Chat(chat.model, (Message("user", "Probe."),), template_args=chat.template_args)
    return msgspec.structs.replace(without, tools=chat.tools), without


class OfferedTools:
    """What becomes of the tools that calls offer.

    Args:
        render: renders a whole conversation.
        reads: whether calls are read from replies.
    """

    def __init__(self, render: Callable[[Chat], Prompt], *, reads: bool) -> None:
        self._render = render
        self._reads = reads
        self._written: dict[bytes, bool] = {}

    def lost(self, chat: Chat, digest: bytes) -> str | None:
        """See ``Renderer.tools_lost``. ``digest``: of the call's tools and template arguments."""
        if not chat.tools or chat.tool_choice == "none":
            return None
        written = self._written.get(digest)
        if written is None:
            if len(self._written) >= MOST:
                self._written.clear()
            written = self._written[digest] = self._writes(chat)
        if not written:
            return DROPPED
        return None if self._reads else UNREAD

    def _writes(self, chat: Chat) -> bool:
        offered, without = probes(chat)
        try:
            return not np.array_equal(self._render(offered).ids, self._render(without).ids)
        except RenderError:
            return True  # what the template refuses it does not pass over
