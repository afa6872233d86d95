"""Why: vLLM and SGLang speak ids in words of their own, but how a user's choice of mode and tokenizer meets what the
server can do is the same for both.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Unpack

from polar.contract.completion import Mode
from polar.contract.errors import UsageError
from polar.engines.base import EngineInfo
from polar.engines.capabilities import Capabilities
from polar.engines.openai import OpenAIEngine, ServerOptions
from polar.engines.tokenizers import tokenizer_folder


class TokenServer(OpenAIEngine):
    """A server that takes token ids where it can, and always chats.

    Args:
        url, model, options: see ``OpenAIEngine``.
        mode: ``tito`` makes it an error if token ids can't be had; ``chat`` makes no use of them.
        tokenizer: a folder, or a name in a local cache, instead of what the server names as its model.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        mode: Mode | None = None,
        tokenizer: str | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(url, model, **options)
        self._mode = mode
        self._tokenizer = tokenizer
        self.capabilities: Capabilities
        """What the server can do; known after ``start``."""

    async def start(self) -> None:
        """Ask the server what it serves and what it can do.

        Raises:
            UsageError: see ``OpenAIEngine``; it is no such server; there is no such tokenizer; or ``mode`` is
                ``tito`` and it can't.
        """
        await super().start()
        try:
            self._info = self._as_used(await self._asked(self.info))
        except BaseException:
            await self.close()
            raise

    @abstractmethod
    async def _asked(self, info: EngineInfo) -> EngineInfo:
        """Set ``capabilities``, and add to ``info`` what only this kind of server tells: ``model_path`` is where it
        says that its tokenizer is, ``chat_only`` why its token ids can't be used, if it has a reason of its own."""

    def _as_used(self, info: EngineInfo) -> EngineInfo:
        """What the server is for us, given what the user wants."""
        folder = tokenizer_folder(self._tokenizer or info.model_path or "")
        if folder is None and self._tokenizer is not None:
            raise UsageError(f"--tokenizer {self._tokenizer}: no such folder with a tokenizer, nor such a name here")
        chat_only = info.chat_only or self._chat_only(info)
        if self._mode == "tito" and chat_only:
            raise UsageError(f"{info.url} can't be used with --mode tito: {chat_only}")
        return replace(
            info,
            model_path=str(folder) if folder else None,
            logprobs=self.capabilities.logprobs,
            mode=self._mode,
            chat_only=chat_only,
            renders=self.capabilities.renders,
            structured=bool(self.capabilities.structured_outputs),
        )

    def _chat_only(self, info: EngineInfo) -> str | None:
        if self.capabilities.token_route is None:
            return next(f"it has no {lack.what}: {lack.fix}" for lack in self.capabilities.missing)
        if not info.context_length:
            return "it does not say how long its context is (max_model_len in /v1/models)"
        return None
