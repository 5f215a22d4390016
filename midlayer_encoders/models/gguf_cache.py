"""Convert GGUF files to folders of safetensors, once: a converted model is cached under the digest of its file.

transformers converts names and weights. It would dequantize every tensor of a file at every load, and parse its
vocabulary several times.
"""

import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
from filelock import FileLock
from torch import nn

from midlayer_encoders import files
from midlayer_encoders.errors import CutError, FolderError, MidlayerError, ModelNotFoundError, OptionError
from midlayer_encoders.models.gguf_tokenizer import build_tokenizer, read_fields, read_value
from midlayer_encoders.models.hub import load_config, local_only, model_file
from midlayer_encoders.models.transformers_internals import LOADING

#: Environment variable: the folder of converted models, or ``0`` to convert a file at every load.
GGUF_CACHE = "MIDLAYER_GGUF_CACHE"
#: Subfolder with the tokenizer: beside a config, transformers would choose its class by the type of the model.
TOKENIZER = "tokenizer"

_GENERATION = 4  # of the conversion; raise it when the content of a converted folder changes
_INDEX = "model.safetensors.index.json"  # lists the weights, and the checksum of every file
_OTHER = "other.safetensors"  # all weights outside of the blocks
_LONG = 1000  # items of an array that only the tokenizer reads
_BLOCK = re.compile(r"(?:enc\.)?blk\.(\d+)\.")

logger = logging.getLogger(__name__)


def gguf_cache() -> Path | None:
    """Return the folder of converted models, or ``None`` if the cache is off."""
    if (value := os.environ.get(GGUF_CACHE)) is not None:
        return files.expand_home(value) if value not in ("", "0") else None
    return files.expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "midlayer-encoders" / "gguf"


@contextmanager
def converted_folder(model: str, gguf_file: str, revision: str | None) -> Iterator[tuple[str, Path]]:
    """Yield a folder with the config and the tokenizer of a GGUF file, and the path of the file.

    The folder is in the user's cache, or temporary if the cache is off or not writable. :func:`add_blocks` adds the
    weights.
    """
    path = _local_path(model, gguf_file, revision)
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as reason:
        raise MidlayerError("`gguf_file` needs gguf and accelerate: pip install 'midlayer-encoders[demo]'.") from reason
    root = gguf_cache()
    if root is not None and not _is_writable(root):
        logger.warning("The cache %s is not writable: %s is converted at every load.", root, path.name)
        root = None
    with TemporaryDirectory() if root is None else nullcontext(root) as parent:
        folder = Path(parent, _key(path))
        try:
            with LOADING, FileLock(f"{folder}.lock"):  # in this order everywhere
                _write_base(folder, path)
            yield str(folder), path
        except (CutError, ModelNotFoundError, OptionError) as error:  # they name the user's file
            text = str(error)
            for place in (str(folder / TOKENIZER), str(folder), repr(str(path.parent)), "the GGUF file"):
                text = text.replace(place, os.path.join(model, gguf_file))  # noqa: PTH118  (a name on the hub is no path)
            error.args = (text,)
            raise


def _local_path(model: str, gguf_file: str, revision: str | None) -> Path:
    """Return the path of a GGUF file of a model, which is downloaded if it is on the hub."""
    folder = files.expand_home(model)
    if folder.is_dir() and not (folder / gguf_file).is_file():
        names = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))) or "none"
        raise ModelNotFoundError(f"`gguf_file` must be in {model!r}, but there is no {gguf_file!r}. It has: {names}.")
    local = local_only(model, revision, filename=gguf_file)
    return Path(str(model_file(model, gguf_file, revision=revision, local=local)))


def _is_writable(folder: Path) -> bool:
    try:
        files.make_folder(folder)
    except FolderError:
        return False
    return os.access(folder, os.W_OK)


def add_blocks(folder: Path, blocks: str, number: int, load: Callable[[], nn.Module]) -> None:
    """Add the first blocks of a model, and its other weights, to a converted folder that lacks them.

    Args:
        folder: a converted folder; a file whose checksum differs from the recorded one is written again.
        blocks: path of the list of blocks in the model.
        number: number of blocks.
        load: loads the model with these blocks from the GGUF file, in float32.
    """
    from safetensors.torch import save_file

    with LOADING, FileLock(f"{folder}.lock"):
        checksums, weight_map = _read_index(folder)
        if _intact(folder, checksums, [_OTHER, *(_block_file(block) for block in range(number))]):
            return
        with _fast_reader(number):
            weights = load().state_dict()
        by_file: dict[str, dict[str, Any]] = {}
        for name, weight in weights.items():
            block = re.match(rf"{re.escape(blocks)}\.(\d+)\.", name)
            by_file.setdefault(_block_file(int(block[1])) if block else _OTHER, {})[name] = weight.contiguous()
        for file, tensors in by_file.items():
            with files.atomic_write(folder / file) as temporary:
                save_file(tensors, temporary, metadata={"format": "pt"})
                checksums[file] = _checksum(temporary)
            weight_map |= dict.fromkeys(tensors, file)
        files.write_file(folder / _INDEX, _index(checksums, weight_map))


