"""The scripted engine on two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.making import REPO, ScriptedProcess
from tests.placement.hosts import Host


@dataclass(frozen=True, slots=True)
class Engines(ScriptedProcess):
    """An engine on the first host, and the same at the same address of the other one: it has not lost its engine when
    the wire is cut."""

    there: Host

    def start_there(self, model: Path, folder: Path) -> None:
        line = [sys.executable, "-m", "tests.support.scripted", "--model-dir", str(model)]
        line += ["--script", str(folder / "script.json"), "--port", self.url.rpartition(":")[2]]
        with (folder / "there.txt").open("wb") as out:
            subprocess.Popen(self.there.inside(line), cwd=REPO, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def generations(self) -> list[dict[str, Any]]:
        line = [
            sys.executable,
            "-c",
            "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())",
        ]
        asked = self.there.inside([*line, f"{self.url}/scripted/log"])
        found = subprocess.run(asked, capture_output=True, check=True, timeout=60)
        # Not by super(): a dataclass with slots is another class than the one that was written.
        return [*ScriptedProcess.generations(self), *json.loads(found.stdout)]
