"""Metrics that compare texts with each other: on all of them, or on a capped sample that any process would draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._layer_metric import (
    Kind,
    LayerMetric,
    TooFewTextsError,
    check_at_least,
    in_stacks,
    is_distributed,
    joined,
    one_device,
)
from midlayer_encoders.metrics._row_metric import check_embeddings, own


class SampleMetric(LayerMetric):
    """A number that depends on which text lies near which.

    Keeps the vectors of at most ``max_samples`` texts per layer (twice that while they arrive): those whose place in
    the whole list has the smallest seeded hash. So the sample is the same in every order, batch split and sharding, and
    so, to the bit, is the value. A text given twice counts once. Most such values depend on the number of texts, so
    compare those of equal ``num_samples``.

    Args:
        layers: as in :class:`LayerMetric`.
        of: the numbers of samples, shape ``(*)``, from the vectors of each view, ``(*, N, D)`` float64.
        max_samples: most texts that are kept, 2 or more.
        seed: which sample is drawn when there are more.
        torchmetrics_options: as in :class:`LayerMetric`.

    Attributes:
        num_samples: texts that the last ``compute`` used; ``None`` before.
        views: number of views of each text that are kept.
        least: number of texts below which there is no value.
        counted: which texts count towards that.
    """

    views: int = 1
    least: int = 2
    counted: ClassVar[str] = "Different texts"
    _of: Callable[..., Tensor]

    def __init__(
        self,
        layers: Sequence[int],
        of: Callable[..., Tensor],
        *,
        max_samples: int = 1000,
        seed: int = 0,
        **torchmetrics_options: Any,
    ) -> None:
        super().__init__(layers, **torchmetrics_options)
        if max_samples < 2:
            raise OptionError(f"`max_samples` must be 2 or more, but got {max_samples}.")
        self._of, self.max_samples, self.seed = of, max_samples, seed
        self.num_samples: int | None = None
        for layer in self.layers:
            for name in ("rows", "index", "view"):
                self.add_state(f"{name}_{layer}", [], dist_reduce_fx="cat")

    def _keep(self, layer: int, embeddings: Tensor, index: Tensor, view: int | Tensor) -> None:
        check_embeddings(embeddings, index)
        self._position(layer)
        # The numbers stay where they are, on the CPU as a rule: choosing the sample there waits for no GPU.
        index = index.to(torch.int64)
        for name, new in (("rows", own(embeddings)), ("index", index), ("view", torch.zeros_like(index) + view)):
            getattr(self, f"{name}_{layer}").append(new)
        if sum(map(len, getattr(self, f"index_{layer}"))) > 2 * self.max_samples * self.views:
            self._thin(layer)

    def _thin(self, layer: int) -> None:
        """Drop all but the sample, and what was given twice, from what a layer keeps."""
        index, view = torch.cat(getattr(self, f"index_{layer}")), torch.cat(getattr(self, f"view_{layer}"))
        kept = self._chosen(index, view)
        for name in ("rows", "index", "view"):
            state = getattr(self, f"{name}_{layer}")
            joint = torch.cat(state)
            state[:] = [joint[kept.to(joint.device)]]

    def _chosen(self, index: Tensor, view: Tensor) -> Tensor:
        """Return which rows are the sample, sorted by view and then index."""
        index, view = index.cpu(), view.cpu()
        keys, order = torch.sort(index * self.views + view, stable=True)
        first = torch.ones_like(keys, dtype=torch.bool)
        first[1:] = keys[1:] != keys[:-1]
        order = order[first]
        hashes = hashed(index[order], self.seed)
        largest = torch.unique(hashes)[: self.max_samples][-1:]
        order = order[hashes <= largest]
        return order[torch.argsort(view[order], stable=True)]

    def _value(self, layer: int) -> Tensor:
        return self._values([layer])[0]

    def _values(self, layers: Sequence[int]) -> Tensor:
        samples = [sample for sample, _ in self._samples(layers)]
        views, texts, _ = samples[0].shape
        return one_device(in_stacks(samples, self._of_stack, numbers=self._numbers(views, texts)))

    def _of_stack(self, samples: Tensor) -> Tensor:
        """Return the numbers of several layers, shape ``(L,)``, from their samples, ``(L, V, N, D)``."""
        samples = samples.double()
        return torch.where(_finite(samples), self._of(*samples.unbind(dim=1)), torch.nan)

    def _numbers(self, views: int, texts: int) -> int:
        """Return how many temporary numbers one layer takes: the similarities of all texts and views."""
        return views * texts * views * texts

    def _samples(self, layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's sample ``(V, N, D)``, and the index of each text, ascending, ``(N,)``.

        The layers have seen the same texts as a rule, so that their sample is chosen once.
        """
        found: list[tuple[Tensor, Tensor]] = []
        before: tuple[Tensor, Tensor] | None = None
        for layer in layers:
            rows, index, view = (joined(getattr(self, f"{name}_{layer}")) for name in ("rows", "index", "view"))
            if rows is None or index is None or view is None:
                raise TooFewTextsError(
                    f"{type(self).__name__} has no text at layer {layer}: call `update` for every layer and batch."
                )
            now = index.cpu(), view.cpu()
            if before is None or not all(map(torch.equal, now, before)):
                before, kept = now, self._chosen(*now)
                texts = self._checked(layer, *(each[kept] for each in now))
                as_given = torch.equal(kept, torch.arange(len(kept)))
            rows = rows if as_given and len(rows) == len(kept) else rows[kept.to(rows.device)]
            found.append((rows.reshape(self.views, len(texts), -1), texts))
        return found

    def _checked(self, layer: int, index: Tensor, view: Tensor) -> Tensor:
        """Return the texts of a sample, or raise where it lacks views or texts."""
        texts: Tensor = torch.unique(index)
        name, kept = type(self).__name__, view
        if len(kept) != len(texts) * self.views:
            raise TooFewTextsError(
                f"{name} must have all {self.views} views of every text, but layer {layer} has {len(kept)} vectors of "
                f"{len(texts)} texts: give every view from 0 to {self.views - 1} of each index."
            )
        check_at_least(self.least, len(texts), f"{self.counted} for {name} at layer {layer}")
        self.num_samples = len(texts)
        return texts


