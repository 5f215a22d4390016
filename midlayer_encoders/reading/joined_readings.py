"""Read two places of one sequence, and join both readings into one vector.

An exported folder contains a copy of this file, so it imports nothing else of its package.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.modules import Module
from torch import Tensor, nn

JOINS = ("sum", "concat", "first", "second", "none")


def join_readings(first: Tensor, second: Tensor, join: str = "sum") -> Tensor:
    r"""Return one vector per text from two readings, each of shape ``(B, D)``.

    .. math::
        \text{sum: } \frac{r_1}{\lVert r_1 \rVert} + \frac{r_2}{\lVert r_2 \rVert}

    Args:
        first: the first reading.
        second: the second reading; zeros for an empty text, whose vector is the first reading alone.
        join: ``"sum"`` of the unit vectors; ``"concat"`` for the unit vectors side by side; ``"first"`` or ``"second"``
            for one reading as it is; ``"none"`` for both side by side, not scaled.

    Example:
        >>> join_readings(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]]))
        tensor([[0.6000, 1.8000]])
    """
    if join in ("first", "second"):
        return first if join == "first" else second
    if join == "none":
        return torch.cat([first, second], dim=-1)
    units = [nn.functional.normalize(reading, dim=-1) for reading in (first, second)]
    return units[0] + units[1] if join == "sum" else torch.cat(units, dim=-1)


class JoinedReadings(Module):
    """Pools a sequence that repeats its text: reads one token after the first copy, and the mean of the second copy.

    The sequence is ``front`` tokens, the text, ``question`` tokens, ``between`` tokens, the text again, and ``back``
    tokens. The first reading is the state of the last ``question`` token. Texts may be padded on either side.

    Args:
        embedding_dimension: width of the states.
        front: number of tokens before the first copy, including special tokens.
        question: number of tokens between the first copy and the first reading, including the token that is read.
        between: number of tokens between the first reading and the second copy.
        back: number of tokens after the second copy.
        join: as in :func:`join_readings`.
    """

    config_keys: list[str] = ["embedding_dimension", "front", "question", "between", "back", "join"]  # noqa: RUF012

    def __init__(
        self, embedding_dimension: int, front: int, question: int, between: int, back: int = 0, join: str = "sum"
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

    @property
    def pooling_output_dimension(self) -> int:
        """The width of a vector."""
        return self.embedding_dimension * (2 if self.join in ("concat", "none") else 1)

    def get_embedding_dimension(self) -> int:
        """Return the width of a vector."""
        return self.pooling_output_dimension

    def masks(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the masks of the first reading's token and the second's tokens, from the mask of real tokens.

        Example:
            >>> first, second = JoinedReadings(8, front=1, question=2, between=1).masks(torch.ones(1, 8))
            >>> first.int().tolist(), second.int().tolist()
            ([[0, 0, 0, 0, 1, 0, 0, 0]], [[0, 0, 0, 0, 0, 0, 1, 1]])
        """
        mask = mask.bool()
        position = mask.cumsum(dim=1) - 1  # among the real tokens
        length = mask.sum(dim=1, keepdim=True)
        added = self.front + self.question + self.between + self.back
        copy = ((length - added) // 2).clamp(min=0)
        read = self.front + copy + self.question - 1
        start = read + 1 + self.between
        return mask & (position == read), mask & (position >= start) & (position < start + copy)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Add the vector of each text to the features."""
        states = features["token_embeddings"]
        dtype = states.dtype
        states = states.float() if dtype in (torch.float16, torch.bfloat16) else states  # a long text would overflow
        readings = []
        for mask in self.masks(features["attention_mask"]):
            weights = mask.to(states.dtype)
            total = torch.einsum("btd,bt->bd", states, weights)
            readings.append(total / weights.sum(dim=1, keepdim=True).clamp(min=1))
        features["sentence_embedding"] = join_readings(readings[0], readings[1], self.join).to(dtype)
        return features

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the settings, and this file into the folder above, where ``SentenceTransformer`` looks for code."""
        settings = {name: getattr(self, name) for name in self.config_keys}
        source = Path(__file__)
        shutil.copy(source, Path(output_path).parent / source.name)
        Path(output_path, "config.json").write_text(json.dumps(settings, indent=2), encoding="utf8")
