"""Write the unpooled states of many layers to a folder of safetensors shards; a run resumes shard by shard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from midlayer_encoders._types import Stage
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.files import write_file
from midlayer_encoders.media import medium_of
from midlayer_encoders.reading.batches import batches_of, count_tokens
from midlayer_encoders.reading.norm import final_norm
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.vectors.vector_files import Tensor, write_safetensors

_SHARD_BYTES = 128 * 2**20
_SHARD_MEDIA = 32  # images or waveforms per shard, since their number of states is unknown
_COUNTED = 4096  # texts tokenized at a time


def write_states(
    folder: Path,
    encoder: LayerEncoder,
    reader: LayerReader,
    inputs: Sequence[Any],
    *,
    dim: int,
    prompt: str,
    token_budget: int,
    metadata: Mapping[str, Any],
    stage: Stage,
) -> None:
    """Write the states of all inputs to shards, except those that exist, and then ``index.json``.

    A shard holds ``layer.K`` ``(T, D)`` per layer, the concatenated states of its inputs; ``offsets`` ``(n + 1)``,
    where the states of each input begin; and ``counted`` ``(T)``, which states the pooling includes.

    Args:
        folder: folder of the shards.
        encoder: encoder with the whole model.
        reader: reader of its layers.
        inputs: texts, images or waveforms.
        dim: number of dimensions of a state.
        prompt: prepended to each text.
        token_budget: tokens per batch.
        metadata: description of the states.
        stage: counts inputs.
    """
    shards = []
    for number, (start, end) in enumerate(_shards(encoder, inputs, prompt, 4 * dim * len(reader.layers))):
        path = folder / f"states-{number:06d}.safetensors"
        shards.append({"file": path.name, "first": start, "inputs": end - start})
        if not path.is_file():
            tensors = _read_states(encoder, reader, inputs[start:end], prompt, token_budget)
            write_safetensors(path, tensors, {**metadata, "first": start, "count": end - start})
        stage.step(end - start)
    write_file(folder / "index.json", json.dumps({**metadata, "shards": shards}, indent=2).encode())


def _shards(encoder: LayerEncoder, inputs: Sequence[Any], prompt: str, token_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each shard, which depend on the inputs only, so that a run can resume."""
    if medium_of(inputs[0], encoder.media) != "text":
        for start in range(0, len(inputs), _SHARD_MEDIA):
            yield start, min(start + _SHARD_MEDIA, len(inputs))
        return
    begin = size = 0
    for start in range(0, len(inputs), _COUNTED):
        counts = count_tokens(encoder, [prompt + text for text in inputs[start : start + _COUNTED]])
        for index, count in enumerate(counts, start):
            if size and size + count * token_bytes > _SHARD_BYTES:
                yield begin, index
                begin, size = index, 0
            size += count * token_bytes
    yield begin, len(inputs)


def _read_states(
    encoder: LayerEncoder, reader: LayerReader, inputs: Sequence[Any], prompt: str, token_budget: int
) -> dict[str, Tensor]:
    """Return the tensors of a shard in blocks, one per input."""
    states: dict[int, dict[int, npt.NDArray[np.float32]]] = {layer: {} for layer in reader.layers}
    counted: dict[int, npt.NDArray[np.bool_]] = {}
    norm = final_norm(reader.model, reader.anatomy, reader.norm)

    def receive(layer: int, batch: torch.Tensor, mask: torch.Tensor, positions: list[int]) -> None:
        rows = norm(batch)[..., : reader.truncate_dim].float().cpu().numpy()
        real = mask.bool().cpu().numpy()
        pooled = reader.counting(mask).bool().cpu().numpy()
        for row, position in enumerate(positions):
            states[layer][position] = rows[row][real[row]]
            counted[position] = pooled[row][real[row]]

    batches = batches_of(encoder, inputs, token_budget=token_budget, prompt=prompt)
    for _ in reader.embed(inputs, batches, tokens=receive):
        pass
    order = range(len(inputs))
    offsets = np.cumsum([0, *(len(counted[position]) for position in order)], dtype=np.int64)
    total = int(offsets[-1])
    tensors: dict[str, Tensor] = {
        "offsets": ("int64", offsets.shape, [offsets]),
        "counted": ("bool", (total,), [counted[position] for position in order]),
    }
    for layer, blocks in states.items():
        shape = total, blocks[0].shape[1]
        tensors[f"layer.{layer}"] = ("float32", shape, [blocks[position] for position in order])
    return tensors
