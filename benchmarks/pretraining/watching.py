"""What measures a model while it trains: the package's callback, what it leaves aside, the tasks with the held-out loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.pretraining.findings import valley
from benchmarks.pretraining.models import evaluating, pl
from benchmarks.pretraining.tasks import Evaluation, padded
from midlayer_encoders._types import Norm
from midlayer_encoders.callbacks import LayerMetricsCallback
from midlayer_encoders.metrics import METRICS, LayerMetric, PromptEntropy, make_metrics
from midlayer_encoders.metrics.feeding import compute_metrics, token_receiver, update_views
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.reading.capture import final_norm
from midlayer_encoders.reading.pooling import pool
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.recipes import PLAIN

BATCH_TOKENS = 65_536  # of a measurement
# The effective rank takes five times as long as all others together, and says what the prompt entropy says. Alignment
# reads shortened copies of the texts, which the record does not have.
MEASURED = tuple(name for name in METRICS if name not in ("prompt_effective_rank", "alignment"))
KINDS: dict[str, tuple[Norm, int]] = {
    "probe": ("none", 0), "probe-later": ("none", 1), "probe-normed": ("final", 0), "probe-normed-later": ("final", 1)
}  # fmt: skip
"""What the frame calls the texts read with a norm, and without so many tokens at their beginning."""


BRIEF = (0, 64, 256, 362, 512, 724, 1024, 1448), (512, 1024)  # when a brief run is measured, and when the tasks are run


def looks(steps: int, *, brief: bool = False) -> list[int]:
    """Return the steps to measure at: doubling, four in each doubling from 8M tokens to 100M, then every 256.

    A ``brief`` run of 131M tokens is measured nine times, a longer one every 67M tokens more.

    Example:
        >>> looks(200)
        [0, 1, 2, 4, 8, 16, 32, 64, 128, 152, 181, 200]
    """
    if brief:
        return sorted({step for step in BRIEF[0] if step < steps} | {*range(2048, steps, 1024), steps})
    few = {0} | {2**k for k in range(8)}
    dense = {round(128 * 2 ** (k / 4)) for k in range(15)}
    later = range(1536, min(steps, 2048), 256), range(2048, steps, 512)
    return sorted(step for step in few | dense | set(later[0]) | set(later[1]) | {steps} if step <= steps)


def stages(steps: int, *, brief: bool = False) -> list[int]:
    """Return when to run the tasks, eight times in a run of 131M tokens, brief three: all of them steps to measure at."""
    if brief:
        return sorted({step for step in BRIEF[1] if step < steps} | {*range(2048, steps, 2048), steps})
    return sorted(
        step for step in {0, 128, 256, 512, 724, 1024, 1448, steps, *range(4096, steps, 2048)} if step <= steps
    )


def sink_rate(attentions: Tensor, mask: Tensor) -> float:
    """Return the share of heads whose mean attention to the first token exceeds 0.3, averaged over texts.

    The sink rate of Gu et al. (2025), of one layer.

    Args:
        attentions: attention weights, shape ``(B, H, T, T)``.
        mask: real tokens, shape ``(B, T)``, padded on the right.
    """
    to_first = torch.where(mask[:, None], attentions[..., 0], 0.0).sum(dim=-1) / mask.sum(dim=-1, keepdim=True)
    return float((to_first > 0.3).double().mean())


class _AtSteps(pl.Callback):
    """Does something at some steps, once each, and keeps the rows it gave."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = set(steps)
        self.rows: dict[int, list[dict[str, Any]]] = {}

    def look(self, trainer: Any, pl_module: Any) -> list[dict[str, Any]]:
        raise NotImplementedError

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._visit(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._visit(trainer, pl_module)

    def _visit(self, trainer: Any, pl_module: Any) -> None:
        step = trainer.global_step
        if step in self.steps and step not in self.rows:
            self.rows[step] = [{"revision": f"step{step}", **row} for row in self.look(trainer, pl_module)]


class Aside(_AtSteps):
    """Measures what the package's callback does not: without the first token, after the final norm, sinks, large states.

    Args:
        steps: at which.
        texts: to measure, and their views.
        tokenizer: of both.
        sinks: how many texts the attention weights are read for.
    """

    def __init__(
        self, steps: Sequence[int], texts: list[str], views: list[list[str]], tokenizer: Any, *, sinks: int = 32
    ) -> None:
        super().__init__(steps)
        every = [*texts, *(text for view in views for text in view)]
        self.ids = tokenizer(every, truncation=True, max_length=128)["input_ids"]
        self.count, self.views, self.sinks = len(texts), len(views), sinks
        self._made: dict[str, dict[str, LayerMetric]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # transformers hooks the blocks when it is first asked for attention, and leaves the hooks there. A block that is
        # compiled with them rounds otherwise than one without, so it is asked before the first step.
        with evaluating(pl_module.model.backbone) as backbone:
            self._sink_rates(backbone, 1)
        super().on_train_start(trainer, pl_module)

    def look(self, trainer: Any, pl_module: Any) -> list[dict[str, Any]]:
        with evaluating(pl_module.model.backbone) as backbone:
            with trainer.precision_plugin.forward_context():
                found = self._metrics(backbone)
            found["probe"]["attention_sink_rate"] = self._sink_rates(backbone, self.sinks)
            found["probe"].update(self._largest(backbone))
        last = find_anatomy(backbone).num_layers
        return [
            {"layer": layer, "depth": layer / last, "kind": "metric", "dataset": dataset, "name": name, "value": value}
            for dataset, metrics in found.items()
            for name, values in metrics.items()
            for layer, value in values.items()
        ]

    def _metrics(self, backbone: Any) -> dict[str, dict[str, dict[int, float]]]:
        """Return by kind each metric's values over the layers, all from one pass over texts and views."""
        anatomy, device = find_anatomy(backbone), next(backbone.parameters()).device
        layers = range(anatomy.num_layers + 1)
        if not self._made:
            self._made = {kind: self._make(kind, layers, device) for kind in KINDS}
        normed = final_norm(backbone, anatomy, "final")
        vectors: dict[str, list[Tensor]] = {}

        def tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
            both = {"none": states, "final": normed(states)}
            for kind, (norm, skip) in KINDS.items():
                some, real = both[norm][:, skip:], mask[:, skip:]
                vectors.setdefault(kind, []).append(pool(some, real))
                if (receive := token_receiver(self._made[kind], self.count)) is not None:
                    receive(layer, some, real, positions)

        reader = LayerReader(backbone, dict, anatomy, layers)
        for batch in plan_batches(list(map(len, self.ids)), token_budget=BATCH_TOKENS):
            positions = sorted(batch)
            vectors.clear()
            inputs = padded([self.ids[position] for position in positions], device)
            reader.read({**inputs, "use_cache": False}, positions, tokens=tokens)
            for kind, metrics in self._made.items():
                update_views(metrics, layers, vectors[kind], positions, self.count)
        found = {kind: compute_metrics(metrics, named=False) for kind, metrics in self._made.items()}
        for metrics in self._made.values():
            for metric in metrics.values():
                metric.reset()
        return found

    def _make(self, kind: str, layers: range, device: torch.device) -> dict[str, LayerMetric]:
        # The callback has the paper's way of everything; here is the rest, and an entropy that long states weigh in.
        wanted = {} if kind == "probe" else make_metrics(MEASURED, layers, views=self.views)
        wanted["prompt_entropy_raw"] = PromptEntropy(layers, center=False, unit=False)
        return {
            name: metric.to(device)
            for name, metric in wanted.items()
            if name != "first_token_share" or kind == "probe-normed"
        }

    def _sink_rates(self, backbone: Any, texts: int) -> dict[int, float]:
        device, usual = next(backbone.parameters()).device, backbone.config._attn_implementation
        backbone.set_attn_implementation("eager")
        inputs = {**padded(self.ids[:texts], device), "use_cache": False}
        with torch.no_grad():
            attentions = backbone(**inputs, output_attentions=True).attentions
        backbone.set_attn_implementation(usual)
        rates = (sink_rate(weights, inputs["attention_mask"].bool()) for weights in attentions)
        return dict(enumerate(rates, start=1))

    def _largest(self, backbone: Any) -> dict[str, dict[int, float]]:
        """Return the largest absolute value of any raw state of a layer, and its token and dimension."""
        anatomy, device = find_anatomy(backbone), next(backbone.parameters()).device
        layers = range(anatomy.num_layers + 1)
        found: dict[str, dict[int, float]] = {"largest_state": {}, "largest_token": {}, "largest_dimension": {}}

        def tokens(layer: int, states: Tensor, mask: Tensor, _: list[int]) -> None:
            size = states.float().abs() * mask[..., None]
            place = int(size.argmax())
            found["largest_state"][layer] = float(size.flatten()[place])
            found["largest_token"][layer] = place // size.shape[2] % size.shape[1]
            found["largest_dimension"][layer] = place % size.shape[2]

        positions = list(range(min(64, self.count)))
        inputs = {**padded([self.ids[position] for position in positions], device), "use_cache": False}
        LayerReader(backbone, dict, anatomy, layers).read(inputs, positions, tokens=tokens)
        return found


class Stages(_AtSteps):
    """Runs the tasks and the held-out loss at some steps.

    Args:
        steps: at which.
        evaluation: of every layer.
        held: windows that were not trained on.
    """

    def __init__(self, steps: Sequence[int], evaluation: Evaluation, held: Tensor) -> None:
        super().__init__(steps)
        self.evaluation, self.held = evaluation, held
        self.held_out: dict[int, float] = {}

    def look(self, trainer: Any, pl_module: Any) -> list[dict[str, Any]]:
        scores = self.evaluation(pl_module.model.backbone)
        with trainer.precision_plugin.forward_context():
            self.held_out[trainer.global_step] = pl_module.held_out_loss(self.held)
        return [
            {
                "layer": layer,
                "depth": layer / (len(values) - 1),
                "kind": "score",
                "dataset": task if recipe == PLAIN else f"{task} {recipe}",
                "name": name,
                "value": value,
            }
            for (recipe, task), (name, values) in scores.items()
            for layer, value in enumerate(values)
        ]


class Progress(_AtSteps):
    """Prints a line at each measurement: how far the run is, its loss, the first token and the valley.

    Args:
        steps: at which.
        look: what measured the first token.
        aside: what measured the entropy of raw states.
        tokens: of a step.
    """

    def __init__(self, steps: Sequence[int], look: LayerMetricsCallback, aside: Aside, tokens: int) -> None:
        super().__init__(steps)
        self.measured, self.aside, self.tokens = look, aside, tokens

    def look(self, trainer: Any, pl_module: Any) -> list[dict[str, Any]]:
        step = trainer.global_step
        loss = f"loss {float(pl_module.losses[-1]):.3f}, " if pl_module.losses else ""
        share = _of(self.measured.history, step, "first_token_share")
        entropy = _of(self.aside.rows[step], step, "prompt_entropy_raw")
        layer = max(share, key=share.__getitem__)
        found = valley([entropy[one] for one in sorted(entropy)])
        words = f"valley {found.depth:.2f} nats at layer {found.layer}" if found.depth > 0 else "no valley"
        print(
            f"step {step} of {trainer.max_steps}, {step * self.tokens / 1e6:.0f}M tokens: {loss}first token's share "
            f"{share[layer]:.2f} at layer {layer}, {words}",
            flush=True,
        )
        return []


def _of(rows: Iterable[dict[str, Any]], step: int, name: str) -> dict[int, float]:
    """Return a metric of all texts' raw states by layer."""
    wanted = (f"step{step}", name, "probe")
    return {row["layer"]: row["value"] for row in rows if (row["revision"], row["name"], row["dataset"]) == wanted}
