"""What pages say of words and voices in Whisper, and of antibodies, and the frames that say it."""

from __future__ import annotations

import re

from tests.docs.frames import Curve, best, last, table
from tests.docs.stated import ROOT, Claim

PAGE = "docs/media.md"


def _curve(task: str, method: str, column: str = "accuracy") -> Curve:
    rows = table("results/speech.csv").filter(task=task, method=method).sort("layer")
    return dict(rows.select("layer", column).iter_rows())


def _recordings() -> list[int]:
    """Return the recordings, words and voices that the page of results names: each word in each voice."""
    text = (ROOT / "benchmarks" / "results" / "speech.md").read_text(encoding="utf8")
    ((words, voices, recordings),) = re.findall(r"speaks (\d+) words.* in (\d+) voices .*: (\d+) recordings", text)
    assert int(words) * int(voices) == int(recordings)
    return [int(recordings), int(words), int(voices)]


def _words() -> list[float]:
    """Return the accuracy of words at the first and last layer, and how far the layer before is below, with its interval."""
    accuracy = _curve("words", "sweep")
    assert list(accuracy.values()) == sorted(accuracy.values())
    before = max(accuracy) - 1
    loss = [-_curve("words", "sweep", column)[before] for column in ("gain", "gain_high", "gain_low")]
    return [accuracy[0], 0, last(accuracy), max(accuracy), before, *loss]


def _voices() -> list[float]:
    """Return the best layer for voices and its accuracy, that of the last layer, and the difference with its interval."""
    accuracy = _curve("voices", "sweep")
    value, layer = best(accuracy)
    gain = [_curve("voices", "sweep", column)[layer] for column in ("gain", "gain_low", "gain_high")]
    return [layer, value, last(accuracy), *gain]


def _attention() -> list[float]:
    """Return the range of words, the voices at the last layer and at the two best, which are equal."""
    words, voices = _curve("words", "probe"), _curve("voices", "probe")
    highest = [layer for layer, value in voices.items() if value == best(voices)[0]]
    return [min(words.values()), max(words.values()), last(voices), best(voices)[0], *highest]


def _antibodies() -> list[float]:
    """Return the best layer and score, and the last score, of species, chain and region; of chain, all best layers."""
    text = (ROOT / "benchmarks" / "results" / "biology.md").read_text(encoding="utf8")
    rows = [[float(cell) for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[2:3].isdigit()]
    assert max(abs(row[column] - row[column + 1]) for row in rows for column in (1, 3)) < 0.35
    numbers = []
    for column in (3, 1, 5):
        curve = {int(row[0]): row[column] for row in rows}
        score = max(curve.values())
        layers = [layer for layer, value in curve.items() if value == score]
        numbers += [*dict.fromkeys((layers[0], layers[-1])), score, last(curve)]
    return numbers


CLAIMS = [
    Claim(
        "docs/biology.md",
        "the species of a gene is read best from layer {} ({} %, the last layer {} %), its chain from layers {} to {} "
        "({} %, last {} %), and the region of a single residue from layer {} ({} %, last {} %)",
        _antibodies,
    ),
    Claim(PAGE, "on {} recordings by espeak-ng of {} rhyming words in {} voices", _recordings),
    Claim(
        PAGE, "accuracy rises from {} % at layer {} to {} % at layer {}. Layer {} is {} points lower ({} to {})", _words
    ),
    Claim(PAGE, "Layer {} is best with {} %; the last layer has {} %, {} points less ({} to {})", _voices),
    Claim(
        PAGE,
        "at every layer, {} to {} %. It does not recover the voices at the last layer: {} %, compared with {} % at layers "
        "{} and {}",
        _attention,
    ),
]
