"""A measurement: run fixed inputs through a model in training and compute every metric of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.errors import MidlayerError, NotFiniteError
from midlayer_encoders.measuring import compute_metrics, token_receiver, update_views
from midlayer_encoders.metrics import LayerMetric
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy, resolve_layers
from midlayer_encoders.models.transformers_internals import without_cache
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.selection.ridge import ridge_correct
from midlayer_encoders.spectra import without_kernels

from ._inputs import InputBatch, class_indices, find_backbone, make_batches, model_name, module_path
from ._settings import CallbackSettings

MetricValues = dict[str, dict[int, float]]
"""The value of each layer by metric; NaN if a layer has none."""

LABEL_ACCURACY = "label_accuracy"
"""Name of the cross-validated accuracy of a ridge classifier on a layer's vectors."""

_MAX_CPU_SPECTRA = 2**29
"""Up to this sum over layers of cubed text lengths, the CPU computes the spectra, in about 0.1 s.

On a machine's first run, compiling the GPU kernels takes longer than hundreds of steps of a small model.
"""


class OtherProcessError(MidlayerError, RuntimeError):
    """The measurement failed in another process of a distributed run."""


@dataclass(frozen=True)
class Measurement:
    """Fixed inputs and the metrics to compute on them.

    Attributes:
        settings: options of the callback.
        model: name of the transformer in the frame.
        module: path of the transformer in the trained module.
        anatomy: anatomy of the transformer.
        layers: ascending layer numbers.
        batches: batches of the inputs and of each view.
        count: number N of inputs.
        labels: class of each input, shape ``(N,)``, or ``None``.
    """

    settings: CallbackSettings
    model: str
    module: str
    anatomy: Anatomy
    layers: Sequence[int]
    batches: list[InputBatch]
    count: int
    labels: Tensor | None
    _metrics: dict[str, LayerMetric] = field(default_factory=dict, init=False, repr=False)

    def measure(self, root: nn.Module, autocast: AbstractContextManager[object]) -> MetricValues:
        """Return every metric of every layer, and leave the model unchanged.

        In a distributed run all processes must call this method. Each process runs a share of the batches, and all of
        them return the same values.

        Args:
            root: the trained module.
            autocast: the context of the run's own forward passes.
        """
        model = find_backbone(root, self.settings.module)
        device = next(model.parameters()).device
        # The inputs are already tokenized, so `dict` replaces the preprocessing.
        reader = LayerReader(model, dict, self.anatomy, self.layers, self.settings.norm, self.settings.pooling)
        vectors_by_position: dict[int, Tensor] = {}
        with undisturbed(model), self._empty_metrics(device) as metrics:
            tokens = token_receiver(metrics, texts=self.count)
            with _fail_together(device), autocast, self._spectra_device():
                for batch in _process_share(self.batches):
                    inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
                    vectors = reader.read(without_cache(model, inputs), batch.positions, tokens=tokens)
                    update_views(metrics, self.layers, vectors, batch.positions, self.count)
                    if self.labels is not None:
                        inputs_only = [position for position in batch.positions if position < self.count]
                        vectors_by_position.update(zip(inputs_only, torch.stack(vectors, dim=1), strict=False))
            with self._spectra_device():
                values = compute_metrics(metrics)
        if self.labels is not None:
            values[LABEL_ACCURACY] = self._label_accuracy(vectors_by_position, self.labels)
        return values

    def _spectra_device(self) -> AbstractContextManager[None]:
        """Return a context that bypasses the GPU kernels if the texts are few and short."""
        longest = max(
            (ids.shape[1] for batch in self.batches if (ids := batch.inputs.get("input_ids")) is not None), default=0
        )
        use_cpu = 0 < self.count * len(self.layers) * longest**3 <= _MAX_CPU_SPECTRA
        return without_kernels() if use_cpu else nullcontext()

    @contextmanager
    def _empty_metrics(self, device: torch.device) -> Iterator[dict[str, LayerMetric]]:
        """Yield empty metrics; they are created once because that takes as long as a forward pass of a small model."""
        if not self._metrics:
            self._metrics.update(self.settings.make_metrics(self.layers))
        for metric in self._metrics.values():
            if metric.device != device:  # `to` is slow even if the states are already there
                metric.to(device)
        try:
            yield self._metrics
        finally:
            for metric in self._metrics.values():
                metric.reset()

    def _label_accuracy(self, vectors: dict[int, Tensor], labels: Tensor) -> dict[int, float]:
        """Return the accuracy of each layer from the vectors, shape ``(L, D)`` by position, of all processes."""
        if _num_processes() > 1:
            gathered: list[dict[int, Tensor]] = [{} for _ in range(_num_processes())]
            dist.all_gather_object(gathered, {position: vector.cpu() for position, vector in vectors.items()})
            vectors = {position: vector for part in gathered for position, vector in part.items()}
        stacked = torch.stack([vectors[position] for position in sorted(vectors)], dim=1).cpu()
        if not bool(stacked.isfinite().all()):
            layer = self.layers[int((~stacked.isfinite().flatten(1).all(dim=1)).nonzero()[0])]
            raise NotFiniteError(f"Layer {layer} gives NaN or infinity for the callback's inputs.")
        accuracy = ridge_correct(stacked, labels, seed=self.settings.seed).double().mean(dim=1)
        return dict(zip(self.layers, accuracy.tolist(), strict=True))


def make_measurement(settings: CallbackSettings, root: nn.Module, tokenizer: Any = None) -> Measurement:
    """Find the transformer in the trained module, prepare the inputs, and validate both.

    Args:
        settings: options of the callback.
        root: the trained module.
        tokenizer: the trainer's tokenizer, used if the settings have none.
    """
    model = find_backbone(root, settings.module)
    anatomy = find_anatomy(model, blocks=settings.blocks)
    name = model_name(model)
    layers = resolve_layers(settings.layers, anatomy.num_layers, name=name)
    batches, count = make_batches(settings, model, tokenizer)
    labels = None if settings.labels is None else class_indices(settings.labels, count)
    return Measurement(settings, name, module_path(root, model), anatomy, layers, batches, count, labels)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run ``model`` in eval mode without gradients or compilation, then restore its state.

    Restored are the mode of each module (some may be frozen in eval mode), buffers that a module updates or replaces
    during a forward pass (such as growing rotary tables), and the global random generators. This uses ``no_grad``
    rather than ``inference_mode`` because training may use a tensor that a module caches here.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with isolated_random(), torch.no_grad(), _eager():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled modules eagerly so that other input shapes do not trigger recompilation."""
    if torch.compiler.is_compiling() or not hasattr(torch.compiler, "set_stance"):  # torch before 2.6
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _process_share(batches: list[InputBatch]) -> list[InputBatch]:
    """Return the batches of this process."""
    return batches[dist.get_rank() :: _num_processes()] if _num_processes() > 1 else batches


@contextmanager
def _fail_together(device: torch.device) -> Iterator[None]:
    """Raise in every process if one fails; the others would wait for it forever."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if _num_processes() > 1:
            flag = torch.tensor(int(failed), device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            failed = bool(flag)
    if failed:
        raise OtherProcessError("The measurement failed in another process; its log has the trace.")
