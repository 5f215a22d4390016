"""The fixed inputs of a callback: tokenized once, or read once from a dataloader, and their views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders._random import isolated_random
from midlayer_encoders.callbacks._backbone import accepted_inputs, main_input
from midlayer_encoders.callbacks._settings import Settings
from midlayer_encoders.errors import OptionError
from midlayer_encoders.measuring import num_views
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.selection.ridge import check_labels
from midlayer_encoders.views.texts import augment

__all__ = ["Batch", "label_numbers", "make_batches"]

_NOT_INPUTS = {"labels", "label", "decoder_input_ids", "return_dict", "output_hidden_states"}
SHORTEST = 4  # tokens: two steps have an angle between them, two halves two tokens each


@dataclass(frozen=True)
class Batch:
    """Some of the inputs and of their views, ready for the model.

    Attributes:
        positions: ascending, of its rows in the list of all inputs, followed by the first view of each, and so on.
        inputs: keyword arguments of the model's forward.
    """

    positions: list[int]
    inputs: dict[str, Tensor]


def make_batches(settings: Settings, model: nn.Module, tokenizer: Any) -> tuple[list[Batch], int]:
    """Return batches of the inputs and of as many views as the metrics want, and the number of inputs.

    The global random generators stay as they are.

    Args:
        settings: of the callback.
        model: the transformer.
        tokenizer: the trainer's own, used where the settings have none.
    """
    given, views = settings.texts_or_dataloader, settings.views
    tokenizer = tokenizer if settings.tokenizer is None else settings.tokenizer
    needed = num_views(settings.make_metrics([0]))
    if not isinstance(views, int) and len(views) < needed:
        raise OptionError(f"`views` must hold {needed} views for these metrics, but got {len(views)}.")
    with isolated_random():
        if isinstance(given, Sequence) and (not given or isinstance(given[0], str)):
            return _text_batches(settings, needed, model, tokenizer), len(given)
        if isinstance(views, int) and needed:
            raise OptionError(
                "`views` must be given, a dataloader for each, where the inputs are a dataloader and a metric compares "
                "views (InfoNCE, LiDAR, DiME). Pass them, texts instead, or other `metrics`."
            )
        loaders = [] if isinstance(views, int) else views[:needed]
        passes = [_loaded(each, model, settings.max_inputs, view) for view, each in enumerate([given, *loaders], -1)]
    counts = [sum(len(batch.positions) for batch in batches) for batches in passes]
    if len(set(counts)) > 1:
        raise OptionError(f"`views` must give one view for each input, but the numbers are {sorted(set(counts))}.")
    return [
        Batch([view * counts[0] + position for position in batch.positions], batch.inputs)
        for view, batches in enumerate(passes)
        for batch in batches
    ], counts[0]


def label_numbers(labels: Sequence[int | str], count: int) -> Tensor:
    """Return the class of each of ``count`` inputs as a number from ``0``, in the order in which they appear."""
    classes = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    numbers = torch.tensor([classes[label] for label in labels])
    if len(numbers) != count:
        raise OptionError(f"`labels` must be one for each of the {count} inputs, but got {len(numbers)}.")
    check_labels(numbers)
    return numbers


# --- texts ------------------------------------------------------------------------------------------------------------


def _text_batches(settings: Settings, needed: int, model: nn.Module, tokenizer: Any) -> list[Batch]:
    """Return the texts and all views of them as batches of token ids: one pass where they fit into the budget."""
    texts: Any = settings.texts_or_dataloader
    if tokenizer is None:
        raise OptionError("`tokenizer` must be given with texts. Pass the model's, or a dataloader instead of texts.")
    if not texts:
        raise OptionError("`texts_or_dataloader` must hold texts or batches, but got none.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise OptionError(f"`texts` must hold only strings, but `texts[{index}]` is a {type(text).__name__}.")
    _check_vocabulary(tokenizer, model)
    encoded = [
        tokenizer(list(each), truncation=True, max_length=settings.max_length, verbose=False)["input_ids"]
        for each in (texts, *_text_views(settings, needed))
    ]
    _check_lengths([len(ids) for ids in encoded[0]])
    return _batches([ids for each in encoded for ids in each], tokenizer, accepted_inputs(model), settings.token_budget)


def _text_views(settings: Settings, needed: int) -> Sequence[Sequence[str]]:
    texts: Any = settings.texts_or_dataloader
    if isinstance(settings.views, int):
        return augment(texts, views=needed, seed=settings.seed) if needed else []
    for number, view in enumerate(settings.views[:needed]):
        if isinstance(view, str) or len(view) != len(texts):
            raise OptionError(
                f"`views` must be lists of {len(texts)} texts, one for each text, but view {number} is not."
            )
    return settings.views[:needed]


def _check_vocabulary(tokenizer: Any, model: nn.Module) -> None:
    try:
        table = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return
    rows = getattr(table, "num_embeddings", None)
    if rows is not None and len(tokenizer) > rows:
        raise OptionError(
            f"`tokenizer` must be the model's, but it has {len(tokenizer)} tokens and the embedding {rows} rows. "
            "Pass the tokenizer that the model is trained with, or resize the embedding."
        )


def _check_lengths(lengths: Sequence[int]) -> None:
    enough = sum(length >= SHORTEST for length in lengths)
    if enough < 2:
        raise OptionError(
            f"`texts` must hold at least 2 texts of {SHORTEST} tokens or more, but {enough} of {len(lengths)} are. "
            "Give more, or longer, texts."
        )


def _batches(ids: list[list[int]], tokenizer: Any, names: set[str] | None, token_budget: int) -> list[Batch]:
    plan = map(sorted, plan_batches([max(len(each), 1) for each in ids], token_budget=token_budget))
    return [Batch(positions, _padded([ids[place] for place in positions], tokenizer, names)) for positions in plan]


def _padded(ids: list[list[int]], tokenizer: Any, names: set[str] | None) -> dict[str, Tensor]:
    """Return one batch, padded on the right, where every family's positions are right."""
    pad = getattr(tokenizer, "pad_token_id", None)
    longest = max(1, *map(len, ids))
    made = {
        "input_ids": torch.tensor([each + [pad or 0] * (longest - len(each)) for each in ids]),
        "attention_mask": torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in ids]),
    }
    return {name: value for name, value in made.items() if names is None or name in names}


