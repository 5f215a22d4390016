"""Expand the tensors of a GGUF file into the weights of a transformers model; a tensor without a place is refused."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders.extras.gguf.config import ARCHITECTURES, architecture, frequency_divisors, unreadable
from midlayer_encoders.extras.gguf.file import GgufFile

_BLOCK = re.compile(r"(?:enc\.)?blk\.(\d+)\.")
_UNREAD = re.compile(r"output\.(weight|bias)|dec\..*")  # the head, and the decoder of an encoder-decoder
_PREFIXES = ("model.", "", "transformer.", "backbone.")  # of the names of weights in complete models
_MAX_NAMED = 5


def tensor_names(arch: str, model: nn.Module, depth: int) -> dict[str, str]:
    """Return the name of the tensor of each parameter of a model; parameters that GGUF does not have are left out."""
    import gguf

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, depth)
    names: dict[str, str] = {}
    for parameter, _ in model.named_parameters():
        candidates = (table.get_name(f"{prefix}{parameter}", try_suffixes=(".weight", ".bias")) for prefix in _PREFIXES)
        if (name := next(filter(None, candidates), None)) is not None:
            names[parameter] = name
    return names


def read_weights(file: GgufFile, complete: Any, blocks: int) -> dict[str, Tensor]:
    """Return the weights of a model with the first blocks of a file, in float32.

    Args:
        file: a GGUF file.
        complete: its model with all blocks, without weights.
        blocks: number of blocks to read.

    Raises:
        CutError: if the complete model lacks a tensor of the file, or the file one of the model.
    """
    arch = architecture(file)
    if (parts := file.fields.get("split.count", 1)) > 1:
        raise unreadable(f"is one of {parts} parts. Merge them with llama-gguf-split --merge")
    names = tensor_names(arch, complete, complete.config.num_hidden_layers)
    used = {*names.values(), *frequency_divisors(file)}
    optional = {name for rule in ARCHITECTURES[arch].get("by_tensors", {}).values() for name in rule["tensors"]}
    unknown = [name for name in file.tensors if name not in used and not _UNREAD.fullmatch(name)]
    if unknown:
        raise unreadable(f"has tensors that transformers' {type(complete).__name__} has no place for: {_list(unknown)}")
    absent = [name for name in names.values() if name not in file.tensors]
    if lacking := [name for name in absent if not (name.endswith(".bias") and _BLOCK.sub("", name) in optional)]:
        raise unreadable(f"lacks tensors of its architecture: {_list(lacking)}")
    kept = {
        parameter: name
        for parameter, name in names.items()
        if (block := _BLOCK.match(name)) is None or int(block[1]) < blocks
    }
    shapes = dict(complete.named_parameters())
    convert = _converter(arch, complete.config)

    def expand(parameter: str) -> Tensor:
        name, shape = kept[parameter], shapes[parameter].shape
        if name not in file.tensors:  # llama.cpp adds no bias then
            return torch.zeros(shape)
        tensor = file.tensors[name]
        try:
            values = torch.from_numpy(convert(tensor.values(), name)).contiguous()
            values = _by_group(values, complete.config) if "attn_qkv" in name else values
        except (ValueError, RuntimeError) as reason:  # of reshaping, or of a type that gguf does not expand
            raise unreadable(f"has a tensor {name} of shape {tensor.shape} that cannot be read: {reason}") from reason
        if values.shape != shape:
            fields = f"the fields of the file give {tuple(shape)} to {parameter}"
            raise unreadable(f"has a tensor {name} of shape {tensor.shape}, but {fields}")
        return values

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return dict(zip(kept, pool.map(expand, kept), strict=True))


def _converter(arch: str, config: Any) -> Callable[[Any, str], Any]:
    """Return transformers' function from the values and the name of a tensor to the values of a weight."""
    from transformers import modeling_gguf_pytorch_utils as converting

    kinds = {**converting.TENSOR_PROCESSORS, "gemma": converting.Gemma2TensorProcessor}
    processor = kinds.get(arch, converting.TensorProcessor)(config=config.to_dict())
    return lambda values, name: processor.process(values, name).weights


def _by_group(weight: Tensor, config: Any) -> Tensor:
    """Return rows of queries, keys and values in Falcon's order: for each group its queries, its key and its value."""
    groups = getattr(config, "num_kv_heads", 1)
    if groups == 1:
        return weight
    heads = config.num_attention_heads
    size = len(weight) // (heads + 2 * groups)
    parts = torch.split(weight, [heads * size, groups * size, groups * size])
    grouped = [part.reshape(groups, -1, *weight.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(weight.shape)


def _list(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")
