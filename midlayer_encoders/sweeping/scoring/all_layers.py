"""Scores of all layers of a task, computed for as many layers at once as memory allows."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from midlayer_encoders._isolation import full_precision
from midlayer_encoders.metrics.label_accuracy import all_alike
from midlayer_encoders.reading.ahead import ahead
from midlayer_encoders.sweeping.scoring.retrieval import Ranking

_WHOLE_LAYER = 1 << 26  # numbers of a layer that is read at once: 256 MiB

_Rows = npt.NDArray[np.float32]
#: Returns the vectors ``(N, D)`` of keys at a layer.
Read = Callable[[int, Sequence[str]], _Rows]


class Scorer(Protocol):
    """Scores the vectors of a task's rows."""

    def bootstrap(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return one score per layer from vectors ``(L, N, D)``, and its scores on resampled items ``(L, S)``.

        The second has no columns if the score cannot be computed from values of the items.
        """

    def size_per_layer(self, rows: int, dim: int) -> int:
        """Return approximately how many numbers of four bytes a layer needs."""


def memory_budget(device: torch.device) -> int:
    """Return how many bytes scoring may use: half of the free memory of a GPU, 1 GiB on a CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) // 2 if device.type == "cuda" else 1 << 30


def resampled_scores(
    scorer: Scorer,
    keys: Sequence[str],
    layers: Sequence[int],
    read: Read,
    *,
    device: torch.device,
    budget: int | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> dict[int, list[float]]:
    """Return the score of each layer, followed by its scores on resampled items, if these can be computed.

    A score is NaN if the vectors are not finite or it is undefined.

    Args:
        scorer: computes the scores.
        keys: keys of the scorer's N rows.
        layers: layers to score.
        read: returns the vectors ``(N, D)`` of keys at a layer.
        device: device to compute on; the CPU replaces devices without float64.
        budget: bytes that scoring may use, by default :func:`memory_budget`; at least one layer is scored at a time.
        done: called with the number of layers that were scored.
    """
    if device.type not in ("cpu", "cuda"):
        device = torch.device("cpu")
    dim = read(layers[0], keys[:1]).shape[1]
    if isinstance(scorer, Ranking) and scorer.candidates is None and len(keys) * dim > _WHOLE_LAYER:
        return {layer: _scores_in_blocks(scorer, keys, layer, read, dim, device, done) for layer in layers}
    layer_values: dict[int, list[float]] = {}
    layer_bytes = 4 * scorer.size_per_layer(len(keys), dim)
    count = max((budget or memory_budget(device)) // max(layer_bytes, 1), 1)
    parts = [layers[start : start + count] for start in range(0, len(layers), count)]
    read_layers = ahead(lambda layer: read(layer, keys), layers, depth=1)
    with full_precision(device.type), torch.inference_mode(), closing(read_layers):
        for part in parts:
            # Copied layer by layer, while the next is read: the host holds at most the current and the next.
            vectors = torch.empty((len(part), len(keys), dim), device=device)
            for layer_vectors, (_, rows) in zip(vectors, read_layers, strict=False):
                layer_vectors.copy_(torch.from_numpy(rows()))
            valid = vectors.isfinite().flatten(1).all(dim=1) & ~all_alike(vectors, keys)
            scores = _scores(scorer, torch.where(valid[:, None, None], vectors, 0))
            scores = torch.where(valid[:, None], scores, torch.nan)
            layer_values |= dict(zip(part, scores.tolist(), strict=True))
            done(len(part))
    return layer_values


def _scores_in_blocks(
    scorer: Ranking,
    keys: Sequence[str],
    layer: int,
    read: Read,
    dim: int,
    device: torch.device,
    done: Callable[[int], None],
) -> list[float]:
    """Return the score of a layer and its resampled scores, from vectors that are read block by block."""
    lowest = torch.full((dim,), torch.inf, device=device)
    highest = -lowest

    def read_rows(rows: Tensor) -> Tensor:
        vectors = torch.from_numpy(read(layer, [keys[row] for row in rows.tolist()])).to(device)
        torch.minimum(lowest, vectors.amin(dim=0), out=lowest)
        torch.maximum(highest, vectors.amax(dim=0), out=highest)
        return vectors

    with full_precision(device.type), torch.inference_mode():
        scores, resampled = scorer.resampled_in_blocks(read_rows, dim, device)
        values = torch.cat([scores[:, None], resampled], dim=1)[0]
    extremes = torch.stack([lowest, highest])
    done(1)
    if not extremes.isfinite().all() or all_alike(extremes[None], keys).item():
        return [torch.nan] * len(values)
    return values.tolist()


def _scores(scorer: Scorer, vectors: Tensor) -> Tensor:
    """Return scores and resampled scores ``(L, 1 + S)``, of fewer layers at once if the GPU runs out of memory."""
    try:
        scores, resampled = scorer.bootstrap(vectors)
        return torch.cat([scores[:, None], resampled.to(scores)], dim=1)
    except torch.cuda.OutOfMemoryError:
        if len(vectors) == 1:
            raise
        torch.cuda.empty_cache()
    half = len(vectors) // 2
    return torch.cat([_scores(scorer, vectors[:half]), _scores(scorer, vectors[half:])])
