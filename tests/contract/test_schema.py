"""The published JSON schemas are those of the code. To write them anew: python -m tests.contract.test_schema"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polar.contract.schema import PUBLISHED, json_schema

FOLDER = Path(__file__).parents[2] / "docs" / "schema"


def text(kind: type) -> str:
    return json.dumps(json_schema(kind), indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("kind", PUBLISHED, ids=lambda kind: kind.__name__)
def test_the_published_schema_is_the_code_s(kind: type) -> None:
    assert (FOLDER / f"{kind.__name__}.json").read_text() == text(kind)


if __name__ == "__main__":
    for each in PUBLISHED:
        (FOLDER / f"{each.__name__}.json").write_text(text(each))
