from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality import speech


@pytest.mark.parametrize("task", speech.TASKS)
def test_words_and_voices_are_tested_on_the_others_that_did_not_train(task: str) -> None:
    paths = {(word, voice): f"{word} {voice}" for word in speech.WORDS for voice in speech.VOICES}
    parts = speech.parts_of(task, paths)
    place = ("words", "voices").index(task)
    classes, others = {}, {}
    for name, (recordings, labels) in parts.items():
        keys = [recording.split() for recording in recordings]
        assert labels == [key[place] for key in keys]
        classes[name], others[name] = set(labels), {key[1 - place] for key in keys}
    assert classes["train"] == classes["test"] == set((speech.WORDS, speech.VOICES)[place])
    assert others["train"].isdisjoint(others["test"])
    assert sum(len(recordings) for recordings, _ in parts.values()) == len(paths)


def test_missing_synthesizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="apt-get install espeak-ng"):
        speech.synthesize(tmp_path)
