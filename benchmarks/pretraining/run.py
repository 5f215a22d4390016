"""Train the three models with the callback attached, then fine-tune the causal one twice; everything measured is written.

``python -m benchmarks.pretraining.run DATA OUT`` with the folder that ``corpus.py`` made. ``--objective causal`` for one model,
``--steps 20 --blocks 2 --width 64 --batch 4`` for a try on a CPU. Writes one CSV of tidy rows for each run, and ``runs.json``:
losses and seconds. ``docs/training.md`` tells what came out on an H200.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.pretraining.corpus import STRETCH, Windows, parts, read_tokenizer, read_tokens
from benchmarks.pretraining.finetuning import Contrastive, SameLabel, SamePassages, labelled_texts
from benchmarks.pretraining.models import OBJECTIVES, LanguageModel, Size, block_parameters, language_model, sees_ahead
from benchmarks.pretraining.module import Pretraining, pl
from benchmarks.pretraining.tasks import Evaluation, read_tasks
from benchmarks.pretraining.watching import METRICS, Stages, TimedLook, looks, stages

HELD = 512  # windows of the held-out loss


class Record:
    """The data, what is common to all runs, and what they gave."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.size = Size(given.blocks, given.width, length=given.length)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = read_tokenizer(given.data)
        tokens = torch.from_numpy(read_tokens(given.data / "tokens.xz")).to(self.device)
        self.train, held = parts(tokens, given.stretch)
        self.held = next(iter(Windows(held, 1, min(HELD, len(held) // given.length - 1), given.length)))
        self.probes = json.loads((given.data / "probes.json").read_text())
        self.evaluation = Evaluation(read_tasks(given.data / "tasks"), self.tokenizer)
        self.runs: dict[str, dict[str, Any]] = {}

    def pretrain(self, objective: str) -> LanguageModel:
        """Train one model from its first step, and return it."""
        model, steps = language_model(objective, self.size, seed=self.given.seed), self.given.steps
        if sees_ahead(model.backbone.eval(), self.size.vocab) != (objective == "masked"):
            raise RuntimeError(f"The {objective} model must {'' if objective == 'masked' else 'not '}see ahead.")
        model.train()
        module = Pretraining(model, objective, steps=steps, seed=self.given.seed, compiled=self.given.compile)
        batches = Windows(self.train, steps, self.given.batch, self.given.length, self.given.seed)
        self._fit(objective, module, batches, looks(steps), Stages(stages(steps), self.evaluation, self.held))
        return model

    def fine_tune(self, model: LanguageModel, name: str) -> None:
        """Fine-tune a copy of a causal model, with dropout, by pairs of one kind."""
        steps = self.given.finetune_steps
        tuned = language_model("causal", self.size, dropout=0.1)
        tuned.load_state_dict(model.state_dict())
        if name == "simcse":
            batches: Any = SamePassages(self.train, steps, self.given.batch)
        else:
            labelled = labelled_texts(self.given.data / "tasks" / "Banking77Classification", self.tokenizer)
            batches = SameLabel(*labelled, steps, self.device)
        self._fit(name, Contrastive(tuned, steps=steps), batches, stages(steps), Stages([0, steps], self.evaluation))

    def _fit(self, name: str, module: Any, batches: Any, when: list[int], stage: Stages) -> None:
        steps = when[-1]
        look = TimedLook(
            self.probes["texts"], self.tokenizer, metrics=METRICS, every_n_steps=when, views=self.probes["views"],
            module="model.backbone", figures=False, dirpath=self.given.out / "history" / name,
        )  # fmt: skip
        watching = [stage] if self.given.no_callback else [look, stage]
        trainer = pl.Trainer(
            max_steps=steps, max_epochs=1, precision="bf16-mixed", callbacks=watching, logger=False, devices=1,
            accelerator="gpu" if self.device.type == "cuda" else "cpu", enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        start = time.perf_counter()
        trainer.fit(module, batches)
        seconds = time.perf_counter() - start
        if not self.given.no_callback and len({row["revision"] for row in look.history}) < len(when):
            print(f"{name}: the measurement failed at some steps", flush=True)  # its trace is in the log
        losses = torch.stack(module.losses).float().cpu().tolist()
        self.runs[name] = {
            "steps": steps, "seconds": seconds, "look_seconds": look.seconds, "stage_seconds": stage.seconds,
            "block_parameters": block_parameters(module.model),
            "parameters": sum(p.numel() for p in module.model.parameters()),
            "held_out": stage.held_out, "losses": [round(loss, 4) for loss in losses],
        }  # fmt: skip
        self._write(name, [*look.history, *stage.rows()])
        print(
            f"{name}: {steps} steps in {seconds:.1f} s, of which measurements {look.seconds:.1f}, tasks {stage.seconds:.1f}; "
            f"loss {losses[0]:.3f} to {sum(losses[-20:]) / len(losses[-20:]):.3f}, held out {stage.held_out}",
            flush=True,
        )

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.given.out.mkdir(parents=True, exist_ok=True)
        with (self.given.out / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row | {"model": name, "value": f"{row['value']:.6g}"} for row in rows)
        (self.given.out / "runs.json").write_text(json.dumps(self.runs))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--objective", nargs="+", choices=[*OBJECTIVES, "all"], default=["all"])
    parser.add_argument("--steps", type=int, default=2048)
    parser.add_argument("--finetune-steps", type=int, default=256, help="0 for none")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--stretch", type=int, default=STRETCH, help="tokens in a stretch; every hundredth is held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="16 made a measurement five times as long as 1 did")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-callback", action="store_true")
    return parser


def main(words: list[str] | None = None) -> None:
    given = arguments().parse_args(words)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    torch.set_num_threads(given.threads)
    record = Record(given)
    for objective in OBJECTIVES if "all" in given.objective else given.objective:
        model = record.pretrain(objective)
        if objective == "causal" and given.finetune_steps:
            for name in ("simcse", "supervised"):
                record.fine_tune(model, name)


if __name__ == "__main__":
    main()
