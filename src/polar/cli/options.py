"""Options that several commands share, so that they are the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EngineKind = Annotated[
    str, typer.Option("--engine", help="local (embedded), or a server: vllm, sglang, openai (any compatible).")
]
EngineURL = Annotated[
    str | None, typer.Option("--engine-url", help="Address of the engine server; several of one model: A,B,C.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="A model folder or known name (local), or the served name.")
]
Mode = Annotated[
    str | None,
    typer.Option("--mode", help="tito (token ids in and out) or chat; the engine's best if left out."),
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", help="Tokenizer and template: a folder, or a name in a local cache; for tito mode."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Results folder; run again with it to go on.")]
JSONOutput = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
AllowMissingTokenIds = Annotated[
    bool,
    typer.Option("--allow-missing-token-ids", help="Go on where the engine returns no token ids: not to train on."),
]
BufferReplies = Annotated[
    bool, typer.Option("--buffer-replies", help="Sample streamed replies whole, and send them in one go at the end.")
]
NoSandbox = Annotated[
    bool, typer.Option("--no-sandbox", help="Run agents as plain processes of yours, without any wall.")
]
AllowImport = Annotated[
    bool, typer.Option("--allow-import", help="Let tasks name Python classes of their own (module:Class).")
]