# --- dataloaders ------------------------------------------------------------------------------------------------------


def _loaded(loader: Iterable[Any], model: nn.Module, max_inputs: int, view: int) -> list[Batch]:
    """Return the first inputs of a dataloader as the batches they came in."""
    names = accepted_inputs(model)
    batches: list[Batch] = []
    taken = 0
    for given in loader:
        inputs = _model_inputs(given, model, names)
        count = min(len(next(iter(inputs.values()))), max_inputs - taken)
        if count <= 0:
            break
        kept = {name: value[:count].detach().cpu().clone() for name, value in inputs.items()}
        batches.append(Batch(list(range(taken, taken + count)), kept))
        taken += count
    if taken < 2:
        what = "the dataloader" if view < 0 else f"view {view}"
        raise OptionError(f"`texts_or_dataloader` must give at least 2 inputs, but {what} gave {taken}.")
    return batches


def _model_inputs(given: Any, model: nn.Module, names: set[str] | None) -> dict[str, Tensor]:
    """Return the tensors of a dataloader's batch that the model takes, by name."""
    main = main_input(model)
    if isinstance(given, list | tuple) and given and isinstance(given[0], Tensor | Mapping):
        given = given[0]  # (inputs, labels)
    if isinstance(given, Tensor):
        given = {main: given}
    if isinstance(given, Mapping):
        tensors = {str(name): value for name, value in given.items() if isinstance(value, Tensor) and value.ndim}
        wanted = {n: v for n, v in tensors.items() if n not in _NOT_INPUTS and (names is None or n in names)}
        if main in wanted:
            return wanted
    seen = list(given) if isinstance(given, Mapping) else type(given).__name__
    raise OptionError(
        f"`texts_or_dataloader` must be texts, or a dataloader of dicts of tensors with {main!r}, which "
        f"{type(model).__name__} takes, but it gave {seen}. Give its `collate_fn` those names."
    )
