"""Scenarios to kill: each writes to a folder, can run again in it, and returns its results."""

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from midlayer_encoders.files import file_checksums
from tests.store.filling import check_vectors, fill, make_keys, open_store
from tests.support.tiny_folders import TEXTS, save_tiny
from tests.tasks.rows import ROWS

Scenario = Callable[[Path], Any]
"""Writes into a folder and returns what came out, in plain lists and numbers."""


def written(path: Path) -> Any:
    import polars as pl

    return pl.read_parquet(path).rows()


def write_task(path: Path, kind: str) -> None:
    """Write a few rows, of texts that no tiny model truncates."""
    rows = [
        {name: item[:40] if isinstance(item, str) else item for name, item in row.items()} for row in ROWS[kind][:12]
    ]
    path.write_text("\n".join(map(json.dumps, rows)))


def store(_: Path) -> Scenario:
    """Vectors in batches."""

    def run(out: Path) -> Any:
        stored = open_store(out)
        missing = set(stored.missing(make_keys(range(24))))
        for start in range(0, 24, 3):
            if missing & set(range(start, start + 3)):
                fill(stored, range(start, start + 3))
        check_vectors(open_store(out), range(24))
        return sorted(path.name for path in out.iterdir() if not path.name.startswith("."))

    return run


def sweep(data: Path) -> Scenario:
    """Two tasks of one's own, one layer, vectors in several shards."""
    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.sweeping import SweepResult, SweepSettings
    from midlayer_encoders.sweeping import sweep as run_sweep
    from midlayer_encoders.sweeping.store import read_head

    encoder = LayerEncoder(save_tiny("GPTNeoX", data / "model"), -1, device="cpu")
    tasks = [data / "near.jsonl", data / "pairs.jsonl"]
    for path, kind in zip(tasks, ("STS", "PairClassification"), strict=True):
        write_task(path, kind)

    def run(out: Path) -> Any:
        settings = SweepSettings(workers=1, token_budget=300)
        result = run_sweep(encoder, tasks, layers=[2], out=out, baselines=False, settings=settings)
        assert SweepResult.load(out).frame.equals(result.frame)
        result.to_html()
        vectors = {}
        for path in sorted(out.glob("embeddings/*/*.safetensors")):
            shard, keys = read_head(path)
            shard.verify(shard.layers)
            every_row = np.arange(shard.count)
            rows = np.stack([shard.read(layer, every_row) for layer in shard.layers])
            vectors |= {key.hex(): hashlib.sha256(rows[:, n].tobytes()).hexdigest() for n, key in enumerate(keys)}
        return [result.frame.rows(), dict(result.failures), sorted(vectors.items())]

    return run


def metrics(data: Path) -> Scenario:
    """The command that measures, with its tables and its figure."""
    from midlayer_encoders.cli import app

    model, texts = save_tiny("GPTNeoX", data / "model"), data / "texts.txt"
    texts.write_text("\n".join(TEXTS))

    def run(out: Path) -> Any:
        words = [
            "metrics",
            model,
            "--texts",
            str(texts),
            "--metrics",
            "curvature",
            "--device",
            "cpu",
            "--out",
            str(out),
        ]
        app(words, standalone_mode=False)
        return [
            written(out / "metrics.parquet"),
            (out / "metrics.csv").read_text(),
            (out / "metrics.png").stat().st_size,
        ]

    return run


def progression(data: Path) -> Scenario:
    """Two checkpoints, each kept as it is measured, with tables, figures and page."""
    from midlayer_encoders.comparing import progression as run_progression

    for step in (1, 2):
        save_tiny("GPTNeoX", data / "run" / f"step{step}", seed=step)

    def run(out: Path) -> Any:
        result = run_progression(str(data / "run"), texts=TEXTS[:3], metrics=["curvature"], out=out, device="cpu")
        assert not result.failures
        pages = sorted(path.name for path in out.iterdir() if path.suffix in (".png", ".html"))
        remaining = sorted((path.name, written(path)) for path in (out / "steps").glob("*.parquet"))
        return [
            result.frame.rows(),
            written(out / "frame.parquet"),
            (out / "settled.csv").read_text(),
            pages,
            remaining,
        ]

    return run


def reproduce(data: Path) -> Scenario:
    """A figure without a model and one of a sweep, and their page."""
    from benchmarks.paper.reproduce import reproduce as run_experiments
    from benchmarks.paper.reproduce import write_experiments
    from benchmarks.paper.setting import Setting
    from midlayer_encoders import LayerEncoder

    model, near = save_tiny("GPTNeoX", data / "model"), data / "near.jsonl"
    write_task(near, "STS")
    encoder = LayerEncoder(model, -1, device="cpu")

    def run(out: Path) -> Any:
        setting = Setting(
            models=(model,), load=lambda _: encoder, out=out, tasks=str(near), layers=(0, 2), limit=4, workers=1
        )
        outcomes = run_experiments(["fig7", "fig1"], setting)
        page = write_experiments(outcomes, setting)
        assert page.is_file()
        assert (out / "outcomes.json").is_file()
        repeated = run_experiments(["fig7", "fig1"], setting)
        return [[item.findings for item in repeated], [item.status for item in repeated], written(out / "fig1.parquet")]

    return run


