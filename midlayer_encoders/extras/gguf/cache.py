"""The door of GGUF files: each becomes a folder with a config, a tokenizer and modules, which is cached.

The weights stay in the file. A tokenizer with SentencePiece's merges takes seconds to build.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock
from torch import Tensor

from midlayer_encoders import files
from midlayer_encoders.errors import CutError, FolderError, MidlayerError, ModelNotFoundError, OptionError
from midlayer_encoders.extras.gguf.config import pooling_name, read_config
from midlayer_encoders.extras.gguf.file import GgufFile, read_gguf
from midlayer_encoders.extras.gguf.tokenizer import build_tokenizer
from midlayer_encoders.extras.gguf.weights import read_weights
from midlayer_encoders.models.transformers_internals import LOADING

#: Environment variable: the folder of converted models, or ``0`` to convert a file once in each process.
GGUF_CACHE = "MIDLAYER_GGUF_CACHE"
#: Subfolder with the tokenizer: beside a config, transformers would choose its class by the type of the model.
TOKENIZER = "tokenizer"

_GENERATION = 8  # of the conversion; raise it when the content of a converted folder changes
_INDEX = "checksums.json"
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}")
_SECONDS_KEPT = 30 * 24 * 3600

logger = logging.getLogger(__name__)


def gguf_cache() -> Path | None:
    """Return the folder of converted models, or ``None`` if the cache is off."""
    if (value := os.environ.get(GGUF_CACHE)) is not None:
        return files.expand_home(value) if value not in ("", "0") else None
    return files.expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "midlayer-encoders" / "gguf"


@dataclass(frozen=True)
class GgufWeights:
    """Reads the weights of a file; errors call it ``shown``."""

    path: Path
    shown: str

    def __call__(self, complete: Any, blocks: int) -> dict[str, Tensor]:
        """Return the weights of a model with the first blocks, in float32."""
        with _named_errors(self.shown):
            return read_weights(read_gguf(self.path), complete, blocks)


def converted_folder(path: Path, shown: str) -> tuple[str, None, str, str, GgufWeights]:
    """Return the fields of a file's location: the folder of its config, tokenizer and modules, and its weights.

    The folder is in the user's cache, or temporary if the cache is off or not writable. Errors call the file ``shown``.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MidlayerError("`gguf_file` needs the gguf package: pip install 'midlayer-encoders[demo]'.")
    with _named_errors(shown):
        file = read_gguf(path)
        root = _writable_cache(path.name)
        folder = (root or Path(_temporary_cache().name)) / _name(file)
        with LOADING, FileLock(f"{folder}.lock"):  # in this order everywhere
            _write(folder, file)
        if root is not None:
            _remove_unused(root)
    return str(folder), None, shown, str(folder / TOKENIZER), GgufWeights(path, shown)


@contextmanager
def _named_errors(shown: str) -> Iterator[None]:
    """Let errors inside this block name the user's file."""
    try:
        yield
    except (CutError, ModelNotFoundError, OptionError) as error:
        error.args = (re.sub("[Tt]he GGUF file", lambda _: shown, str(error)),)
        raise


def _writable_cache(name: str) -> Path | None:
    root = gguf_cache()
    try:
        if root is not None:
            files.make_folder(root)
            files.check_writable(root)
    except FolderError:
        logger.warning("The cache %s is not writable: %s is converted in every process.", root, name)
        return None
    return root


@cache
def _temporary_cache() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="midlayer-gguf-")


def _write(folder: Path, file: GgufFile) -> None:
    """Write the config, the tokenizer and the modules of a file, unless they are there."""
    index = folder / _INDEX
    content = files.read_artifact(index, files.read_with_checksum)
    if content is not None and content["files"] == _checksums(folder):
        os.utime(index)  # the last use
        return
    shutil.rmtree(folder, ignore_errors=True)

    def write(staging: Path) -> None:
        config = read_config(file)
        config.save_pretrained(staging)
        build_tokenizer(file.fields).save_pretrained(staging / TOKENIZER)
        _write_modules(staging, pooling_name(file), config.hidden_size)
        (staging / _INDEX).write_bytes(files.dump_with_checksum({"files": _checksums(staging)}))

    files.write_folder(folder, write)
    logger.info("Config and tokenizer of the GGUF file are cached in %s (%s names another).", folder, GGUF_CACHE)


def _write_modules(folder: Path, pooling: str | None, width: int) -> None:
    """Write the modules of sentence-transformers that a file's pooling stands for; a reranker's is a score."""
    if pooling is None:
        return
    types = ["Transformer"]
    if pooling == "rank":
        files.write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    else:
        from sentence_transformers.sentence_transformer.modules import Pooling

        (folder / "1_Pooling").mkdir()
        Pooling(width, pooling_mode=pooling).save(str(folder / "1_Pooling"))
        types.append("Pooling")
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{name}" * bool(number)}
        | {"type": f"sentence_transformers.models.{name}"}
        for number, name in enumerate(types)
    ]
    files.write_json(folder / "modules.json", modules)


def _checksums(folder: Path) -> dict[str, str]:
    return {name: value for name, value in files.file_checksums(folder).items() if name != _INDEX}


def _remove_unused(root: Path) -> None:
    """Remove the folders of files that were not used for a month."""
    oldest = time.time() - _SECONDS_KEPT
    for index in root.glob(f"*/{_INDEX}"):
        if _NAME.fullmatch(index.parent.name) and index.stat().st_mtime < oldest:
            shutil.rmtree(index.parent, ignore_errors=True)
            Path(f"{index.parent}.lock").unlink(missing_ok=True)


def _name(file: GgufFile) -> str:
    """Return the name of a file's folder: the digests of the file and of the libraries that convert it."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "gguf", "tokenizers")]
    conversion = hashlib.blake2b(json.dumps([_GENERATION, *versions]).encode(), digest_size=4).hexdigest()
    return f"{file.digest}-{conversion}"
