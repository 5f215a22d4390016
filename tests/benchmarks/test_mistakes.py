"""The planted mistakes still apply: the code that each one replaces is there, once."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_planted_mistake_applies() -> None:
    mistakes = json.loads((ROOT / "benchmarks" / "mistakes" / "planted.json").read_text(encoding="utf8"))
    stale = [
        each["id"]
        for each in mistakes
        if not (ROOT / each["file"]).is_file()
        or (ROOT / each["file"]).read_text(encoding="utf8").count(each["old"]) != 1
        or each["old"] == each["new"]
    ]
    assert stale == []
    assert len({each["id"] for each in mistakes}) == len(mistakes) > 0
