"""Pool three spans of one sequence, and join them into one vector.

An exported folder contains a copy of this file, so it imports nothing else of its package.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any, Self

import torch
from sentence_transformers.base.modules import Module
from torch import Tensor, nn

#: The spans: the first copy of the text, the last token of the question after it, and the second copy of the text.
SPANS = ("text", "word", "echo")
JOINS = ("sum", "none", *SPANS)
#: Tokens of a text from which on its first copy has the full weight. Shorter texts are in the question's word already.
FULL_LENGTH = 128
_ROUNDING = 1e-4


def join_spans(spans: Tensor, share: Tensor, join: str = "sum", offsets: Tensor | None = None) -> Tensor:
    r"""Return one vector for each text from its spans.

    .. math::
        \text{sum: } \sqrt{D} \left(s \frac{r_1}{\lVert r_1 \rVert} + \frac{r_2}{\lVert r_2 \rVert}
        + \frac{r_3}{\lVert r_3 \rVert}\right), \qquad r_i \text{ the spans plus their offsets}

    The factor gives a vector the length of a normed state, for classifiers that penalize large weights.

    Args:
        spans: means of the spans, shape ``(*, B, 3, D)``; zeros for a span without tokens, which stays zero.
        share: weight of the first span, ``s``, shape ``(B, 1)``.
        join: ``"sum"``; the name of a span for that span alone, as it is; or ``"none"`` for all spans side by side,
            followed by the weight, from which every other way follows.
        offsets: added to the spans that have tokens, shape ``(*, 3, D)``. A span that hardly differs from its offset,
            such as the word at layer 0, becomes zero: its direction would be that of rounding.

    Returns:
        Shape ``(*, B, D)``, or ``(*, B, 3 D + 1)`` for ``"none"``.

    Example:
        >>> spans = torch.tensor([[[0.0, 2.0], [3.0, 4.0], [0.0, 2.0]]])
        >>> join_spans(spans, torch.tensor([[0.5]])) / 2**0.5
        tensor([[0.6000, 2.3000]])
    """
    if offsets is not None:
        centered = spans + offsets.unsqueeze(-3).to(spans)
        size, centered_size = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (spans, centered))
        spans = torch.where((size > 0) & (centered_size > _ROUNDING * size), centered, 0)
    if join in SPANS:
        return spans.select(-2, SPANS.index(join))
    if join == "none":
        side_by_side = spans.flatten(start_dim=-2)
        return torch.cat([side_by_side, share.to(spans).expand(*side_by_side.shape[:-1], 1)], dim=-1)
    units: Tensor = nn.functional.normalize(spans, dim=-1)
    joined: Tensor = share.to(spans) * units[..., 0, :] + units[..., 1:, :].sum(dim=-2)
    return joined * math.sqrt(spans.shape[-1])


def split_spans(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the spans and the weight of the first one from vectors of ``join="none"``, shape ``(*, B, 3 D + 1)``."""
    return vectors[..., :-1].reshape(*vectors.shape[:-1], len(SPANS), -1), vectors[..., -1:]


class PooledSpans(Module):
    """Pools a sequence that repeats its text: the first copy, the token that ends a question, and the second copy.

    The sequence is ``front`` tokens, the text, ``question`` tokens, ``between`` tokens, the text again, and ``back``
    tokens. Texts may be padded on either side.

    Args:
        embedding_dimension: width of the states.
        front: number of tokens before the first copy, including special tokens.
        question: number of tokens between the first copy and the second span, including the token that is pooled.
        between: number of tokens between that token and the second copy.
        back: number of tokens after the second copy.
        join: as in :func:`join_spans`.
        centered: whether the folder holds offsets of the spans.
    """

    config_keys: list[str] = [  # noqa: RUF012
        "embedding_dimension", "front", "question", "between", "back", "join", "centered",
    ]  # fmt: skip
    offsets: Tensor

    def __init__(
        self,
        embedding_dimension: int,
        front: int,
        question: int,
        between: int,
        back: int = 0,
        join: str = "sum",
        centered: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if join not in JOINS:
            raise ValueError(f"`join` must be one of {', '.join(map(repr, JOINS))}, but got {join!r}.")
        self.embedding_dimension = embedding_dimension
        self.front = front
        self.question = question
        self.between = between
        self.back = back
        self.join = join
        self.centered = centered
        self.register_buffer("offsets", torch.zeros(len(SPANS), embedding_dimension))

    @property
    def pooling_output_dimension(self) -> int:
        """The width of a vector."""
        return len(SPANS) * self.embedding_dimension + 1 if self.join == "none" else self.embedding_dimension

    def get_embedding_dimension(self) -> int:
        """Return the width of a vector."""
        return self.pooling_output_dimension

    def center(self, offsets: Tensor) -> None:
        """Add offsets to the spans, shape ``(3, D)``."""
        self.offsets, self.centered = offsets.to(self.offsets), True

    def masks(self, mask: Tensor) -> tuple[Tensor, ...]:
        """Return the mask of the tokens of each span, from that of real tokens.

        Example:
            >>> spans = PooledSpans(8, front=1, question=2, between=1).masks(torch.ones(1, 8))
            >>> [span.int().tolist() for span in spans]
            [[[0, 1, 1, 0, 0, 0, 0, 0]], [[0, 0, 0, 0, 1, 0, 0, 0]], [[0, 0, 0, 0, 0, 0, 1, 1]]]
        """
        mask = mask.bool()
        position = mask.cumsum(dim=1) - 1  # among the real tokens
        length = mask.sum(dim=1, keepdim=True)
        added = self.front + self.question + self.between + self.back
        copy: Tensor = ((length - added) // 2).clamp(min=0)
        word = self.front + copy + self.question - 1
        echo = word + 1 + self.between

        places = (self.front, self.front + copy), (word, word + 1), (echo, echo + copy)
        return tuple(mask & (position >= start) & (position < end) for start, end in places)

    def pool(self, spans: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
        """Return the vectors of texts from the means of their spans, ``(*, B, 3, D)``, and the masks of the spans."""
        share = (masks[0].sum(dim=1, keepdim=True) / FULL_LENGTH).clamp(max=1)
        return join_spans(spans, share.to(spans.device), self.join, self.offsets if self.centered else None)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Add the vector of each text to the features."""
        states = features["token_embeddings"]
        dtype = states.dtype
        states = states.float() if dtype in (torch.float16, torch.bfloat16) else states  # a long text would overflow
        masks = self.masks(features["attention_mask"])
        weights = torch.stack(masks, dim=1).to(states.dtype)
        means = weights @ states / weights.sum(dim=2, keepdim=True).clamp(min=1)
        features["sentence_embedding"] = self.pool(means, masks).to(dtype)
        return features

    @classmethod
    def load(cls, model_name_or_path: str, *args: Any, **kwargs: Any) -> Self:
        """Return the module of a folder, with its offsets."""
        module = super().load(model_name_or_path, *args, **kwargs)
        if module.centered:
            names = ("subfolder", "token", "cache_folder", "revision", "local_files_only")
            where = {name: kwargs[name] for name in names if name in kwargs}
            cls.load_torch_weights(model_name_or_path, model=module, **where)
        return module

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the settings, and this file into the folder above, where ``SentenceTransformer`` looks for code."""
        settings = {name: getattr(self, name) for name in self.config_keys}
        source = Path(__file__)
        shutil.copy(source, Path(output_path).parent / source.name)
        Path(output_path, "config.json").write_text(json.dumps(settings, indent=2), encoding="utf8")
        if self.centered:
            self.save_torch_weights(output_path)
