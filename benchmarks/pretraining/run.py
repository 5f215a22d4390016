"""Train one variant from its first step with the callback attached; everything measured is written.

    python -m benchmarks.pretraining.corpus DATA                      # once: tokenizer, ids, texts to measure, tasks
    python -m benchmarks.pretraining.run DATA OUT --compile           # the base, on one GPU in about three minutes
    python -m benchmarks.pretraining.run DATA OUT --variant no-bos --compile
    python -m benchmarks.pretraining.more_text DATA --cache CACHE     # once, for the variant that trains on more text:
    python -m benchmarks.pretraining.run DATA OUT --variant long --compile --seconds 500
    python -m benchmarks.pretraining.run DATA OUT --steps 20 --blocks 2 --width 64 --batch 4      # a try on a CPU

Writes ``OUT/VARIANT.parquet``, tidy rows, and ``OUT/VARIANT.json``: losses and seconds. ``--seconds 500`` pauses a run after
that time; the same command goes on where it was. ``benchmarks/pretraining/variants.py`` lists the variants, ``docs/training.md``
tells what came out on an H200.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import polars
import torch
from torch import Tensor

from benchmarks.pretraining.corpus import STRETCH, Windows, parts, read_tokenizer, read_tokens
from benchmarks.pretraining.models import Size, block_parameters, language_model, sees_ahead
from benchmarks.pretraining.module import Pretraining, pl
from benchmarks.pretraining.tasks import ASKED, Evaluation, read_tasks
from benchmarks.pretraining.variants import VARIANTS, Variant
from benchmarks.pretraining.watching import MEASURED, Aside, Pause, Progress, Stages, TimedLook, looks, stages

HELD = 512  # windows of the held-out loss


class Watched(NamedTuple):
    """The callbacks that measure a run."""

    look: TimedLook
    aside: Aside
    stage: Stages


def train(given: argparse.Namespace) -> bool:
    """Train a variant, or go on with one; return whether it is done."""
    variant = VARIANTS[given.variant]
    variant = replace(variant, steps=given.steps or variant.steps)
    steps, size = variant.steps, Size(given.blocks, given.width, length=given.length)
    model = language_model(variant, size)
    if sees_ahead(model.backbone.eval(), size.vocab) != (variant.objective == "masked"):
        raise RuntimeError(f"{given.variant} must {'' if variant.objective == 'masked' else 'not '}see ahead.")
    model.train()
    module = Pretraining(model, variant, compiled=given.compile)

    train_ids, held = read_parts(given, more=variant.more)
    if len(held) < 3 * given.length:
        raise ValueError(
            f"`--stretch` must leave {3 * given.length} tokens or more to hold out, but {given.stretch} leaves {len(held)} of "
            f"{len(train_ids) + len(held)}: give a smaller one, with a corpus made for it."
        )
    held_out = next(iter(Windows(held, 1, min(HELD, len(held) // given.length - 1), given.length)))
    measured, scored = looks(steps, brief=given.brief), stages(steps, brief=given.brief)
    watched = watch(given, variant, given.variant, looks=measured, stages=scored, held=held_out)
    kept = given.out / f"{given.variant}.ckpt"
    asked = {
        "variant": asdict(variant), "size": asdict(size), "batch": given.batch, "stretch": given.stretch,
        "probes": given.probes, "recipes": list(given.recipes), "brief": given.brief,
        "tokens.xz": zlib.crc32((given.data / "tokens.xz").read_bytes()),
    }  # fmt: skip
    pause = Pause(given.seconds, kept, asked)
    before = pause.checkpoint()
    progress = Progress(measured, watched.look, watched.aside, given.batch * given.length)
    trainer = make_trainer(steps, [*watched, progress, pause])
    given.out.mkdir(parents=True, exist_ok=True)
    batches = Windows(train_ids, steps, given.batch, given.length, start=before.get("global_step", 0))
    start = time.perf_counter()
    trainer.fit(module, batches, ckpt_path=kept if before else None, **({"weights_only": False} if before else {}))
    seconds = time.perf_counter() - start
    parted = given.out / f"{given.variant}.seconds.json"
    sessions = [*(json.loads(parted.read_text()) if before else []), {"to": trainer.global_step, "seconds": seconds}]
    if pause.paused:
        parted.write_text(json.dumps(sessions))
        print(f"{given.variant}: paused at step {trainer.global_step} of {steps} after {seconds:.1f} s", flush=True)
        return False
    if trainer.global_step < steps:  # Lightning 2.2 returns from Ctrl-C as if all were done
        raise RuntimeError(
            f"{given.variant} stopped at step {trainer.global_step} of {steps}: run the same command again."
        )
    tokens = steps * given.batch * given.length
    record(given, given.variant, module, watched, {"variant": asdict(variant), "tokens": tokens, "sessions": sessions})
    for path in (kept, parted):  # so that the same command begins anew; not before all is written
        path.unlink(missing_ok=True)
    return True


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_parts(given: argparse.Namespace, *, more: bool = False) -> tuple[Tensor, Tensor]:
    """Return the ids to train on, with ``more.xz`` after the novels or without, and those held out, of the novels alone."""
    train_ids, held = parts(torch.from_numpy(read_tokens(given.data / "tokens.xz")).to(device_here()), given.stretch)
    if not more:
        return train_ids, held
    path = given.data / "more.xz"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} must be there for a variant with more text. Make it, on Debian 12, with "
            f"`python -m benchmarks.pretraining.more_text {given.data} --cache CACHE`."
        )
    return torch.cat([train_ids, torch.from_numpy(read_tokens(path)).to(device_here())]), held


def watch(
    given: argparse.Namespace,
    variant: Variant,
    name: str,
    *,
    looks: list[int],
    stages: list[int],
    held: Tensor | None = None,
) -> Watched:
    """Return what measures a run called ``name`` at some steps, and runs the tasks at others."""
    tokenizer = read_tokenizer(given.data, bos=variant.bos > 0)
    probes = json.loads((given.data / "probes.json").read_text())
    texts, views = probes["texts"][: given.probes], [view[: given.probes] for view in probes["views"]]
    look = TimedLook(
        texts, tokenizer, metrics=MEASURED, every_n_steps=looks, views=views, module="model.backbone",
        max_length=128, figures=False, dirpath=given.out / "history" / name, strict=True,
    )  # fmt: skip
    aside = Aside(looks, texts, views, tokenizer, sinks=0 if variant.blocks == "mamba2" else 32)
    evaluation = Evaluation(read_tasks(given.data / "tasks"), tokenizer, recipes=given.recipes)
    return Watched(look, aside, Stages(stages, evaluation, held))


def make_trainer(steps: int, callbacks: list[Any]) -> Any:
    gpu = device_here().type == "cuda"
    return pl.Trainer(
        max_steps=steps, max_epochs=1, precision="bf16-mixed" if gpu else "32-true", callbacks=callbacks, logger=False,
        devices=1, accelerator="gpu" if gpu else "cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def record(given: argparse.Namespace, name: str, module: Any, watched: Watched, about: dict[str, Any]) -> None:
    """Write the weights of a run that is done, all that was measured, and what is told ``about`` it."""
    look, aside, stage = watched
    torch.save(module.model.state_dict(), given.out / f"{name}.pt")
    losses = torch.stack([loss.cpu() for loss in module.losses]).float().tolist()
    told = {
        "command": given.command, **about, "steps": len(losses),
        "seconds": sum(one["seconds"] for one in about["sessions"]), "look_seconds": look.seconds,
        "aside_seconds": aside.seconds, "stage_seconds": stage.seconds,
        "device": torch.cuda.get_device_name() if device_here().type == "cuda" else "cpu",
        "block_parameters": block_parameters(module.model),
        "parameters": sum(p.numel() for p in module.model.parameters()),
        "held_out": stage.held_out, "losses": [round(loss, 4) for loss in losses],
    }  # fmt: skip
    (given.out / f"{name}.json").write_text(json.dumps(told))
    rows = [*look.history, *(row for one in (aside, stage) for some in one.rows.values() for row in some)]
    write(given.out / f"{name}.parquet", name, rows)
    print(
        f"{name}: {len(losses)} steps in {told['seconds']:.1f} s, of which measurements {look.seconds:.1f} and "
        f"{aside.seconds:.1f}, tasks {stage.seconds:.1f}; loss {losses[0]:.3f} to "
        f"{sum(losses[-20:]) / len(losses[-20:]):.3f}, held out {stage.held_out}",
        flush=True,
    )


def write(path: Path, model: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of the tidy frame, in single precision: nothing here is known to more digits."""
    columns = ("revision", "layer", "depth", "kind", "dataset", "name", "value")
    frame = polars.DataFrame([{"model": model} | {name: row[name] for name in columns} for row in rows])
    frame.with_columns(
        polars.col("value", "depth").cast(polars.Float32), polars.col("layer").cast(polars.Int16)
    ).write_parquet(path, compression="zstd", compression_level=15)


