"""mteb's six main scores over the vectors of all layers at once: ``(L, N, D)`` in, ``(L,)`` out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

__all__ = ["accuracy", "best_average_precision", "mean_average_precision", "spearman", "v_measure"]


def _both(vectors: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    pairs = pairs.to(vectors.device)
    return vectors[:, pairs[:, 0]], vectors[:, pairs[:, 1]]


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each value in its row from 1, equal values sharing the mean of their ranks.

    Example:
        >>> ranks(torch.tensor([[10.0, 30.0, 10.0, 20.0]]))
        tensor([[1.5000, 4.0000, 1.5000, 3.0000]], dtype=torch.float64)
    """
    ordered = values.sort(dim=-1).values.contiguous()
    below = torch.searchsorted(ordered, values.contiguous())
    up_to = torch.searchsorted(ordered, values.contiguous(), right=True)
    return (below + up_to + 1).double() / 2


def spearman(vectors: Tensor, pairs: Tensor, wanted: Tensor) -> Tensor:
    """Return the rank correlation of the pairs' cosines with the wanted similarities ``(P,)``."""
    first, second = _both(normalize(vectors, dim=-1), pairs)
    found, asked = ranks((first * second).sum(dim=-1)), ranks(wanted.to(vectors.device)[None])
    found, asked = (normalize(x - x.mean(dim=-1, keepdim=True), dim=-1) for x in (found, asked))
    return (found * asked).sum(dim=-1)


def average_precision(scores: Tensor, right: Tensor) -> Tensor:
    r"""Return the average precision of each row: :math:`\sum_k (R_k - R_{k-1}) P_k` over the distinct scores, from the top.

    Args:
        scores: shape ``(*, N)``.
        right: boolean, shape ``(N,)``.

    Example:
        >>> average_precision(torch.tensor([[0.9, 0.8, 0.7, 0.6]]), torch.tensor([True, False, True, False]))
        tensor([0.8333], dtype=torch.float64)
    """
    ordered, order = scores.sort(dim=-1, descending=True)
    hits = right.to(scores.device)[order].double().cumsum(dim=-1)
    # Equal scores share one threshold, so each takes the counts at the last of its equals.
    last = torch.searchsorted(-ordered.contiguous(), -ordered.contiguous(), right=True) - 1
    precision = hits.gather(-1, last) / (last + 1)
    recalled = hits.diff(dim=-1, prepend=torch.zeros_like(hits[..., :1]))
    return (precision * recalled).sum(dim=-1) / hits[..., -1]


