"""Unpooled states of many layers in a folder of safetensors shards: a shard is whole or not there, so runs resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from midlayer_encoders._types import Stage
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.files import write_file
from midlayer_encoders.media import medium_of
from midlayer_encoders.reading.batches import batches_of, count_tokens
from midlayer_encoders.reading.norm import final_norm
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.vectors.vector_files import write_safetensors

__all__ = ["write_states"]

_SHARD_BYTES = 128 * 2**20  # of the states that are in memory at a time, about
_MEDIA = 32  # images or waveforms in a shard: how many states each has is not known before


def write_states(
    folder: Path,
    encoder: LayerEncoder,
    reader: LayerReader,
    inputs: Sequence[Any],
    *,
    width: int,
    prompt: str,
    token_budget: int,
    about: Mapping[str, Any],
    stage: Stage,
) -> None:
    """Write the states of all inputs to shards, those that are not there yet, and then ``index.json``.

    A shard holds ``layer.K`` ``(T, D)`` for each layer, the states of its inputs one after another; ``offsets``
    ``(n + 1)``, where the states of each begin; and ``counted`` ``(T)``, which of them the pooling counts.

    Args:
        folder: of these shards alone.
        encoder: with the whole model.
        reader: of its layers.
        inputs: texts, images or waveforms.
        width: dimensions of a state.
        prompt: put before each text.
        token_budget: tokens in a batch.
        about: what the states are.
        stage: counts inputs.
    """
    shards = []
    for number, (start, end) in enumerate(_shards(encoder, inputs, prompt, 4 * width * len(reader.layers))):
        path = folder / f"states-{number:06d}.safetensors"
        shards.append({"file": path.name, "first": start, "inputs": end - start})
        if not path.is_file():
            some = _States(encoder, reader, inputs[start:end], prompt, token_budget)
            write_safetensors(path, some.tensors(), {**about, "first": start, "count": end - start})
        stage.step(end - start)
    write_file(folder / "index.json", json.dumps({**about, "shards": shards}, indent=2).encode())


def _shards(encoder: LayerEncoder, inputs: Sequence[Any], prompt: str, row: int) -> Iterator[tuple[int, int]]:
    """Yield where each shard begins and ends. It depends on the inputs alone, so that a resumed run makes the same."""
    if medium_of(inputs[0], encoder.media) != "text":
        for start in range(0, len(inputs), _MEDIA):
            yield start, min(start + _MEDIA, len(inputs))
        return
    begin, held, most = 0, 0, 4096
    for start in range(0, len(inputs), most):
        counts = count_tokens(encoder, [prompt + text for text in inputs[start : start + most]])
        for place, count in enumerate(counts, start):
            if held and held + count * row > _SHARD_BYTES:
                yield begin, place
                begin, held = place, 0
            held += count * row
    yield begin, len(inputs)


class _States:
    """The states of a shard's inputs."""

    def __init__(
        self, encoder: LayerEncoder, reader: LayerReader, inputs: Sequence[Any], prompt: str, token_budget: int
    ) -> None:
        self.reader = reader
        self.found: dict[int, list[npt.NDArray[np.float32]]] = {}
        self.counted: list[npt.NDArray[np.bool_]] = [np.empty(0, dtype=bool)] * len(inputs)
        self._normed = final_norm(reader.model, reader.anatomy, reader.norm)
        empty = np.empty((0, 0), dtype=np.float32)
        self.found = {layer: [empty] * len(inputs) for layer in reader.layers}
        batches = batches_of(encoder, inputs, token_budget=token_budget, prompt=prompt)
        for _ in reader.embed(inputs, batches, tokens=self._take):
            pass

    def _take(self, layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        """Keep the states of a batch that are no padding."""
        rows = self._normed(states)[..., : self.reader.truncate_dim].float().cpu().numpy()
        real, counted = mask.bool().cpu().numpy(), self.reader.counting(mask).bool().cpu().numpy()
        for row, position in enumerate(positions):
            self.found[layer][position] = rows[row][real[row]]
            self.counted[position] = counted[row][real[row]]

    def tensors(self) -> dict[str, tuple[str, Sequence[int], Any]]:
        """Return the shard's tensors in blocks."""
        offsets = np.cumsum([0, *map(len, self.counted)], dtype=np.int64)
        total = int(offsets[-1])
        made: dict[str, tuple[str, Sequence[int], Any]] = {
            "offsets": ("int64", offsets.shape, [offsets]),
            "counted": ("bool", (total,), self.counted),
        }
        for layer, blocks in self.found.items():
            made[f"layer.{layer}"] = ("float32", (total, max(block.shape[1] for block in blocks)), blocks)
        return made