def _finite(samples: Tensor) -> Tensor:
    """Return which of samples ``(L, *)`` are finite, bool, ``(L,)``, without waiting for a GPU."""
    return torch.isfinite(samples.flatten(1).sum(dim=1))


def layer_by_layer(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of one layer's views as one of several layers', which it takes one after the other."""
    return partial(_each, of)


def _each(of: Callable[..., Tensor], *views: Tensor) -> Tensor:
    return torch.stack([of(*each) for each in zip(*views, strict=True)])


class NumberedMetric(SampleMetric):
    """A :class:`SampleMetric` that numbers texts as they come where no index is given."""

    def __init__(self, layers: Sequence[int], of: Callable[..., Tensor], **options: Any) -> None:
        super().__init__(layers, of, **options)
        self._given = dict.fromkeys(self.layers, 0)

    def _numbered(self, layer: int, count: int, index: Tensor | None) -> Tensor:
        """Return the index, or the next numbers of a layer where there is none."""
        if index is not None:
            return index
        if is_distributed():
            raise OptionError("`index` must be given when several processes share the texts, but got None.")
        self._position(layer)
        self._given[layer] += count
        return torch.arange(self._given[layer] - count, self._given[layer])

    def reset(self) -> None:
        """Forget all texts."""
        super().reset()
        self._given = dict.fromkeys(self.layers, 0)


class PooledSampleMetric(NumberedMetric):
    """A :class:`SampleMetric` of one vector per text."""

    kind: ClassVar[Kind] = "pooled"

    def update(self, layer: int, embeddings: Tensor, *, index: Tensor | None = None) -> None:
        """Add one layer's vectors of a batch.

        Args:
            layer: one of ``layers``.
            embeddings: one row per text, shape ``(B, D)``.
            index: position of each text in the whole list, shape ``(B,)``. Without it texts are numbered as they come,
                which several processes cannot do.
        """
        self._keep(layer, embeddings, self._numbered(layer, len(embeddings), index), view=0)


class ViewMetric(SampleMetric):
    """A :class:`SampleMetric` of several views of each text, given one view at a time; ``forward`` is refused."""

    kind: ClassVar[Kind] = "views"
    views: int = 2
    _compares = "the views"

    def update(self, layer: int, embeddings: Tensor, *, view: int | Tensor, index: Tensor) -> None:
        """Add one layer's vectors of one view of a batch, or of several.

        Args:
            layer: one of ``layers``.
            embeddings: one row per text, shape ``(B, D)``.
            view: which view, from 0, of all rows or of each, shape ``(B,)``; those past the metric's last are ignored,
                so that metrics with different numbers of views can share the passes.
            index: position of each text in the whole list, shape ``(B,)``.
        """
        views = torch.as_tensor(view).expand(index.shape)
        if views.numel() and int(views.min()) < 0:
            raise OptionError(f"`view` must be 0 or more, but got {int(views.min())}.")
        wanted = (views < self.views).nonzero().squeeze(1)
        if len(wanted) == len(views):
            self._keep(layer, embeddings, index, views)
        elif len(wanted):
            self._keep(layer, embeddings[wanted.to(embeddings.device)], index[wanted.to(index.device)], views[wanted])


class PairMetric(PooledSampleMetric):
    """A :class:`PooledSampleMetric` that compares the same texts at two layers; ``forward`` is refused.

    Args:
        layers: as in :class:`LayerMetric`.
        of: the number of two sets of vectors of the same texts, each ``(N, D)``: a scalar.
        against: ``"previous"`` compares each layer with the one listed before it, and the first has no value: NaN. A
            layer number, one of ``layers``, compares every layer with that one.
        options: as in :class:`SampleMetric`.
    """

    _compares = "two layers"

    def __init__(
        self,
        layers: Sequence[int],
        of: Callable[[Tensor, Tensor], Tensor],
        *,
        against: int | Literal["previous"] = "previous",
        **options: Any,
    ) -> None:
        super().__init__(layers, of, **options)
        if against != "previous":
            self._position(against)
        self.against = against
        self.needs_previous = against == "previous"

    def _values(self, layers: Sequence[int]) -> Tensor:
        others = {layer: self._other(layer) for layer in layers if self._has_value(layer)}
        wanted = list(dict.fromkeys([*layers, *others.values()]))
        samples = dict(zip(wanted, self._samples(wanted), strict=True))
        for layer, other in others.items():
            if not torch.equal(samples[other][1], samples[layer][1]):
                raise OptionError(
                    f"Layers {other} and {layer} must be updated with the same texts: they have different `index`."
                )
        rows = {layer: sample.squeeze(0).double() for layer, (sample, _) in samples.items()}
        for layer, each in rows.items():  # one that is not finite has no number with the next layer either
            if not torch.isfinite(each.sum()):
                raise self._not_finite(layer, float(each.sum()))
        found = {layer: self._of(rows[other], rows[layer]) for layer, other in others.items()}
        return one_device([found.get(layer, rows[layer].new_tensor(torch.nan)) for layer in layers])

    def _other(self, layer: int) -> int:
        return self.layers[self._position(layer) - 1] if self.against == "previous" else self.against


def check_pair(first: Tensor, second: Tensor, *, least: int = 2, same_width: bool = False) -> None:
    """Raise an :class:`OptionError` unless both have one row for each of ``least`` or more texts."""
    paired = first.ndim == second.ndim == 2 and len(first) == len(second) >= least
    if not paired or (same_width and first.shape != second.shape):
        raise OptionError(
            f"`first` and `second` must be (N, D) and (N, {'D' if same_width else 'E'}) with N of {least} or more, "
            f"but got {tuple(first.shape)} and {tuple(second.shape)}."
        )


def hashed(index: Tensor, seed: int) -> Tensor:
    """Return a pseudo-random int64 per index, different for different indices: the finalizer of SplitMix64.

    Example:
        >>> hashed(torch.tensor([0, 1, 2]), seed=0).argsort()
        tensor([0, 2, 1])
    """
    mixed = (index + seed + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return mixed ^ ((mixed >> 31) & ((1 << 33) - 1))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