def best_average_precision(vectors: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    """Return the average precision of the pairs by the best of cosine, dot product, Euclidean and Manhattan distance."""
    first, second = _both(vectors, pairs)
    unit_first, unit_second = _both(normalize(vectors, dim=-1), pairs)
    similarities = (
        (unit_first * unit_second).sum(dim=-1),
        (first * second).sum(dim=-1),
        -(first - second).norm(dim=-1),
        -(first - second).abs().sum(dim=-1),
    )
    return torch.stack([average_precision(one, labels.bool()) for one in similarities]).amax(dim=0)


def mean_average_precision(vectors: Tensor, queries: Sequence[tuple[int, Tensor, Tensor]]) -> Tensor:
    """Return the mean over queries ``(query, candidates, which of them are right)`` of the average precision by cosine."""
    unit = normalize(vectors, dim=-1)
    found = [
        average_precision((unit[:, candidates.to(unit.device)] * unit[:, query, None]).sum(dim=-1), right)
        for query, candidates, right in queries
    ]
    return torch.stack(found).mean(dim=0)


def accuracy(vectors: Tensor, shots: Sequence[Tensor], asked: Tensor, *, iterations: int = 100) -> Tensor:
    """Return the share of right answers by logistic regression, the mean over draws.

    scikit-learn's regression with ``C=1``: cross entropy summed over the shots plus half the squared weights, the bias free.

    Args:
        vectors: of all layers.
        shots: for each of E draws ``(S, 2)``: place and label; as many shots in each.
        asked: place and label of what is classified, ``(Q, 2)``.
        iterations: of L-BFGS, all layers and draws side by side.
    """
    drawn = torch.stack(list(shots)).to(vectors.device)
    inputs = vectors[:, drawn[..., 0]]  # (L, E, S, D)
    labels = drawn[..., 1].expand(len(vectors), -1, -1)
    classes = int(max(labels.max(), asked[:, 1].max())) + 1
    weights, bias = _regression(inputs.flatten(0, 1), labels.flatten(0, 1), classes, iterations)
    asked = asked.to(vectors.device)
    weights, bias = (x.unflatten(0, inputs.shape[:2]) for x in (weights, bias))
    logits = torch.einsum("lqd,ledc->leqc", vectors[:, asked[:, 0]], weights) + bias
    return (logits.argmax(dim=-1) == asked[:, 1]).double().mean(dim=(1, 2))


def _regression(inputs: Tensor, labels: Tensor, classes: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Return weights ``(P, D, C)`` and biases ``(P, 1, C)`` of P logistic regressions."""
    weights = inputs.new_zeros(len(inputs), inputs.shape[2], classes, requires_grad=True)
    bias = inputs.new_zeros(len(inputs), 1, classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, bias], max_iter=iterations, history_size=10, line_search_fn="strong_wolfe", tolerance_grad=1e-4
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = torch.baddbmm(bias, inputs, weights)
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") + weights.square().sum() / 2
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach(), bias.detach()


def v_measure(vectors: Tensor, labelled: Tensor, *, rounds: int = 10, seed: int = 0, size: int = 2048) -> Tensor:
    """Return the V-measure of k-means clusters against the labels, the mean over rounds.

    mteb draws ``size`` texts with replacement in each round, so that some count twice, and clusters them.

    Args:
        vectors: of all layers.
        labelled: place and label of each text, ``(N, 2)``; as many clusters as labels.
        rounds: draws R.
        seed: of the draws and the first centres.
        size: texts in a draw.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = labelled[torch.randint(len(labelled), (rounds, size), generator=generator)].to(vectors.device)  # (R, S, 2)
    labels = labelled[:, 1].unique(return_inverse=True)
    classes = len(labels[0])
    truth = torch.searchsorted(labels[0].to(vectors.device), drawn[..., 1].contiguous())
    scores = []
    for layer in vectors:
        clusters = _k_means(layer[drawn[..., 0]], classes, generator)
        scores.append(_v_measure(truth, clusters, classes).mean())
    return torch.stack(scores)


def _k_means(rows: Tensor, clusters: int, generator: torch.Generator, *, iterations: int = 30) -> Tensor:
    """Return each row's cluster by Lloyd's algorithm from k-means++ centres, ``(R, S, D) -> (R, S)``."""
    R, S, _ = rows.shape
    every = torch.arange(R, device=rows.device)
    centres = rows[every, torch.randint(S, (R,), generator=generator).to(rows.device)][:, None]
    nearest = (rows - centres).square().sum(dim=-1)
    for _ in range(clusters - 1):
        chance = nearest.double().cumsum(dim=1)
        point = torch.rand(R, 1, generator=generator, dtype=torch.float64).to(rows.device) * chance[:, -1:]
        new = rows[every, torch.searchsorted(chance, point).clamp(max=S - 1)[:, 0]][:, None]
        nearest = torch.minimum(nearest, (rows - new).square().sum(dim=-1))
        centres = torch.cat([centres, new], dim=1)
    for _ in range(iterations):
        assigned = torch.cdist(rows, centres).argmin(dim=2)
        chosen = torch.nn.functional.one_hot(assigned, clusters).to(rows.dtype)
        counts = chosen.sum(dim=1)[..., None]
        centres = torch.where(counts > 0, torch.einsum("rsk,rsd->rkd", chosen, rows) / counts.clamp(min=1), centres)
    return torch.cdist(rows, centres).argmin(dim=2)


def _v_measure(truth: Tensor, found: Tensor, classes: int) -> Tensor:
    """Return twice the mutual information over the sum of both entropies, ``(R, S), (R, S) -> (R,)``."""
    cells = torch.nn.functional.one_hot(truth * classes + found, classes**2).double().mean(dim=1)
    table = cells.unflatten(1, (classes, classes))
    entropy = [-torch.xlogy(p, p).sum(dim=1) for p in (table.sum(dim=2), table.sum(dim=1), cells)]
    return 2 * (entropy[0] + entropy[1] - entropy[2]) / (entropy[0] + entropy[1])