def count(word: str) -> int:
    """Return a number of one or more that was given as a word."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, but got {number}")
    return number


def shared_arguments(description: str | None, names: Iterable[str], variant: str) -> argparse.ArgumentParser:
    """Return the arguments of every run, one of ``names`` the variant."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--variant", choices=list(names), default=variant)
    parser.add_argument("--batch", type=count, default=256)
    parser.add_argument("--probes", type=count, default=200, help="texts to measure, 11 or more")
    parser.add_argument("--recipes", nargs="+", choices=ASKED, default=ASKED, help="how the tasks' texts are asked")
    parser.add_argument(
        "--stretch", type=count, help="tokens in a stretch; every hundredth is held out, DATA's own by default"
    )
    parser.add_argument("--threads", type=count, default=1, help="16 made a measurement five times as long as 1 did")
    parser.add_argument("--compile", action="store_true")
    return parser


def arguments() -> argparse.ArgumentParser:
    parser = shared_arguments(__doc__, VARIANTS, "base")
    parser.add_argument("--steps", type=count, default=None, help="the variant's own by default")
    parser.add_argument("--blocks", type=count, default=12)
    parser.add_argument("--width", type=count, default=512)
    parser.add_argument("--length", type=count, default=256)
    parser.add_argument("--brief", action="store_true", help="measure and score less often")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which to pause")
    return parser


def begin(parser: argparse.ArgumentParser, module: str, words: list[str] | None) -> argparse.Namespace:
    """Return what was asked for, the command among it, with Lightning quiet and the threads set."""
    given = parser.parse_args(words)
    for name in ("tokenizer.json", "tokens.xz", "probes.json", "tasks"):
        if not (given.data / name).exists():
            raise FileNotFoundError(
                f"{given.data / name} is not there: `python -m benchmarks.pretraining.corpus {given.data}` makes it."
            )
    # The texts to measure were taken from the part that DATA's own stretches hold out.
    given.stretch = given.stretch or json.loads((given.data / "probes.json").read_text()).get("stretch", STRETCH)
    given.command = f"python -m {module} DATA OUT " + " ".join((sys.argv[1:] if words is None else words)[2:])
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    torch.set_num_threads(given.threads)
    return given


def main(words: list[str] | None = None) -> None:
    train(begin(arguments(), "benchmarks.pretraining.run", words))


if __name__ == "__main__":
    main()
