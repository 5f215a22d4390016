"""Fixed inputs of a callback: the transformer inside the trained module, and batches of texts or tensors for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import MIN_MEASURED_TOKENS
from midlayer_encoders.errors import AnatomyError, OptionError
from midlayer_encoders.measuring import num_views
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.selection.ridge import check_labels
from midlayer_encoders.views.text_views import augment

from ._settings import CallbackSettings

_NOT_MODEL_INPUTS = {"labels", "label", "decoder_input_ids", "return_dict", "output_hidden_states"}


@dataclass(frozen=True)
class InputBatch:
    """A batch of inputs and views for the model.

    Attributes:
        positions: ascending positions of the rows in the list of all inputs, followed by all first views, and so on.
        inputs: keyword arguments of the model's forward.
    """

    positions: list[int]
    inputs: dict[str, Tensor]


# --- the transformer --------------------------------------------------------------------------------------------------


def find_backbone(root: nn.Module, path: str = "auto") -> nn.Module:
    """Return the transformer inside ``root``.

    Args:
        root: a LightningModule, a SentenceTransformer, or the model itself.
        path: path of the transformer inside ``root``; ``"auto"`` returns the only Hugging Face model.

    Raises:
        AnatomyError: if there is no such module, or if ``"auto"`` finds no model or several.
    """
    models = _hugging_face_models(root)
    if path != "auto":
        try:
            return root.get_submodule(path)
        except AttributeError:
            raise AnatomyError(
                f"`module` must be the path of a module in {type(root).__name__}, but it has no {path!r}. "
                f"Its transformers are: {_listed(models) or 'none'}."
            ) from None
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        raise AnatomyError(
            f"{type(root).__name__} holds {len(models)} transformers: {_listed(models)}. "
            "Pass the path of one as `module`."
        )
    lists: dict[str, nn.Module] = {
        name: module for name, module in root.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    raise AnatomyError(
        f"{type(root).__name__} holds no Hugging Face model. Its lists of modules are: {_listed(lists) or 'none'}. "
        "Pass the path of the transformer as `module` and of its list of blocks, within it, as `blocks`."
    )


def has_backbone(root: nn.Module) -> bool:
    """Return True if ``root`` already contains a Hugging Face model."""
    return bool(_hugging_face_models(root))


def _hugging_face_models(root: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost Hugging Face models by path, including compiled and wrapped ones."""
    models: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        is_nested = any(name.startswith(f"{outer}.") or not outer for outer in models)
        if isinstance(module, PreTrainedModel) and not is_nested:
            models[name] = module
    return models


def _listed(modules: dict[str, nn.Module]) -> str:
    return ", ".join(f"{name!r} ({type(module).__name__})" for name, module in modules.items())


def model_name(model: nn.Module) -> str:
    """Return the model's name on the hub, or the name of its class."""
    config = getattr(model, "config", None)
    return str(getattr(config, "name_or_path", "") or type(model).__name__)


