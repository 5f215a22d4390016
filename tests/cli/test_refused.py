"""A flag that would have no effect is refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from midlayer_encoders import compare, progression
from midlayer_encoders.cli import app
from midlayer_encoders.errors import OptionError
from tests.cli.calls import run
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]

WITHOUT_EFFECT = {
    "probe --data . --pooling last": "`--pooling` must be left out with `--kind attentive`, which pools the tokens by",
    "probe --data . --truncate-dim 8": "`--truncate-dim` must be left out with `--kind attentive`",
    "probe --data . --kind linear --keep-gb 4": "`--keep-gb` must be left out with `--kind linear`, which reads one",
    "probe --data . --kind knn --epochs 30": "`--epochs` must be left out with `--kind knn`, which trains nothing",
    "probe --data . --kind knn --learning-rate 1": "`--learning-rate` must be left out with `--kind knn`",
    "metrics --texts lines.txt --skip-bad": "`--skip-bad` must be left out for texts",
    "metrics --images . --field text": "`--field` must be left out for images: it is about texts",
    "metrics --audio . --wikitext": "`--wikitext` must be left out for audio: it is about texts",
}


@pytest.mark.parametrize("words", WITHOUT_EFFECT)
def test_a_flag_without_effect_is_refused_before_the_model_is_loaded(words: str, tmp_path: Path) -> None:
    command, *rest = words.split()
    with pytest.raises(OptionError) as error:
        run(command, "no/such-model", *rest, "--out", str(tmp_path))
    assert WITHOUT_EFFECT[words] in str(error.value)


@pytest.mark.parametrize("words", ["compare a b", "progression a"])
def test_a_revision_is_no_flag_where_models_are_named_with_theirs(words: str, tmp_path: Path) -> None:
    given = [*words.split(), "--texts", "lines.txt", "--out", str(tmp_path), "--revision", "step7"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "--revision" in result.output


def test_a_revision_is_refused_in_python_too() -> None:
    with pytest.raises(OptionError, match=r"`revision` must be left out, since each model .* 'step7'. Write `name@rev"):
        compare("a", "b", texts=TEXTS * 3, revision="step7")
    with pytest.raises(OptionError, match="`revision` must be left out, since `revisions` names them, but got 'step7'"):
        progression("a", ["step1", "step2"], texts=TEXTS, revision="step7")


def test_the_old_flag_for_audio_still_works_and_says_so(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    words = ["metrics", "no/such-model", "--out", str(tmp_path / "out"), "--sounds", str(tmp_path / "none")]
    result = CliRunner().invoke(app, words)
    assert "--sounds is deprecated and removed in 0.3: write --audio." in result.output
    assert "audio" in str(result.exception)
    assert "--sounds" not in CliRunner().invoke(app, ["metrics", "--help"]).output
    both = CliRunner().invoke(app, [*words, "--audio", str(tmp_path)], env={"COLUMNS": "200"})
    assert "name one of --texts, --images, --audio, but got 2" in both.output
