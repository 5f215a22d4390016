"""Small GGUF files, made in place, of the architectures that can be cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np

DEPTH = 4


def save_gguf(path: Path, arch: str, *, depth: int = DEPTH, parts: int = 1, alignment: int | None = None) -> Path:
    """Write a file whose blocks hold 8-bit quantized weights and norms in float32, with values for each block."""
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(depth)
    writer.add_embedding_length(64)
    writer.add_uint32(f"{arch}.pooling_type", 2)
    writer.add_array(f"{arch}.attention.head_count_kv", list(range(1, depth + 1)))
    writer.add_array(f"{arch}.rope.dimension_sections", [1, 2, 3])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü", "d"][:DEPTH])
    if parts > 1:
        writer.add_uint16("split.count", parts)
    kinds = gguf.MODEL_TENSORS[{name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[arch]]
    names = [gguf.TENSOR_NAMES[kind] for kind in kinds]  # all that such a file may hold, inside of blocks and outside
    for name in dict.fromkeys(name.format(bid=block) for block in range(depth) for name in names):
        values = rng.normal(size=(64,) if "norm" in name else (8, 64)).astype(np.float32)
        if "norm" in name:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
