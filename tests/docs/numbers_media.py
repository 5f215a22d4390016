"""What pages say of words and voices in Whisper, and of antibodies, and the frames that say it."""

import re

from tests.docs.frames import Curve, best, last, table
from tests.docs.stated import ROOT


def speech_curve(task: str, method: str, column: str = "accuracy") -> Curve:
    rows = table("results/speech.csv").filter(task=task, method=method).sort("layer")
    return dict(rows.select("layer", column).iter_rows())


def num_recordings() -> list[int]:
    """Return the recordings, words and voices that the page of results names: each word in each voice."""
    text = (ROOT / "benchmarks" / "results" / "speech.md").read_text(encoding="utf8")
    ((words, voices, recordings),) = re.findall(r"speaks (\d+) words.* in (\d+) voices .*: (\d+) recordings", text)
    assert int(words) * int(voices) == int(recordings)
    return [int(recordings), int(words), int(voices)]


def word_numbers() -> list[float]:
    """Return the accuracy of words at the first and last layer, and how far the layer before is below, with its interval."""
    accuracy = speech_curve("words", "sweep")
    assert list(accuracy.values()) == sorted(accuracy.values())
    before = max(accuracy) - 1
    loss = [-speech_curve("words", "sweep", column)[before] for column in ("gain", "gain_high", "gain_low")]
    return [accuracy[0], 0, last(accuracy), max(accuracy), before, *loss]


def voice_numbers() -> list[float]:
    """Return the best layer for voices and its accuracy, that of the last layer, and the difference with its interval."""
    accuracy = speech_curve("voices", "sweep")
    value, layer = best(accuracy)
    gain = [speech_curve("voices", "sweep", column)[layer] for column in ("gain", "gain_low", "gain_high")]
    return [layer, value, last(accuracy), *gain]


def attention() -> list[float]:
    """Return the range of words, the voices at the last layer and at the two best, which are equal."""
    words, voices = speech_curve("words", "probe"), speech_curve("voices", "probe")
    highest = [layer for layer, value in voices.items() if value == best(voices)[0]]
    return [min(words.values()), max(words.values()), last(voices), best(voices)[0], *highest]


def sizes(task: str, column: str = "accuracy", window: int = 3) -> list[Curve]:
    """Return the scores by layer of each size of Whisper, from the smallest."""
    rows = table("results/whisper_sizes.csv").filter(task=task, window=window).sort("layer")
    return [dict(part.select("layer", column).iter_rows()) for _, part in rows.group_by("size", maintain_order=True)]


def words_of_sizes() -> list[float]:
    """Return the best layer for words of each size, its depth and accuracy, then its gain over the last with its interval."""
    curves = sorted(sizes("words"), key=len)
    numbers = [number for curve in curves for number in (best(curve)[1], max(curve), best(curve)[0])]
    assert all(2 * best(curve)[1] == max(curve) for curve in curves)
    gains = [sorted(sizes("words", column), key=len) for column in ("gain", "gain_low", "gain_high")]
    return numbers + [curve[len(curve) // 2] for size in zip(*gains, strict=True) for curve in size]


def voices_of_sizes() -> list[float]:
    """Return the best accuracy of voices in each size, which the first quarter of the layers has, then the last."""
    curves = sorted(sizes("voices"), key=len)
    assert all(4 * best(curve)[1] <= max(curve) for curve in curves)
    return [best(curve)[0] for curve in curves] + [last(curve) for curve in curves]


def whole_window() -> list[float]:
    """Return where tiny finds words best with the whole window, and the largest change of voices by the short one."""
    (words,), (voices,) = (sizes(task, window=30) for task in ("words", "voices"))
    layers = [layer for layer, value in words.items() if value == best(words)[0]]
    short = min(sizes("voices"), key=len)
    layer = max(voices, key=lambda layer: abs(voices[layer] - short[layer]))
    short_words = min(sizes("words"), key=len)
    assert all(
        abs(words[layer_number] - short_words[layer_number]) < abs(voices[layer] - short[layer])
        for layer_number in words
    )
    return [*layers, best(words)[0], layer, voices[layer], short[layer]]


def antibody_numbers() -> list[float]:
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