def _write_base(folder: Path, path: Path) -> None:
    """Write the config, the tokenizer and an empty list of weights, unless they are there."""
    checksums, _ = _read_index(folder)
    if checksums and _intact(folder, checksums, [name for name in checksums if not name.endswith(".safetensors")]):
        return
    shutil.rmtree(folder, ignore_errors=True)

    def write(staging: Path) -> None:
        tokenizer = build_tokenizer(read_fields(path))
        try:
            with _fast_reader():
                config = load_config(str(path.parent), local=True, gguf_file=path.name)
        except Exception as reason:  # damaged files fail in many ways
            cause = str(reason.__cause__ or reason).rstrip(".")
            raise ModelNotFoundError(
                "`gguf_file` must be a complete file of an architecture that transformers can read, but the GGUF file "
                f"is not: {cause}. Download it again, or pass the folder of the original model."
            ) from reason
        config.save_pretrained(staging)
        tokenizer.save_pretrained(staging / TOKENIZER)
        paths = [path for path in staging.rglob("*") if path.is_file()]
        checksums = {path.relative_to(staging).as_posix(): _checksum(path) for path in paths}
        (staging / _INDEX).write_bytes(_index(checksums, {}))

    files.write_folder(folder, write)


def _index(checksums: dict[str, int], weight_map: dict[str, str]) -> bytes:
    return files.sealed({"metadata": {"checksums": checksums}, "weight_map": weight_map})


def _read_index(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Return the checksum of each file and the file of each weight, both empty if the index is absent or damaged."""
    index = files.read_artifact(folder / _INDEX, files.read_sealed)
    return ({}, {}) if index is None else (index["metadata"]["checksums"], index["weight_map"])


def _block_file(block: int) -> str:
    return f"block-{block}.safetensors"


def _key(path: Path) -> str:
    """Return the name of a file's converted folder: its digest, and that of the libraries that convert it."""
    stat = path.stat()
    versions = [importlib.metadata.version(name) for name in ("transformers", "gguf", "tokenizers")]
    conversion = hashlib.blake2b(json.dumps([_GENERATION, *versions]).encode(), digest_size=4).hexdigest()
    return f"{_file_digest(path, stat.st_size, stat.st_mtime_ns)}-{conversion}"


@lru_cache(maxsize=64)
def _file_digest(path: Path, *_: int) -> str:
    """Return the digest of a file; its size and the time of its last change tell whether it is still the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while content := file.read(2**24):
            checksum = zlib.crc32(content, checksum)
    return checksum


def _intact(folder: Path, checksums: dict[str, int], names: list[str]) -> bool:
    return all((folder / name).is_file() and _checksum(folder / name) == checksums.get(name) for name in names)


@contextmanager
def _fast_reader(blocks: int | None = None) -> Iterator[None]:
    """Make transformers skip the vocabulary of a GGUF file, and the tensors after its first blocks.

    ``gguf.GGUFReader`` creates several arrays for each token, which takes ten seconds for 49,000 tokens.
    """
    gguf: Any = importlib.import_module("gguf")
    original: Any = gguf.GGUFReader

    class Reader(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if blocks is not None:
                self.tensors: list[Any] = [tensor for tensor in self.tensors if _is_read(tensor.name, blocks)]

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY and self.byte_order == "I":
                kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
                if count > _LONG:  # the length alone counts
                    _, end = read_value(memoryview(self.data), orig_offs, raw_type)
                    types = [gguf.GGUFValueType(raw_type), gguf.GGUFValueType(kind)]
                    return end - orig_offs, [np.zeros(1, dtype=np.uint8)], [0] * count, types
            return super()._get_field_parts(orig_offs, raw_type)

    with mock.patch.object(gguf, "GGUFReader", Reader):
        yield


def _is_read(tensor: str, blocks: int) -> bool:
    """Return whether a tensor belongs to an encoder with these blocks."""
    match = _BLOCK.match(tensor)
    return not tensor.startswith("dec.") and (match is None or int(match[1]) < blocks)
