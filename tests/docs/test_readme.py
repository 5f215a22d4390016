"""What README's first example prints, and the scores in its table."""

import re

import pytest

from benchmarks.zoo import rival_tables, table
from tests.docs.running import ROOT


@pytest.mark.docs
def test_readme_example_prints_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf8")
    example, expected = re.findall(r"```python\n(.*?)((?:^# .*\n)+)", text, re.DOTALL | re.MULTILINE)[0]
    exec(example, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)$", expected, re.MULTILINE)


def test_readme_table_has_the_scores_of_the_benchmark() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf8")
    rows = re.findall(r"^\| .*?([\d.]+)\*{0,2} \| \*{0,2}([\d.]+)\*{0,2} \|$", text, re.MULTILINE)
    groups = [rival_tables.GROUPS[name] for name in (rival_tables.SHORT, "passages")]
    smollm2, gemma = (rival_tables.results(model) for model in table.CAUSAL[:2])
    expected = [
        [smollm2.mean(tasks, smollm2.at("plain", 1.0)) for tasks in groups],
        [smollm2.mean(tasks, smollm2.best(tasks, "plain")) for tasks in groups],
        [smollm2.mean(tasks, smollm2.default) for tasks in groups],
        [gemma.mean(tasks, gemma.best(tasks, "plain")) for tasks in groups],
        [gemma.mean(tasks, gemma.default) for tasks in groups],
    ]
    assert rows[:5] == [tuple(f"{score:.1f}" for score in scores) for scores in expected]
