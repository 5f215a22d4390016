"""A digest of every file of a model's folder that loading can read, except those without an effect on vectors."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midlayer_encoders._types import content_digest
from midlayer_encoders.files import read_json

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


def files_digest(folder: Path, *, code: bool) -> str:
    """Return a digest of the files of a model that can change its vectors beside its weights.

    Args:
        folder: with the model's ``config.json`` or ``modules.json``.
        code: whether the folder's own code may run (``trust_remote_code``), if its settings name any: it can read any
            file below the folder, and any setting. Otherwise only the folder and its modules' folders are read.
    """
    code = code and _names_code(folder)
    in_spec = set() if code else _in_spec(folder)
    contents: dict[str, str] = {}
    for path in _files(folder, below=code):
        name = path.relative_to(folder)
        weights = _WEIGHTS.fullmatch(path.name) and not (code and name.parts[1:])  # own modules read what they like
        if any(map(_NO_INPUT.fullmatch, name.parts)) or weights or name in in_spec or not path.is_file():
            continue
        if code:
            with path.open("rb") as file:
                contents[name.as_posix()] = hashlib.file_digest(file, "blake2b").hexdigest()
        elif not _READ_BY_CODE.fullmatch(path.name):
            contents[name.as_posix()] = content_digest(_content_read(path), 16)
    return content_digest(json.dumps(contents, sort_keys=True))


def _files(folder: Path, *, below: bool) -> Iterator[Path]:
    yield from folder.rglob("*") if below else folder.glob("*")
    for module in _modules(folder):
        if module["path"]:
            yield from (folder / module["path"]).rglob("*")
    yield from (folder / "additional_chat_templates").glob("*")


def _modules(folder: Path) -> Any:
    """Return the entries of a folder's ``modules.json``; none if there is no such file."""
    modules = folder / "modules.json"
    return read_json(modules) if modules.is_file() else []


def _names_code(folder: Path) -> bool:
    """Return whether a config names code for transformers to load, or a module is not of sentence-transformers."""
    configs = (path for path in _files(folder, below=True) if path.name.endswith("config.json") and path.is_file())
    return any(not module["type"].startswith("sentence_transformers.") for module in _modules(folder)) or any(
        b'"auto_map"' in path.read_bytes() for path in configs
    )


def _in_spec(folder: Path) -> set[Path]:
    """Return the files whose effect is in the spec: prompts and other settings, and the modules with their configs."""
    files, modules = {Path("config_sentence_transformers.json")}, _modules(folder)
    if all(_IN_SPEC.fullmatch(module["type"]) for module in modules[1:]):
        configs = {Path(module["path"], "config.json") for module in modules[1:]}
        files |= {Path("modules.json")} | configs - {Path(module["path"], "config.json") for module in modules[:1]}
    return files


def _content_read(path: Path) -> bytes:
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