def module_path(root: nn.Module, model: nn.Module) -> str:
    """Return the path of ``model`` in ``root``, without the wrappers that ``torch.compile`` adds."""
    path = next(name for name, module in root.named_modules() if module is model)
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _input_names(model: nn.Module) -> set[str] | None:
    """Return the names of the forward's arguments, or ``None`` if it accepts any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) and not getattr(model, "config", None):
        return None
    return {parameter.name for parameter in parameters}


# --- batches ----------------------------------------------------------------------------------------------------------


def make_batches(settings: CallbackSettings, model: nn.Module, tokenizer: Any) -> tuple[list[InputBatch], int]:
    """Return batches of the inputs and of the views that the metrics need, and the number of inputs.

    The states of the global random generators do not change.

    Args:
        settings: options of the callback.
        model: the transformer.
        tokenizer: the trainer's tokenizer, used if the settings have none.
    """
    inputs = settings.texts_or_dataloader
    views = settings.views
    num_needed = num_views(settings.make_metrics([0]))
    if not isinstance(views, int) and len(views) < num_needed:
        raise OptionError(f"`views` must hold {num_needed} views for these metrics, but got {len(views)}.")
    with isolated_random():
        if isinstance(inputs, Sequence) and (not inputs or isinstance(inputs[0], str)):
            tokenizer = tokenizer if settings.tokenizer is None else settings.tokenizer
            return _text_batches(settings, num_needed, model, tokenizer), len(inputs)
        if isinstance(views, int) and num_needed:
            raise OptionError(
                "`views` must be given, a dataloader for each, where the inputs are a dataloader and a metric compares "
                "views (InfoNCE, LiDAR, DiME). Pass them, texts instead, or other `metrics`."
            )
        loaders = [inputs] if isinstance(views, int) else [inputs, *views[:num_needed]]
        passes = [_read_loader(loader, model, settings.max_inputs, view) for view, loader in enumerate(loaders, -1)]
    counts = [sum(len(batch.positions) for batch in batches) for batches in passes]
    if len(set(counts)) > 1:
        raise OptionError(f"`views` must give one view for each input, but the numbers are {sorted(set(counts))}.")
    return [
        InputBatch([view * counts[0] + position for position in batch.positions], batch.inputs)
        for view, batches in enumerate(passes)
        for batch in batches
    ], counts[0]


def class_indices(labels: Sequence[int | str], count: int) -> Tensor:
    """Return the class of each of ``count`` inputs as an index, in order of first appearance."""
    classes = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    indices = torch.tensor([classes[label] for label in labels])
    if len(indices) != count:
        raise OptionError(f"`labels` must be one for each of the {count} inputs, but got {len(indices)}.")
    check_labels(indices)
    return indices


def _text_batches(settings: CallbackSettings, num_needed: int, model: nn.Module, tokenizer: Any) -> list[InputBatch]:
    """Return the texts and all their views as batches of token ids."""
    texts: Any = settings.texts_or_dataloader
    if tokenizer is None:
        raise OptionError("`tokenizer` must be given with texts. Pass the model's, or a dataloader instead of texts.")
    if not texts:
        raise OptionError("`texts_or_dataloader` must hold texts or batches, but got none.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise OptionError(f"`texts` must hold only strings, but `texts[{index}]` is a {type(text).__name__}.")
    _check_vocabulary(tokenizer, model)
    tokenized = [
        tokenizer(list(view), truncation=True, max_length=settings.max_length, verbose=False)["input_ids"]
        for view in (texts, *_text_views(settings, num_needed))
    ]
    long_enough = sum(len(ids) >= MIN_MEASURED_TOKENS for ids in tokenized[0])
    if long_enough < 2:
        raise OptionError(
            f"`texts` must hold at least 2 texts of {MIN_MEASURED_TOKENS} tokens or more, but {long_enough} of "
            f"{len(texts)} are. Add longer texts."
        )
    rows = [ids for view in tokenized for ids in view]
    plan = plan_batches([max(len(ids), 1) for ids in rows], token_budget=settings.token_budget)
    names = _input_names(model)
    return [
        InputBatch(positions, _padded([rows[position] for position in positions], tokenizer, names))
        for positions in map(sorted, plan)
    ]


def _text_views(settings: CallbackSettings, num_needed: int) -> Sequence[Sequence[str]]:
    texts: Any = settings.texts_or_dataloader
    if isinstance(settings.views, int):
        return augment(texts, views=num_needed, seed=settings.seed) if num_needed else []
    for number, view in enumerate(settings.views[:num_needed]):
        if isinstance(view, str) or len(view) != len(texts):
            raise OptionError(
                f"`views` must be lists of {len(texts)} texts, one for each text, but view {number} is not."
            )
    return settings.views[:num_needed]


def _check_vocabulary(tokenizer: Any, model: nn.Module) -> None:
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return
    num_rows = getattr(embedding, "num_embeddings", None)
    if num_rows is not None and len(tokenizer) > num_rows:
        raise OptionError(
            f"`tokenizer` must be the model's, but it has {len(tokenizer)} tokens and the embedding {num_rows} rows. "
            "Pass the tokenizer that the model is trained with, or resize the embedding."
        )


def _padded(rows: list[list[int]], tokenizer: Any, names: set[str] | None) -> dict[str, Tensor]:
    """Return a batch padded on the right, where the position ids of every model family are correct."""
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    longest = max(1, *map(len, rows))
    tensors = {
        "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in rows]),
    }
    return {name: tensor for name, tensor in tensors.items() if names is None or name in names}


def _read_loader(loader: Iterable[Any], model: nn.Module, max_inputs: int, view: int) -> list[InputBatch]:
    """Return the first inputs of a dataloader in the dataloader's own batches."""
    batches: list[InputBatch] = []
    num_read = 0
    for loaded in loader:
        inputs = _model_inputs(loaded, model)
        count = min(len(next(iter(inputs.values()))), max_inputs - num_read)
        if count <= 0:
            break
        copies = {name: tensor[:count].detach().cpu().clone() for name, tensor in inputs.items()}
        batches.append(InputBatch(list(range(num_read, num_read + count)), copies))
        num_read += count
    if num_read < 2:
        source = "the dataloader" if view < 0 else f"view {view}"
        raise OptionError(f"`texts_or_dataloader` must give at least 2 inputs, but {source} gave {num_read}.")
    return batches


def _model_inputs(loaded: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a dataloader's batch that the model accepts, by name."""
    names = _input_names(model)
    first_parameter = next(iter(inspect.signature(model.forward).parameters), "input_ids")
    main = str(getattr(model, "main_input_name", first_parameter))
    if isinstance(loaded, list | tuple) and loaded and isinstance(loaded[0], Tensor | Mapping):
        loaded = loaded[0]  # (inputs, labels)
    if isinstance(loaded, Tensor):
        loaded = {main: loaded}
    if isinstance(loaded, Mapping):
        tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor) and value.ndim}
        accepted = {n: v for n, v in tensors.items() if n not in _NOT_MODEL_INPUTS and (names is None or n in names)}
        if main in accepted:
            return accepted
    received = list(loaded) if isinstance(loaded, Mapping) else type(loaded).__name__
    raise OptionError(
        f"`texts_or_dataloader` must be texts, or a dataloader of dicts of tensors with {main!r}, which "
        f"{type(model).__name__} takes, but it gave {received}. Give its `collate_fn` those names."
    )
