"""One measurement: fixed inputs passed through a model as it is now, every metric of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from midlayer_encoders.callbacks._backbone import find_backbone, model_name, module_path
from midlayer_encoders.callbacks._inputs import Batch, label_numbers, make_batches
from midlayer_encoders.callbacks._settings import Settings
from midlayer_encoders.callbacks._undisturbed import undisturbed
from midlayer_encoders.errors import MidlayerError, NotFiniteError
from midlayer_encoders.measuring import compute_metrics, token_receiver, update_views
from midlayer_encoders.metrics import LayerMetric
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy, resolve_layers
from midlayer_encoders.models.transformers_internals import without_cache
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.selection.ridge import ridge_correct
from midlayer_encoders.spectra import without_kernels

__all__ = ["LABEL_ACCURACY", "Measurement", "OtherProcessError", "Values", "make_measurement"]

Values = dict[str, dict[int, float]]
"""By metric, the value of each layer; NaN where a layer can have none."""

LABEL_ACCURACY = "label_accuracy"
"""Name of the cross-validated accuracy of a ridge classifier on a layer's vectors."""


_FEW = 2**29
"""Sum of the cubes of the texts' tokens, over layers, up to which spectra are found on the CPU: some 0.1 s of a core.

The kernels for a GPU would take longer to compile, on a machine's first run, than hundreds of steps of a small model.
"""


class OtherProcessError(MidlayerError, RuntimeError):
    """The measurement failed in another process of a distributed run."""


@dataclass(frozen=True)
class Measurement:
    """Inputs that stay the same, and what to measure of them.

    Attributes:
        settings: of the callback.
        model: what the frame calls the transformer.
        module: path of the transformer in what is trained.
        anatomy: of the transformer.
        layers: which layers, ascending.
        batches: of the inputs and of each view.
        count: number N of inputs.
        labels: class of each input, shape ``(N,)``, ``None`` where there are none.
    """

    settings: Settings
    model: str
    module: str
    anatomy: Anatomy
    layers: Sequence[int]
    batches: list[Batch]
    count: int
    labels: Tensor | None
    _metrics: dict[str, LayerMetric] = field(default_factory=dict, init=False, repr=False)

    def measure(self, root: nn.Module, autocast: AbstractContextManager[object]) -> Values:
        """Return every metric of every layer as the model is now, and leave it as it was.

        In a distributed run every process must call it: each passes its share of the batches, all get the same values.

        Args:
            root: what is trained.
            autocast: what the run's own forward passes run under.
        """
        model = find_backbone(root, self.settings.module)
        device = next(model.parameters()).device
        # The inputs are made already, so there is nothing to preprocess.
        reader = LayerReader(model, dict, self.anatomy, self.layers, self.settings.norm, self.settings.pooling)
        labeled: dict[int, Tensor] = {}
        with undisturbed(model), self._empty_metrics(device) as metrics:
            tokens = token_receiver(metrics, texts=self.count)
            with _together(device), autocast, self._few_spectra():
                for batch in _share(self.batches):
                    inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
                    vectors = reader.read(without_cache(model, inputs), batch.positions, tokens=tokens)
                    update_views(metrics, self.layers, vectors, batch.positions, self.count)
                    if self.labels is not None:
                        own = [position for position in batch.positions if position < self.count]
                        labeled.update(zip(own, torch.stack(vectors, dim=1), strict=False))
            with self._few_spectra():
                values = compute_metrics(metrics)
        if self.labels is not None:
            values[LABEL_ACCURACY] = self._label_accuracy(labeled, self.labels)
        return values

    def _few_spectra(self) -> AbstractContextManager[None]:
        """Leave out the kernels of a GPU where the texts are few and short."""
        longest = max(
            (ids.shape[1] for batch in self.batches if (ids := batch.inputs.get("input_ids")) is not None), default=0
        )
        few = 0 < self.count * len(self.layers) * longest**3 <= _FEW
        return without_kernels() if few else nullcontext()

    @contextmanager
    def _empty_metrics(self, device: torch.device) -> Iterator[dict[str, LayerMetric]]:
        """Have the metrics with nothing in them: made once, since that takes as long as a small model's pass."""
        if not self._metrics:
            self._metrics.update(self.settings.make_metrics(self.layers))
        for metric in self._metrics.values():
            if metric.device != device:  # moving all states takes as long where they are there already
                metric.to(device)
        try:
            yield self._metrics
        finally:
            for metric in self._metrics.values():
                metric.reset()

    def _label_accuracy(self, vectors: dict[int, Tensor], labels: Tensor) -> dict[int, float]:
        """Return the accuracy of each layer; the vectors, ``(L, D)`` by position, are gathered from all processes."""
        if _world() > 1:
            everyone: list[dict[int, Tensor]] = [{} for _ in range(_world())]
            dist.all_gather_object(everyone, {place: vector.cpu() for place, vector in vectors.items()})
            vectors = {place: vector for part in everyone for place, vector in part.items()}
        stacked = torch.stack([vectors[place] for place in sorted(vectors)], dim=1).cpu()
        if not bool(stacked.isfinite().all()):
            layer = self.layers[int((~stacked.isfinite().flatten(1).all(dim=1)).nonzero()[0])]
            raise NotFiniteError(f"Layer {layer} gives NaN or infinity for the callback's inputs.")
        accuracy = ridge_correct(stacked, labels, seed=self.settings.seed).double().mean(dim=1)
        return dict(zip(self.layers, accuracy.tolist(), strict=True))


def make_measurement(settings: Settings, root: nn.Module, tokenizer: Any = None) -> Measurement:
    """Find the transformer in what is trained, make the inputs once, and refuse what cannot work.

    Args:
        settings: of the callback.
        root: what is trained.
        tokenizer: the trainer's own, used where the settings have none.
    """
    model = find_backbone(root, settings.module)
    anatomy = find_anatomy(model, blocks=settings.blocks)
    name = model_name(model)
    layers = resolve_layers(settings.layers, anatomy.num_layers, name=name)
    batches, count = make_batches(settings, model, tokenizer)
    labels = None if settings.labels is None else label_numbers(settings.labels, count)
    return Measurement(settings, name, module_path(root, model), anatomy, layers, batches, count, labels)


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _share(batches: list[Batch]) -> list[Batch]:
    """Return the batches of this process."""
    return batches[dist.get_rank() :: _world()] if _world() > 1 else batches


@contextmanager
def _together(device: torch.device) -> Iterator[None]:
    """On the way out, make every process fail where one did: the others would wait for it forever."""
    failed = True
    try:
        yield
        failed = False
    finally:
        anywhere = _in_any_process(failed, device)
    if anywhere:
        raise OtherProcessError("The measurement failed in another process; its log has the trace.")


def _in_any_process(failed: bool, device: torch.device) -> bool:
    if _world() == 1:
        return failed
    flag = torch.tensor(int(failed), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
