"""What README's first example prints."""

import re

import pytest

from tests.docs.stated import ROOT


@pytest.mark.docs
def test_readme_example_prints_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf8")
    example, expected = re.findall(r"```python\n(.*?)((?:^# .*\n)+)", text, re.DOTALL | re.MULTILINE)[0]
    exec(example, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)$", expected, re.MULTILINE)
