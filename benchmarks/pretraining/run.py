"""Train one variant from its first step with the callback attached; everything measured is written.

    python -m benchmarks.pretraining.corpus DATA                      # once: tokenizer, ids, texts to measure, tasks
    python -m benchmarks.pretraining.run DATA OUT --compile           # the base, on one GPU in about three minutes
    python -m benchmarks.pretraining.run DATA OUT --variant no-bos --compile
    python -m benchmarks.pretraining.run DATA OUT --steps 20 --blocks 2 --width 64 --batch 4      # a try on a CPU

Writes ``OUT/VARIANT.parquet``, tidy rows, ``OUT/VARIANT.pt``, the weights, and the run's losses and seconds into
``OUT/runs.json``: ``python -m benchmarks.pretraining.tables OUT`` prints the record's tables of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars
import torch

from benchmarks.pretraining.corpus import STRETCH, Windows, parts, read_tokenizer, read_tokens
from benchmarks.pretraining.models import VARIANTS, Pretraining, Size, block_parameters, language_model, pl, sees_ahead
from benchmarks.pretraining.tasks import ASKED, Evaluation, read_tasks
from benchmarks.pretraining.watching import MEASURED, Aside, Progress, Stages, looks, stages
from midlayer_encoders.callbacks import LayerMetricsCallback

HELD = 512  # windows of the held-out loss


def train(given: argparse.Namespace) -> None:
    """Train a variant and write what was measured."""
    variant = VARIANTS[given.variant]
    variant = replace(variant, steps=given.steps or variant.steps)
    steps, size = variant.steps, Size(given.blocks, given.width, length=given.length)
    model = language_model(variant, size)
    if sees_ahead(model.backbone.eval(), size.vocab) != (variant.objective == "masked"):
        raise RuntimeError(f"{given.variant} must {'' if variant.objective == 'masked' else 'not '}see ahead.")
    model.train()
    module = Pretraining(model, variant, compiled=given.compile)
    gpu = torch.cuda.is_available()
    ids = torch.from_numpy(read_tokens(given.data / "tokens.xz")).to("cuda" if gpu else "cpu")
    train_ids, held = parts(ids, given.stretch)
    if len(held) < 3 * given.length:
        raise ValueError(
            f"`--stretch` must leave {3 * given.length} tokens or more to hold out, but {given.stretch} leaves {len(held)} of "
            f"{len(ids)}: give a smaller one, with a corpus made for it."
        )
    held_out = next(iter(Windows(held, 1, min(HELD, len(held) // given.length - 1), given.length)))

    tokenizer = read_tokenizer(given.data, bos=variant.bos > 0)
    probes = json.loads((given.data / "probes.json").read_text())
    texts, views = probes["texts"][: given.probes], [view[: given.probes] for view in probes["views"]]
    measured = looks(steps, brief=given.brief)
    look = LayerMetricsCallback(
        texts, tokenizer, metrics=MEASURED, every_n_steps=measured, views=views, module="model.backbone",
        max_length=128, figures=False, dirpath=given.out / "history" / given.variant, strict=True,
    )  # fmt: skip
    aside = Aside(measured, texts, views, tokenizer)
    evaluation = Evaluation(read_tasks(given.data / "tasks"), tokenizer, recipes=given.recipes)
    stage = Stages(stages(steps, brief=given.brief), evaluation, held_out)
    step_tokens = given.batch * given.length
    trainer = pl.Trainer(
        max_steps=steps, max_epochs=1, precision="bf16-mixed" if gpu else "32-true", logger=False, devices=1,
        callbacks=[look, aside, stage, Progress(measured, look, aside, step_tokens)],
        accelerator="gpu" if gpu else "cpu", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    start = time.perf_counter()
    trainer.fit(module, Windows(train_ids, steps, given.batch, given.length))
    if trainer.global_step < steps:  # Lightning 2.2 returns from Ctrl-C as if all were done
        raise RuntimeError(f"{given.variant} stopped at step {trainer.global_step} of {steps}: run the command again.")
    losses = torch.stack(module.losses).float().tolist()
    told = {
        "command": given.command, "variant": asdict(variant), "tokens": steps * step_tokens, "steps": steps,
        "seconds": time.perf_counter() - start, "device": torch.cuda.get_device_name() if gpu else "cpu",
        "block_parameters": block_parameters(model), "parameters": sum(p.numel() for p in model.parameters()),
        "held_out": stage.held_out, "losses": [round(loss, 4) for loss in losses],
    }  # fmt: skip
    rows = [*look.history, *(row for one in (aside, stage) for some in one.rows.values() for row in some)]
    write(given.out, given.variant, told, rows)
    torch.save(model.state_dict(), given.out / f"{given.variant}.pt")
    print(
        f"{given.variant}: {steps} steps in {told['seconds']:.1f} s; loss {losses[0]:.3f} to "
        f"{sum(losses[-20:]) / len(losses[-20:]):.3f}, held out {stage.held_out}",
        flush=True,
    )


def write(out: Path, name: str, told: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write rows of the tidy frame, in single precision: nothing here is known to more digits; and what is told of them."""
    columns = ("revision", "layer", "depth", "kind", "dataset", "name", "value")
    frame = polars.DataFrame([{"model": name} | {column: row[column] for column in columns} for row in rows])
    frame = frame.with_columns(
        polars.col("value", "depth").cast(polars.Float32), polars.col("layer").cast(polars.Int16)
    )
    out.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(out / f"{name}.parquet", compression="zstd", compression_level=15)
    path = out / "runs.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | {name: told}))


def count(word: str) -> int:
    """Return a number of one or more that was given as a word."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, but got {number}")
    return number


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--variant", choices=list(VARIANTS), default="base")
    parser.add_argument("--probes", type=count, default=200, help="texts to measure, 11 or more")
    parser.add_argument("--recipes", nargs="+", choices=ASKED, default=ASKED, help="how the tasks' texts are asked")
    parser.add_argument(
        "--stretch", type=count, help="tokens in a stretch; every hundredth is held out, by default DATA's"
    )
    parser.add_argument("--threads", type=count, default=1, help="16 made a measurement five times as long as 1 did")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=count, help="the variant's own by default")
    for name, value in (("batch", 256), ("blocks", 12), ("width", 512), ("length", 256)):
        parser.add_argument(f"--{name}", type=count, default=value)
    parser.add_argument("--brief", action="store_true", help="measure and score less often")
    given = parser.parse_args(words)
    for file in ("tokenizer.json", "tokens.xz", "probes.json", "tasks"):
        if not (given.data / file).exists():
            raise FileNotFoundError(
                f"{given.data / file} is not there: `python -m benchmarks.pretraining.corpus {given.data}` makes it."
            )
    # The texts to measure were taken from the part that DATA's own stretches hold out.
    given.stretch = given.stretch or json.loads((given.data / "probes.json").read_text()).get("stretch", STRETCH)
    given.command = "python -m benchmarks.pretraining.run DATA OUT " + " ".join((words or sys.argv[1:])[2:])
    for logger in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    torch.set_num_threads(given.threads)
    train(given)


if __name__ == "__main__":
    main()
