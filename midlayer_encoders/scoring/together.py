"""All layers of a task scored at once, as many side by side as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from midlayer_encoders.scoring.recording import Question


_ROUNDING = 1e-6  # of the largest number: what the same input in another batch may differ by

_Rows = npt.NDArray[np.float32]
Read = Callable[[int, Sequence[str]], _Rows]
"""Returns the vectors ``(N, D)`` of keys at a layer."""


def memory_budget(device: torch.device) -> int:
    """Return how many bytes scoring may take: half of what is free on a GPU, 1 GiB on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return 1 << 30


def layer_scores(
    question: Question,
    keys: Sequence[str],
    layers: Sequence[int],
    read: Read,
    *,
    device: torch.device,
    budget: int | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> dict[int, float]:
    """Return the score of each layer; NaN where a layer's vectors are not finite, or its score is not defined.

    Args:
        question: what is asked.
        keys: of the N rows that it is about.
        layers: to score.
        read: returns the vectors ``(N, D)`` of keys at a layer.
        device: where to compute; a device without float64 is not used.
        budget: bytes that may be taken; by default :func:`memory_budget`. One layer is scored whatever it takes.
        done: called with the number of layers that were scored.
    """
    if device.type not in ("cpu", "cuda"):
        device = torch.device("cpu")
    found: dict[int, float] = {}
    first = read(layers[0], keys)
    each = 4 * question.numbers(*first.shape)
    count = max((budget or memory_budget(device)) // max(each, 1), 1)
    parts = [layers[start : start + count] for start in range(0, len(layers), count)]
    with _exact_products(), torch.inference_mode(), ThreadPoolExecutor(1) as ahead:
        every = _one_ahead(ahead, first, lambda layer: read(layer, keys), layers[1:])
        for part in parts:
            # Layer after layer: the host holds the first, the one that is copied and the next, of however many.
            vectors = torch.empty((len(part), *first.shape), device=device)
            for row in vectors:
                row.copy_(torch.from_numpy(next(every)))
            finite = vectors.isfinite().flatten(1).all(dim=1) & ~all_alike(vectors, keys)
            scores = _scores(question, torch.where(finite[:, None, None], vectors, 0))
            scores = torch.where(finite, scores, torch.nan)
            found |= dict(zip(part, scores.tolist(), strict=True))
            done(len(part))
    return found


def all_alike(vectors: Tensor, keys: Sequence[str]) -> Tensor:
    """Return for each layer whether different rows all have one vector, as the last token of a template at layer 0.

    Args:
        vectors: shape ``(L, N, D)``.
        keys: of the N rows; rows of one key are the same.
    """
    if len(set(keys)) < 2:
        return torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device)
    spread = (vectors.amax(dim=1) - vectors.amin(dim=1)).amax(dim=1)
    return spread <= _ROUNDING * vectors.abs().amax(dim=(1, 2))


def _scores(question: Question, vectors: Tensor) -> Tensor:
    """Return the scores of layers, of fewer at once where the device's memory runs out."""
    try:
        return question.scores(vectors)
    except torch.cuda.OutOfMemoryError:
        if len(vectors) == 1:
            raise
        torch.cuda.empty_cache()
    half = len(vectors) // 2
    return torch.cat([_scores(question, vectors[:half]), _scores(question, vectors[half:])])


def _one_ahead(
    pool: ThreadPoolExecutor, first: _Rows, read: Callable[[int], _Rows], layers: Sequence[int]
) -> Iterator[_Rows]:
    """Yield the first layer's vectors and those of each other layer, which are read while the one before is used."""
    rows = first
    for layer in layers:
        coming = pool.submit(read, layer)
        yield rows
        rows = coming.result()
    yield rows


@contextmanager
def _exact_products() -> Iterator[None]:
    """Keep float32 products from being rounded to TensorFloat-32: close similarities would change places."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
