"""Every layer of Whisper-tiny's encoder on synthesized speech: which word is spoken, and which voice speaks it.

    python -m benchmarks.zoo.weights ZOO --only Whisper-tiny
    python -m benchmarks.quality.speech ZOO/Whisper-tiny              # needs espeak-ng, a Debian package
    python -m benchmarks.quality.speech --draw                        # the page and the figure, from the scores

espeak-ng speaks each word once in each voice, at a random speed and pitch. Words are tested on voices that did not train,
voices on words that did not train. ``sweep`` embeds each recording once for both tasks and scores the mean of the states as
mteb does; ``probe`` trains attention over the states. Writes ``benchmarks/results/speech.{csv,md}`` and
``docs/figures/speech.png``; the recordings and vectors stay in ``--out``.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from benchmarks.data import RESULTS
from midlayer_encoders import LayerEncoder, probe, sweep
from midlayer_encoders.extras.probing import ProbeResult, ProbeSettings
from midlayer_encoders.metrics.label_accuracy import gain_interval
from midlayer_encoders.report import drawing
from midlayer_encoders.sweeping import SweepResult, SweepSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = RESULTS.parents[1] / "docs" / "figures" / "speech.png"
WORDS = (  # each differs from nine others in its first consonant only
    "bat", "cat", "chat", "fat", "hat", "mat", "pat", "rat", "sat", "vat",
    "bin", "chin", "din", "fin", "kin", "pin", "sin", "thin", "tin", "win",
)  # fmt: skip
VOICES = (
    "f1", "f2", "f3", "f4", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "Alex", "Alicia", "Andrea", "Andy", "Annie",
    "Denis", "Gene", "Jacky", "Lee", "Michael", "anika", "belinda", "croak", "grandma", "john", "klatt2", "steph",
)  # fmt: skip
SEED = 0
TEST_VOICES, TEST_WORDS = 12, 8
SETTINGS = ProbeSettings(batch_size=32, epochs=60, patience=10)
TASKS = {"words": "Which word is spoken?", "voices": "Which voice speaks?"}
METHODS = {"sweep": "logistic regression on the mean (sweep)", "probe": "attention over the states (probe)"}


def synthesize(out: Path) -> dict[tuple[str, str], str]:
    """Return the path of each word in each voice, spoken by espeak-ng unless the file exists."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("espeak-ng must be installed to synthesize speech: apt-get install espeak-ng")
    variants = subprocess.run(["espeak-ng", "--voices=variant"], check=True, capture_output=True, text=True).stdout
    if missing := [voice for voice in VOICES if f"!v/{voice} " not in variants]:  # it would speak in its default voice
        raise SystemExit(f"espeak-ng lacks the voices {', '.join(missing)}: install version 1.51 or later.")
    out.mkdir(parents=True, exist_ok=True)
    paths = {}
    for voice in VOICES:
        for word in WORDS:
            path = out / f"{word}-{voice}.wav"
            draw = random.Random(f"{word} {voice} {SEED}")
            speed, pitch = draw.randint(120, 200), draw.randint(30, 70)
            options = ["-v", f"en-us+{voice}", "-s", str(speed), "-p", str(pitch)]
            if not path.exists():
                subprocess.run(["espeak-ng", *options, "-w", str(path), word], check=True)
            paths[word, voice] = str(path)
    return paths


