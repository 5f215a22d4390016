"""Base classes of metrics that compare texts: all of them, or a capped sample that every process draws alike."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import _layer_metric as base
from midlayer_encoders.metrics._layer_metric import Kind, LayerMetric
from midlayer_encoders.validation import check_count


class SampleMetric(LayerMetric):
    """A number that depends on the distances between texts.

    Stores the vectors of at most ``max_samples`` texts per layer (up to twice as many between updates): those whose
    position in the whole list has the smallest seeded hash. So every order, batch split and sharding gives the same
    sample and bitwise the same value. A repeated text counts once. Most such values depend on the number of texts:
    compare only values of equal ``num_samples``.

    A subclass passes ``number``, which computes the numbers of samples, shape ``(*)``, from the vectors of each view,
    ``(*, N, D)`` float64, and the options.

    Args:
        layers: as in :class:`LayerMetric`.
        max_samples: largest number of texts stored, 2 or more.
        seed: seed of the sample if there are more texts.
        options: as in :class:`LayerMetric`.

    Attributes:
        num_samples: texts that the last ``compute`` used; ``None`` before.
        views: number of views of each text.
        least: smallest number of texts that has a value.
        counted: description of the texts that count.
    """

    views: int = 1
    least: int = 2
    counted: ClassVar[str] = "Different texts"

    def __init__(self, layers: Sequence[int], *, max_samples: int = 1000, seed: int = 0, **options: Any) -> None:
        if "seed" in self._option_defaults:
            options["seed"] = seed
        super().__init__(layers, **options)
        self._number_of_views = partial(self._number, **self.options)
        self.max_samples = check_count("max_samples", max_samples, minimum=2)
        self.seed = seed
        self.num_samples: int | None = None
        self._num_texts: Counter[int] = Counter()
        for layer in self.layers:
            for name in ("rows", "keys"):
                self.add_state(f"{name}_{layer}", [], dist_reduce_fx="cat")

    def _numbered(self, layer: int, count: int, index: Tensor | None) -> Tensor:
        """Return the index, or if there is none, number the texts of a layer in order of arrival."""
        if index is not None:
            return index
        if base.is_distributed():
            raise OptionError("`index` must be given when several processes share the texts, but got None.")
        self._position(layer)
        self._num_texts[layer] += count
        return torch.arange(self._num_texts[layer] - count, self._num_texts[layer])

    def reset(self) -> None:
        """Remove all texts."""
        super().reset()
        self._num_texts = Counter()

    def _store(self, layer: int, embeddings: Tensor, index: Tensor, view: int | Tensor) -> None:
        base.check_embeddings(embeddings, index)
        self._position(layer)
        rows, keys = getattr(self, f"rows_{layer}"), getattr(self, f"keys_{layer}")
        rows.append(base.copy_if_view(embeddings))
        # The index usually is on the CPU, where choosing the sample does not wait for a GPU.
        keys.append(index.to(torch.int64) * self.views + view)
        if sum(map(len, keys)) > 2 * self.max_samples * self.views:
            sample = self._sample(torch.cat(keys))
            for state in (rows, keys):
                state[:] = [torch.cat(state)[sample.to(state[0].device)]]

    def _sample(self, keys: Tensor) -> Tensor:
        """Return the rows of the sample, sorted by view and then index, each once."""
        keys, order = torch.sort(keys.cpu(), stable=True)
        hashes = hash_index(keys // self.views, self.seed)
        largest = torch.unique(hashes)[: self.max_samples][-1:]
        kept = hashes <= largest
        kept[1:] &= keys[1:] != keys[:-1]
        return order[kept][torch.argsort(keys[kept] % self.views, stable=True)]

    def _values(self) -> Tensor:
        samples = [sample for sample, _ in self._samples()]
        views, texts, _ = samples[0].shape
        return base.one_device(
            base.in_stacks(samples, self._number_of_stack, temporaries=self._temporaries(views, texts))
        )

    def _number_of_stack(self, samples: Tensor) -> Tensor:
        """Return the numbers of several layers, shape ``(L,)``, from their samples, ``(L, V, N, D)``."""
        samples = samples.double()
        finite = torch.isfinite(samples.flatten(1).sum(dim=1))  # without waiting for a GPU
        return torch.where(finite, self._number_of_views(*samples.unbind(dim=1)), torch.nan)

    def _temporaries(self, views: int, texts: int) -> int:
        """Return how many temporary numbers one layer needs: the similarities of all texts and views."""
        return views * texts * views * texts

    def _samples(self) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's sample ``(V, N, D)`` and the index of each text, ascending, ``(N,)``.

        Layers usually have the same texts, so that the sample is chosen once.
        """
        samples: list[tuple[Tensor, Tensor]] = []
        previous: Tensor | None = None
        for layer in self.layers:
            rows, keys = (
                base.concat_state(getattr(self, f"rows_{layer}")),
                base.concat_state(getattr(self, f"keys_{layer}")).cpu(),
            )
            if previous is None or not torch.equal(keys, previous):
                previous = keys
                sample = self._sample(keys)
                texts = self._checked_texts(layer, keys[sample] // self.views)
            samples.append((rows[sample.to(rows.device)].reshape(self.views, len(texts), -1), texts))
        return samples

    def _checked_texts(self, layer: int, index: Tensor) -> Tensor:
        """Return the texts of a sample, or raise if views or texts are missing."""
        texts: Tensor = torch.unique(index)
        name = type(self).__name__
        if len(index) != len(texts) * self.views:
            raise base.TooFewTextsError(
                f"{name} must have all {self.views} views of every text, but layer {layer} has {len(index)} vectors of "
                f"{len(texts)} texts: pass every view from 0 to {self.views - 1} of each index."
            )
        base.check_at_least(self.least, len(texts), f"{self.counted} for {name} at layer {layer}")
        self.num_samples = len(texts)
        return texts


class PooledSampleMetric(SampleMetric):
    """A :class:`SampleMetric` of one vector per text."""

    kind: ClassVar[Kind] = "pooled"

    def update(self, embeddings: Tensor, *, layer: int, index: Tensor | None = None) -> None:
        """Add one layer's vectors of a batch.

        Args:
            embeddings: one row per text, shape ``(B, D)``.
            layer: one of ``layers``.
            index: position of each text in the whole list, shape ``(B,)``. By default texts are numbered in order of
                arrival, which does not work with several processes.
        """
        self._store(layer, embeddings, self._numbered(layer, len(embeddings), index), view=0)


class ViewMetric(SampleMetric):
    """A :class:`SampleMetric` of several views of each text, which arrive one at a time."""

    kind: ClassVar[Kind] = "views"
    views: int = 2

    def update(self, embeddings: Tensor, *, layer: int, view: int | Tensor, index: Tensor | None = None) -> None:
        """Add one layer's vectors of one or several views of a batch.

        Args:
            embeddings: one row per text, shape ``(B, D)``.
            layer: one of ``layers``.
            view: view number, from 0, of all rows or of each, shape ``(B,)``; views that the metric does not use are
                ignored, so that metrics with different numbers of views can share the passes.
            index: position of each text in the whole list, shape ``(B,)``; required.
        """
        if index is None:
            raise OptionError(
                f"`index` must be the position of each text in the whole list, shape (B,), by which "
                f"{type(self).__name__} joins the views of a text, but got None. "
                "Pass index=torch.arange(start, start + len(embeddings))."
            )
        base.check_embeddings(embeddings, index)
        views = torch.as_tensor(view).expand(index.shape)
        if views.numel() and int(views.min()) < 0:
            raise OptionError(f"`view` must be 0 or more, but got {int(views.min())}.")
        used = (views < self.views).nonzero().squeeze(1)
        if len(used):
            self._store(layer, embeddings[used.to(embeddings.device)], index[used.to(index.device)], views[used])


class PairMetric(PooledSampleMetric):
    """A :class:`PooledSampleMetric` that compares the same texts at two layers.

    ``number`` compares two sets of vectors of the same texts, each ``(N, D)``.

    The first value is NaN: there is no layer before the first one.
    """

    needs_previous = True

    def _values(self) -> Tensor:
        samples = self._samples()
        if not all(torch.equal(texts, samples[0][1]) for _, texts in samples):
            raise OptionError("Every layer must be updated with the same texts, but their `index` differs.")
        rows = [sample.squeeze(0).double() for sample, _ in samples]
        for layer, layer_rows in zip(self.layers, rows, strict=True):  # the next layer has no value either
            if not torch.isfinite(layer_rows.sum()):
                raise self._not_finite(layer, float(layer_rows.sum()))
        numbers = [self._number_of_views(first, second) for first, second in pairwise(rows)]
        return base.one_device([rows[0].new_tensor(torch.nan), *numbers])


def check_pair(
    first: Tensor, second: Tensor, *, least: int = 2, same_width: bool = False, batched: bool = False
) -> None:
    """Raise an :class:`OptionError` unless both have one row for each of ``least`` or more texts."""
    is_matrix = first.ndim == 2 or (batched and first.ndim > 2)
    paired = is_matrix and first.shape[:-1] == second.shape[:-1] and first.shape[-2] >= least
    if not paired or (same_width and first.shape != second.shape):
        raise OptionError(
            f"`first` and `second` must be (N, D) and (N, {'D' if same_width else 'E'}) with N of {least} or more, "
            f"but got {tuple(first.shape)} and {tuple(second.shape)}."
        )


def hash_index(index: Tensor, seed: int) -> Tensor:
    """Return a pseudo-random int64 per index, different for different indices: the finalizer of SplitMix64.

    Example:
        >>> hash_index(torch.tensor([0, 1, 2]), seed=0).argsort()
        tensor([0, 2, 1])
    """
    mixed = (index + seed + 1).numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((mixed ^ (mixed >> np.uint64(31))).view(np.int64))
