"""The class of the nearest examples, for every layer at once."""

from __future__ import annotations

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError

__all__ = ["nearest_classes"]


@torch.no_grad()
def nearest_classes(
    known: Tensor, labels: Tensor, asked: Tensor, *, neighbors: int = 20, temperature: float = 0.07
) -> Tensor:
    r"""Return the class that the nearest known examples vote for, by cosine, shape ``(L, M)``.

    .. math::
        \hat y = \arg\max_c \sum_{i \in N_k} [y_i = c] \exp(\cos(x, x_i) / \tau)

    the vote of Wu et al. (2018) that DINO reports.

    Args:
        known: vectors of the known examples, shape ``(L, N, D)``.
        labels: their classes, from ``0``, shape ``(N,)``.
        asked: vectors of the examples in question, shape ``(L, M, D)``.
        neighbors: k; all known examples where there are fewer.
        temperature: of the votes.

    Example:
        >>> known, labels = torch.eye(3)[None], torch.tensor([0, 1, 1])
        >>> nearest_classes(known, labels, torch.tensor([[[0.9, 0.1, 0.0], [0.0, 0.5, 0.5]]]), neighbors=1)
        tensor([[0, 1]])
    """
    if neighbors < 1:
        raise OptionError(f"`neighbors` must be at least 1, but got {neighbors}.")
    unit = torch.nn.functional.normalize(known.float(), dim=-1)
    found = [
        _vote(torch.nn.functional.normalize(part.float(), dim=-1) @ unit.mT, labels, neighbors, temperature)
        for part in torch.split(asked, 1024, dim=1)  # the whole matrix of similarities may not fit
    ]
    return torch.cat(found, dim=1)


def _vote(similarity: Tensor, labels: Tensor, neighbors: int, temperature: float) -> Tensor:
    nearest, index = similarity.topk(min(neighbors, similarity.shape[-1]), dim=-1)
    votes = similarity.new_zeros(*similarity.shape[:2], int(labels.max()) + 1)
    votes.scatter_add_(2, labels[index], ((nearest - 1) / temperature).exp())
    return votes.argmax(dim=-1)
