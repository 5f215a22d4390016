"""A small corpus at every layer, and a function that feeds it to any metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from midlayer_encoders.metrics import METRICS, LayerMetric

OPTIONS: dict[str, dict[str, object]] = {"alpha_req": {"first": 1}, "lidar": {"views": 3}, "neighbor_overlap": {"k": 3}}
"""Options for a small corpus where the defaults do not work."""


@dataclass(frozen=True)
class Corpus:
    """Token states ``(L, N, T, D)``, their mask ``(N, T)``, their means ``(L, N, D)``, and views ``(L, V, N, D)``."""

    states: Tensor
    mask: Tensor
    pooled: Tensor
    views: Tensor

    @property
    def texts(self) -> list[list[Tensor]]:
        """The tokens of each text without padding, by layer."""
        return [[text[real] for text, real in zip(layer, self.mask, strict=True)] for layer in self.states]

    def to(self, dtype: torch.dtype) -> Corpus:
        states, pooled, views = (tensor.to(dtype) for tensor in (self.states, self.pooled, self.views))
        return replace(self, states=states, pooled=pooled, views=views)

    def padded(self, left: int, right: int) -> Corpus:
        """Return the same texts with more padding, filled with numbers that must be ignored."""

        def pad(tensor: Tensor, value: float, axis: int) -> Tensor:
            def filled(n: int) -> Tensor:
                return torch.full((*tensor.shape[:axis], n, *tensor.shape[axis + 1 :]), value, dtype=tensor.dtype)

            return torch.cat([filled(left), tensor, filled(right)], dim=axis)

        return replace(self, states=pad(self.states, 1e3, 2), mask=pad(self.mask, False, 1))


def corpus(
    *, texts: int = 13, layers: int = 3, tokens: int = 7, width: int = 5, views: int = 3, seed: int = 0
) -> Corpus:
    """Return random texts of mixed lengths, padded on the right, whose layers build on each other."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(layers, texts, tokens, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(3, tokens + 1, (texts,), generator=generator)
    base = torch.randn(1, 1, texts, width, generator=generator, dtype=torch.float64)
    jitter = torch.randn(layers, views, texts, width, generator=generator, dtype=torch.float64)
    mask = torch.arange(tokens) < lengths[:, None]
    states = noise.cumsum(dim=0).float().double()
    pooled = torch.where(mask[..., None], states, 0.0).sum(dim=2) / lengths[:, None]
    return Corpus(states, mask, pooled, (base + 0.5 * jitter).float().double())


def make(name: str, layers: Iterable[int], **options: object) -> LayerMetric:
    """Return a metric of the registry with options for a small corpus."""
    build: Callable[..., LayerMetric] = METRICS[name]
    return build(list(layers), **{**OPTIONS.get(name, {}), **options})


def feed(metric: LayerMetric, texts: Corpus, batches: Iterable[Tensor], *, offset: int = 0) -> LayerMetric:
    """Update a metric with the texts of each batch, layer by layer, and return it."""
    for batch in batches:
        for row, layer in enumerate(metric.layers):
            if metric.kind == "tokens":
                metric.update(texts.states[row, batch], texts.mask[batch], index=batch + offset, layer=layer)
            elif metric.kind == "pooled":
                metric.update(texts.pooled[row, batch], index=batch + offset, layer=layer)
            else:
                for view in range(texts.views.shape[1]):
                    metric.update(texts.views[row, view, batch], view=view, index=batch + offset, layer=layer)
    return metric


def value(name: str, texts: Corpus, batches: Iterable[Tensor] | None = None, **options: object) -> Tensor:
    """Return the value of a metric for a corpus, at once or in batches."""
    layers = range(len(texts.states))
    complete = [torch.arange(len(texts.mask))]
    return feed(make(name, layers, **options), texts, complete if batches is None else batches).compute()
