"""Digests of a model's weights, and of every other file of its folder that can change its vectors."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders._types import content_digest
from midlayer_encoders.files import read_json

_CHUNK = 1 << 20
# Never an input of a model: its card, what training leaves to continue, and the files of other programs.
_NO_INPUT = re.compile(
    r"README\.md|LICENSE.*|(optimizer|scheduler|scaler|rng_state.*)\.(pt|pth|bin)|training_args\.bin|trainer_state\.json"
    r"|events\.out\.tfevents.*|.*\.(lock|pyc)|\.git|\.gitattributes|\.gitignore|\.cache|\.DS_Store|__pycache__"
)
# Weights that loading puts into modules: `weights_digest` identifies them without a second read.
_WEIGHTS = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
# Read by the folder's own code at most: other weights, code, pages, images, tables and logs.
_READ_BY_CODE = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gg[a-z]+|h5|msgpack|ot|onnx|onnx_data|py|md|html|pdf|png|jpe?g|gif|svg|csv|parquet|log)"
)
# Modules of sentence-transformers whose config is in the spec.
_IN_SPEC = re.compile(r"sentence_transformers\..*\b(Pooling|Dense|Normalize|Dropout|LayerNorm)")
#: Settings that differ between copies of a model: names, releases, and the dtype, which ``weights_digest`` contains.
COPIED = {
    "_name_or_path", "name_or_path", "transformers_version", "__version__", "dtype", "torch_dtype", "is_local",
    "local_files_only", "vocab_file", "tokenizer_file", "merges_file",
}  # fmt: skip
#: Settings that transformers reads only in training, in a head or to generate.
UNREAD = {
    "architectures", "use_cache", "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params",
    "initializer_range", "processor_class",
}  # fmt: skip


def weights_digest(module: nn.Module) -> str:
    """Return twelve hexadecimal digits that identify the weights on every device.

    The integers of each tensor are summed on its device with weights by position, modulo :math:`2^{64}`, in one pass
    over memory.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = weights_digest(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(2)
        >>> before == weights_digest(layer)
        False
    """
    digest = hashlib.blake2b(digest_size=6)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(str(tensor_checksum(tensor)).encode())
    return digest.hexdigest()


def tensor_checksum(tensor: Tensor) -> int:
    """Return the sum of the integers of a tensor with weights by position, modulo :math:`2^{64}`."""
    # Eight bytes are read as two integers: the low bits of round numbers are zero, and a sum of such multiples of 2^52
    # modulo 2^64 would lose information.
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    flat = tensor.detach().contiguous().flatten().view(integers)
    positions = torch.arange(1, min(_CHUNK, max(flat.numel(), 1)) + 1, device=flat.device) * 2654435761 + 12345
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        total = total * 6364136223846793005 + number + (chunk.long() * positions[: chunk.numel()]).sum()
    return int(total)


def files_digest(folder: Path, *, code: bool) -> str:
    """Return a digest of the files of a model that can change its vectors beside its weights.

    Files whose effect is in the spec are left out: prompts and other settings, and the modules with their configs.

    Args:
        folder: with the model's ``config.json`` or ``modules.json``.
        code: whether the folder's own code may run (``trust_remote_code``), if its settings name any: it can read any
            file below the folder, and any setting. Otherwise only the folder and its modules' folders are read.
    """
    modules: Any = read_json(folder / "modules.json") if (folder / "modules.json").is_file() else []
    folders = [folder / module["path"] for module in modules if module["path"]]
    paths = [path for module in folders for path in module.rglob("*")]
    paths += [*folder.glob("*"), *(folder / "additional_chat_templates").glob("*")]
    if code:
        below = [*folder.rglob("*"), *paths]
        configs = (path.read_bytes() for path in below if path.name.endswith("config.json") and path.is_file())
        own_modules = [module for module in modules if not module["type"].startswith("sentence_transformers.")]
        code = bool(own_modules) or any(b'"auto_map"' in config for config in configs)
        paths = below if code else paths
    in_spec = {folder / "config_sentence_transformers.json"}
    if all(_IN_SPEC.fullmatch(module["type"]) for module in modules[1:]):
        first, *later = [folder / module["path"] / "config.json" for module in modules] or [None]
        in_spec |= {folder / "modules.json", *later} - {first}
    contents: dict[str, str] = {}
    for path in paths:
        name = path.relative_to(folder)
        weights = _WEIGHTS.fullmatch(path.name) and not (code and name.parts[1:])  # own modules read what they like
        if any(map(_NO_INPUT.fullmatch, name.parts)) or weights or not path.is_file():
            continue
        if code:
            with path.open("rb") as file:
                contents[name.as_posix()] = hashlib.file_digest(file, "blake2b").hexdigest()
        elif path not in in_spec and not _READ_BY_CODE.fullmatch(path.name):
            contents[name.as_posix()] = content_digest(_read_content(path), 16)
    return content_digest(json.dumps(contents, sort_keys=True))


def _read_content(path: Path) -> bytes:
    """Return the content of a file, without the settings of a config that have no effect."""
    content = path.read_bytes()
    if "config" not in path.name or path.suffix != ".json":  # a vocabulary may have tokens of these names
        return content
    try:
        return json.dumps(read_settings(json.loads(content)), sort_keys=True).encode()
    except (ValueError, RecursionError):  # no file of settings, or loading would have raised
        return content


def read_settings(config: Any) -> Any:
    """Return a config, and the configs inside it, without the settings that have no effect."""
    if not isinstance(config, dict):
        return config
    return {
        name: read_settings(value) if name.endswith("_config") and name != "quantization_config" else value
        for name, value in config.items()
        if name not in COPIED | UNREAD
    }