def export(data: Path) -> Scenario:
    """A folder that is new, or whole."""
    from sentence_transformers import SentenceTransformer

    from midlayer_encoders.cli import app

    model = save_tiny("GPTNeoX", data / "model")

    def run(out: Path) -> Any:
        folder = out / "cut"
        if not folder.exists():
            app(["export", model, "--layer", "2", "--out", str(folder)], standalone_mode=False)
        app(["export", model, "--layer", "1", "--out", str(folder), "--overwrite"], standalone_mode=False)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return [files, SentenceTransformer(str(folder), device="cpu").encode(TEXTS).tolist()]

    return run


def saved(data: Path) -> Scenario:
    """A folder over another one: a killed save leaves the old one, the new one, or one that nobody loads."""
    from sentence_transformers import SentenceTransformer

    from midlayer_encoders import LayerEncoder

    model = save_tiny("GPTNeoX", data / "model")
    encoders = [LayerEncoder(model, layer, pooling="last", device="cpu") for layer in (3, 1)]
    vectors = [encoder.encode(TEXTS).tolist() for encoder in encoders]

    def run(out: Path) -> Any:
        folder = out / "cut"
        for encoder in encoders if not folder.exists() else encoders[1:]:
            try:
                result = SentenceTransformer(str(folder), device="cpu").encode(TEXTS).tolist()
            except (OSError, ValueError):  # none, or one without its config
                result = vectors[0]
            assert result in vectors
            encoder.save_pretrained(str(folder))
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return [files, SentenceTransformer(str(folder), device="cpu").encode(TEXTS).tolist()]

    return run


def history(data: Path) -> Scenario:
    """A Lightning run with the callback's history and figures."""
    from midlayer_encoders.callbacks import LayerMetricsCallback
    from tests.callbacks.training import TOKENIZER, Boring, fit, neox

    def run(out: Path) -> Any:
        calls = LayerMetricsCallback(TEXTS, TOKENIZER, metrics=["curvature"], every_n_steps=1, dirpath=out)
        fit(Boring(neox()), data, [calls], max_steps=2, logger=False)
        return [written(out / "history.parquet"), sorted(path.name for path in out.glob("*.png"))]

    return run


def resumed(data: Path) -> Scenario:
    """A Hugging Face run that goes on from its last checkpoint, with the history that it left."""
    from midlayer_encoders.callbacks import LayerMetricsTrainerCallback
    from tests.callbacks.test_trainer import llama, make_trainer
    from tests.callbacks.training import TOKENIZER

    def run(out: Path) -> Any:
        folder = out.with_name(f"{out.name}-run")  # its checkpoints are the trainer's own files
        calls = LayerMetricsTrainerCallback(
            TEXTS, TOKENIZER, metrics=["curvature"], every_n_steps=1, dirpath=out, figures=False
        )
        if not (folder / "checkpoint-3").exists():
            result = make_trainer(folder, [calls], llama(), max_steps=3, save_strategy="steps", save_steps=1)
            result.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
        return [row[1:3] for row in written(out / "history.parquet")]

    return run


def vectors(data: Path) -> Scenario:
    """A file of vectors, over an earlier one."""
    from midlayer_encoders import LayerEncoder, embed

    encoder = LayerEncoder(save_tiny("GPTNeoX", data / "model"), -1, device="cpu")

    def run(out: Path) -> Any:
        path = out / "vectors.npy"
        embed(encoder, TEXTS[:2], path, layers=[1], token_budget=64)
        embed(encoder, TEXTS, path, layers=[0, 2], token_budget=64)
        label = json.loads((out / "vectors.npy.json").read_text())
        return [np.load(path).tolist(), label, sorted(each.name for each in out.glob("[!.]*"))]

    return run


def tuning(data: Path) -> Scenario:
    """A tuned encoder, with its checkpoints, held-out losses and page."""
    from tests.tuning.rows import tuned

    model = save_tiny("Llama", data / "model")
    logging.getLogger("midlayer_encoders.encoder.saving").setLevel(logging.ERROR)  # the model has no name for mteb

    def run(out: Path) -> Any:
        result = tuned(model, out, max_steps=4, checkpoints=4, patience=9, held_out=0.2, epochs=2.0)
        steps = result.trained.losses.rows(), result.trained.metrics.rows(), result.trained.best_step
        names = sorted(path.name for path in out.glob("[!.]*"))
        digests = file_checksums(out / "model", "*.safetensors"), result.encoder.spec.digest
        return [steps, names, digests, result.encoder.encode(TEXTS).tolist()]

    return run


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    scenario.__name__: scenario
    for scenario in (store, sweep, metrics, progression, reproduce, export, saved, history, resumed, vectors, tuning)
}
"""Each prepares what it needs in a folder, without polars, whose threads a fork does not survive."""