def parts_of(task: str, paths: dict[tuple[str, str], str]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the paths and labels that train and test a task; a test voice or word is not among those that train."""
    place = ("words", "voices").index(task)
    other, count = (VOICES, TEST_VOICES) if task == "words" else (WORDS, TEST_WORDS)
    held_out = set(random.Random(SEED).sample(other, count))
    rows = {
        name: [key for key in paths if (key[1 - place] in held_out) == (name == "test")] for name in ("train", "test")
    }
    return {name: ([paths[key] for key in keys], [key[place] for key in keys]) for name, keys in rows.items()}


def mteb_task(task: str, parts: dict[str, tuple[list[str], list[str]]]) -> Any:
    """Return an mteb task over audio files, with mteb's defaults: ten times 8 training examples of each class."""
    import mteb
    from datasets import Dataset, DatasetDict

    class Speech(mteb.abstasks.AbsTaskClassification):
        input_column_name = "audio"
        metadata = mteb.TaskMetadata(
            name=f"Synthetic{task.title()}", description=TASKS[task], type="AudioClassification", category="a2c",
            modalities=["audio"], dataset={"path": "local/speech", "revision": "1"}, eval_splits=["test"],
            eval_langs=["eng-Latn"], main_score="accuracy",
        )  # fmt: skip

        def load_data(self, **_: Any) -> None:
            columns = {name: {"audio": paths, "label": labels} for name, (paths, labels) in parts.items()}
            self.dataset = DatasetDict({name: Dataset.from_dict(rows) for name, rows in columns.items()})
            self.data_loaded = True

    return Speech()


def sweep_rows(task: str, result: SweepResult) -> list[dict[str, Any]]:
    """Return accuracy and gain over the last layer in percent, each with the central 95 % of resampled test recordings."""
    scores = result.frame.filter(kind="score").sort("layer")
    rows = []
    for layer, value in scores.select("layer", "value").iter_rows():
        resampled = result.resamples.filter(layer=layer)["values"].explode()
        gain = result.gain(layer)
        ends = (100 * resampled.quantile(share, "linear") for share in (0.025, 0.975))
        rows.append(_row(task, "sweep", layer, (100 * value, *ends), (gain.points, gain.low, gain.high)))
    return rows


def probe_rows(task: str, result: ProbeResult) -> list[dict[str, Any]]:
    """Return accuracy with its Wilson interval and the gain over the last layer with a bootstrap interval, in percent."""
    rows = []
    for right, row in zip(result.right.double(), result.table.iter_rows(named=True), strict=True):
        gain = (row["accuracy"] - float(result.accuracy[-1]), *gain_interval(right, result.right[-1].double()))
        accuracy = (row["accuracy"], row["low"], row["high"])
        rows.append(_row(task, "probe", row["layer"], *([100 * value for value in each] for each in (accuracy, gain))))
    return rows


def _row(task: str, method: str, layer: int, accuracy: Sequence[float], gain: Sequence[float]) -> dict[str, Any]:
    names = ("accuracy", "low", "high", "gain", "gain_low", "gain_high")
    values = dict(zip(names, (*accuracy, *gain), strict=True))
    return {"task": task, "method": method, "layer": layer} | {name: round(value, 4) for name, value in values.items()}


def run(model: str, out: Path) -> pl.DataFrame:
    """Synthesize, sweep and probe; return a row for each task, method and layer."""
    paths = synthesize(out / "recordings")
    encoder = LayerEncoder(model, -1)
    rows = []
    for task in TASKS:
        parts = parts_of(task, paths)
        result = sweep(
            encoder, mteb_task(task, parts), out=out / task, store=out / "store", settings=SweepSettings(workers=1)
        )
        if result.failures:
            raise SystemExit(f"{task}: {result.failures}")
        rows += sweep_rows(task, result)
        (train, labels), (test, test_labels) = parts["train"], parts["test"]
        probed = probe(
            encoder, train, labels, test_inputs=test, test_labels=test_labels, settings=SETTINGS, dataset=task
        )
        rows += probe_rows(task, probed)
        print(task, result.gain(), probed.verdict(), flush=True)
    return pl.DataFrame(rows)


def page(scores: pl.DataFrame) -> str:
    """Return the page of the results."""
    num_test = {"words": TEST_VOICES * len(WORDS), "voices": TEST_WORDS * len(VOICES)}
    num_train = {task: len(WORDS) * len(VOICES) - count for task, count in num_test.items()}
    lines = [
        "# Words and voices in every layer of Whisper-tiny", "",
        f"`python -m benchmarks.quality.speech`: the encoder of Whisper-tiny (4 blocks, width 384), float32 on a CPU. espeak-ng 1.51 "
        f"speaks {len(WORDS)} words, each of which differs from nine others in its first consonant only, in {len(VOICES)} "
        f"voices (variants of `en-us`): {len(WORDS) * len(VOICES)} recordings, each at a random speed (120 to 200 words per "
        "minute) and pitch (30 to 70).", "",
        f"- **Words**: {num_train['words']} recordings of {len(VOICES) - TEST_VOICES} voices train, {num_test['words']} of "
        f"{TEST_VOICES} other voices test.",
        f"- **Voices**: {num_train['voices']} recordings of {len(WORDS) - TEST_WORDS} words train, {num_test['voices']} of "
        f"{TEST_WORDS} other words test.",
        "- **sweep**: mean of the states, mteb's logistic regression on 8 training recordings of each class, ten times.",
        f"- **probe**: attention over the states, trained on all training recordings (`batch_size={SETTINGS.batch_size}, "
        f"epochs={SETTINGS.epochs}, patience={SETTINGS.patience}`).", "",
        "Accuracy in percent and the difference from the last layer, each with its 95 % interval over test recordings; the "
        "intervals do not cover the choice of voices, words and training recordings. One model, synthetic speech: real "
        "voices vary more.", "",
    ]  # fmt: skip
    for task, question in TASKS.items():
        chance = 100 / len(WORDS if task == "words" else VOICES)
        lines += [
            f"## {question}", "", f"Guessing is right in {chance:.1f} %.", "",
            "| layer | sweep | over the last | probe | over the last |", "|---|---|---|---|---|",
        ]  # fmt: skip
        for layer in sorted(scores["layer"].unique()):
            cells = [str(layer)]
            for method in METHODS:
                row = scores.filter(task=task, method=method, layer=layer).row(0, named=True)
                gain = f"{row['gain']:+.1f} ({row['gain_low']:+.1f} to {row['gain_high']:+.1f})"
                cells += [f"{row['accuracy']:.1f} ({row['low']:.1f} to {row['high']:.1f})"]
                cells += [gain if layer < scores["layer"].max() else "–"]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def draw(scores: pl.DataFrame) -> Figure:
    """Return the figure: a panel for each task, a curve with its interval for each method."""
    figure, panels = drawing.panel_grid(len(TASKS), size=(3.6, 2.8))
    for axes, (task, question) in zip(panels, TASKS.items(), strict=True):
        for style, (method, label) in enumerate(METHODS.items()):
            rows = scores.filter(task=task, method=method).sort("layer")
            band = rows["low"].to_list(), rows["high"].to_list()
            drawing.draw_points(
                axes, rows["layer"].to_list(), rows["accuracy"].to_list(), label=label, style=style, band=band
            )
        drawing.draw_level(axes, 100 / len(WORDS if task == "words" else VOICES), "guessing", "guessing")
        drawing.layer_axis(axes, int(scores["layer"].max()))  # type: ignore[arg-type]
        axes.set_ylim(0, 102)
        axes.set_ylabel("accuracy, %")
        drawing.set_title(axes, question)
    return drawing.finish(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of Whisper-tiny")
    parser.add_argument("--out", type=Path, default=Path("runs/speech"), help="recordings, vectors and sweeps")
    parser.add_argument("--draw", action="store_true", help="only write the page and the figure")
    args = parser.parse_args()
    if not args.draw:
        if args.model is None:
            parser.error("pass the folder of the model, or --draw")
        run(args.model, args.out).write_csv(RESULTS / "speech.csv")
    scores = pl.read_csv(RESULTS / "speech.csv")
    (RESULTS / "speech.md").write_text(page(scores), encoding="utf8")
    draw(scores).savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
