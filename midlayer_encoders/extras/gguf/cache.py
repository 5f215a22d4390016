"""Convert GGUF files to folders with a config and a tokenizer, which are cached; the weights stay in the file.

A tokenizer with SentencePiece's merges takes seconds to build.
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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock
from torch import Tensor

from midlayer_encoders import files
from midlayer_encoders.errors import CutError, FolderError, MidlayerError, ModelNotFoundError, OptionError
from midlayer_encoders.extras.gguf.config import default_pooling, read_config
from midlayer_encoders.extras.gguf.file import GgufFile, read_gguf
from midlayer_encoders.extras.gguf.tokenizer import build_tokenizer
from midlayer_encoders.extras.gguf.weights import read_weights
from midlayer_encoders.models.hub import local_only, model_file
from midlayer_encoders.models.transformers_internals import LOADING

#: Environment variable: the folder of converted models, or ``0`` to convert a file at every load.
GGUF_CACHE = "MIDLAYER_GGUF_CACHE"
#: Subfolder with the tokenizer: beside a config, transformers would choose its class by the type of the model.
TOKENIZER = "tokenizer"

_GENERATION = 7  # of the conversion; raise it when the content of a converted folder changes
_INDEX = "checksums.json"
_OLD_INDEX = "model.safetensors.index.json"  # of folders that held the weights, too
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}")
_SECONDS_KEPT = 30 * 24 * 3600

logger = logging.getLogger(__name__)


def gguf_cache() -> Path | None:
    """Return the folder of converted models, or ``None`` if the cache is off."""
    if (value := os.environ.get(GGUF_CACHE)) is not None:
        return files.expand_home(value) if value not in ("", "0") else None
    return files.expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "midlayer-encoders" / "gguf"


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file with the folder of its config and tokenizer."""

    folder: str
    file: GgufFile

    @property
    def tokenizer(self) -> str:
        """Folder of the tokenizer."""
        return str(Path(self.folder, TOKENIZER))

    @property
    def digest(self) -> str:
        """Digest of all but the tensors' bytes."""
        return self.file.digest

    @property
    def pooling_type(self) -> int:
        """llama.cpp's number of the pooling that the file names: 0 for none."""
        number = self.file.fields.get(f"{self.file.fields.get('general.architecture')}.pooling_type")
        return number if isinstance(number, int) else 0

    def default_pooling(self) -> str:
        """Return the pooling that the file names; the mean if it names none."""
        return default_pooling(self.file)

    def read_weights(self, complete: Any, blocks: int) -> dict[str, Tensor]:
        """Return the weights of a model with the first blocks, in float32."""
        return read_weights(self.file, complete, blocks)


@contextmanager
def converted_folder(
    model: str, gguf_file: str, revision: str | None, *, shown: str | None = None
) -> Iterator[GgufModel]:
    """Yield a GGUF file with the folder of its config and tokenizer.

    The folder is in the user's cache, or temporary if the cache is off or not writable. Errors call the file ``shown``.
    """
    path = _local_path(model, gguf_file, revision)
    if importlib.util.find_spec("gguf") is None:
        raise MidlayerError("`gguf_file` needs the gguf package: pip install 'midlayer-encoders[demo]'.")
    file = read_gguf(path)
    root = gguf_cache()
    if root is not None and not _is_writable(root):
        logger.warning("The cache %s is not writable: %s is converted at every load.", root, path.name)
        root = None
    with TemporaryDirectory() if root is None else nullcontext(root) as parent:
        folder = Path(parent, _name(file))
        try:
            with LOADING, FileLock(f"{folder}.lock"):  # in this order everywhere
                _write(folder, file)
            if root is not None:
                _remove_unused(root)
            yield GgufModel(str(folder), file)
        except (CutError, ModelNotFoundError, OptionError) as error:  # they name the user's file
            text, shown = str(error), shown or os.path.join(model, gguf_file)  # noqa: PTH118  (a name on the hub is no path)
            places = (str(folder / TOKENIZER), str(folder), repr(str(path.parent)), "The GGUF file", "the GGUF file")
            for place in places:
                text = text.replace(place, shown)
            error.args = (text,)
            raise


def _local_path(model: str, gguf_file: str, revision: str | None) -> Path:
    """Return the path of a GGUF file of a model, which is downloaded if it is on the hub."""
    folder = files.expand_home(model)
    if folder.is_dir() and not (folder / gguf_file).is_file():
        names = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))) or "none"
        raise ModelNotFoundError(f"There is no file {str(folder / gguf_file)!r}. GGUF files there: {names}.")
    local = local_only(model, revision, filename=gguf_file)
    return Path(str(model_file(model, gguf_file, revision=revision, local=local)))


def _is_writable(folder: Path) -> bool:
    try:
        files.make_folder(folder)
    except FolderError:
        return False
    return os.access(folder, os.W_OK)


def _write(folder: Path, file: GgufFile) -> None:
    """Write the config and the tokenizer of a file, unless they are there."""
    index = folder / _INDEX
    content = files.read_artifact(index, files.read_sealed)
    if content is not None and content["files"] == _checksums(folder):
        os.utime(index)  # the last use
        return
    shutil.rmtree(folder, ignore_errors=True)

    def write(staging: Path) -> None:
        read_config(file).save_pretrained(staging)
        build_tokenizer(file.fields).save_pretrained(staging / TOKENIZER)
        (staging / _INDEX).write_bytes(files.sealed({"files": _checksums(staging)}))

    files.write_folder(folder, write)
    logger.info("Config and tokenizer of the GGUF file are cached in %s (%s names another).", folder, GGUF_CACHE)


def _checksums(folder: Path) -> dict[str, str]:
    return {name: value for name, value in files.file_checksums(folder).items() if name != _INDEX}


def _remove_unused(root: Path) -> None:
    """Remove the folders of files that were not used for a month; earlier versions also cached their weights."""
    oldest = time.time() - _SECONDS_KEPT
    for folder in root.iterdir():
        used = [path.stat().st_mtime for name in (_INDEX, _OLD_INDEX) if (path := folder / name).is_file()]
        if _NAME.fullmatch(folder.name) and used and max(used) < oldest:
            shutil.rmtree(folder, ignore_errors=True)
            Path(f"{folder}.lock").unlink(missing_ok=True)


def _name(file: GgufFile) -> str:
    """Return the name of a file's folder: the digests of the file and of the libraries that convert it."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "gguf", "tokenizers")]
    conversion = hashlib.blake2b(json.dumps([_GENERATION, *versions]).encode(), digest_size=4).hexdigest()
    return f"{file.digest}-{conversion}"
