"""Templates: what stands around a text, and its token ids inside the tokenizer's own post-processor.

A folder that holds such a tokenizer needs nothing else: whoever loads it gets the template, special tokens stay where
the tokenizer puts them, and truncation leaves the template whole.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.validation import check_text

__all__ = ["TEXT_KINDS", "Frame", "Placed", "check_template", "frames_of", "with_frame"]

HOLE = "{text}"
TEXT_KINDS = ("text", "query", "document")
_MOST_COPIES = 2
_SHORTEST = 1  # tokens of a text that a template must leave room for


@dataclass(frozen=True)
class Frame:
    """What stands before a text, between its copies (``None`` where there is one) and after it."""

    before: str = ""
    between: str | None = None
    after: str = ""

    @property
    def copies(self) -> int:
        """How often the text stands there."""
        return 1 if self.between is None else 2


@dataclass(frozen=True)
class Placed:
    """Where a text's tokens are among those of its frame.

    Attributes:
        front: tokens before the (first) copy, special ones included.
        between: tokens between two copies.
        back: tokens after the last copy, special ones included.
        copies: of the text.
    """

    front: int = 0
    between: int = 0
    back: int = 0
    copies: int = 1

    @property
    def added(self) -> int:
        """How many tokens are not the text's."""
        return self.front + self.between + self.back


def check_template(argument: str, template: Any) -> str | dict[str, str]:
    """Return a template as it is kept, or raise.

    Example:
        >>> check_template("template", 'The essence of "{text}" is:"')
        'The essence of "{text}" is:"'
    """
    if isinstance(template, Mapping):
        kept = {check_text(f"kind in {argument}", kind): text for kind, text in template.items()}
        if not kept:
            raise OptionError(f"`{argument}` must be for one of {', '.join(map(repr, TEXT_KINDS))}, but is empty.")
        if unknown := sorted(set(kept) - set(TEXT_KINDS)):
            raise OptionError(f"`{argument}` must be for {', '.join(map(repr, TEXT_KINDS))}, but has {unknown[0]!r}.")
        for kind, text in kept.items():
            _frame(f"{argument}[{kind!r}]", text)
        frames_of(kept)
        return kept
    _frame(argument, template)
    return str(template)


def frames_of(template: str | Mapping[str, str] | None) -> dict[str, Frame]:
    """Return the frame of each kind of text; they end alike, since one tokenizer makes them all.

    Example:
        >>> frames_of('"{text}" in one word:')["query"]
        Frame(before='"', between=None, after='" in one word:')
    """
    if template is None or isinstance(template, str):
        return dict.fromkeys(TEXT_KINDS, Frame() if template is None else _frame("template", template))
    frames = {kind: _frame("template", template.get(kind, template.get("text", HOLE))) for kind in TEXT_KINDS}
    if len({(frame.between, frame.after) for frame in frames.values()}) > 1:
        lacking = [kind for kind in TEXT_KINDS if kind not in template]
        cure = f" Give a template for {lacking[0]!r} too: without one it is the text alone." if lacking else ""
        raise OptionError(
            "`template` must end alike for queries, documents and other texts: what stands after a text is in the "
            "tokenizer, which does not know one from the other; what stands before it may differ." + cure
        )
    return frames


def _frame(argument: str, template: Any) -> Frame:
    words = check_text(argument, template)
    parts = words.split(HOLE)
    if not 2 <= len(parts) <= _MOST_COPIES + 1:
        raise OptionError(
            f"`{argument}` must hold {HOLE} once, or twice to repeat the text, but got {short_repr(template)}."
        )
    return Frame(parts[0], parts[1] if len(parts) > 2 else None, parts[-1])


def with_frame(tokenizer: Any, frame: Frame, *, model: str) -> tuple[Any, Placed]:
    """Return a copy of a tokenizer that puts a frame around every text, and where the text's tokens then are.

    Args:
        tokenizer: a fast one.
        frame: to put around texts.
        model: name of the model, for errors.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise OptionError(
            f"`template` must be None for {model}: its tokenizer is not one of the `tokenizers` library, which alone "
            "can hold a template. Put the words around the texts yourself."
        )
    from tokenizers import normalizers, processors
    from transformers import PreTrainedTokenizerFast

    opening, closing = _special_ids(tokenizer)
    leads = _leading_space(tokenizer, frame)
    before, between, after = _ids(tokenizer, frame, leads, model)
    pieces = {"OPENING": opening, "BEFORE": before, "BETWEEN": between, "AFTER": after, "CLOSING": closing}
    there = {name: ids for name, ids in pieces.items() if ids}
    order = ["OPENING", "BEFORE", "$A", *(["BETWEEN", "$A"] if frame.copies > 1 else []), "AFTER", "CLOSING"]
    single = " ".join(name for name in order if name == "$A" or name in there)
    names = {name: [str(token) for token in tokenizer.convert_ids_to_tokens(ids)] for name, ids in there.items()}
    made = copy.deepcopy(backend)
    made.post_processor = processors.TemplateProcessing(
        single=single,
        pair=" ".join(
            name for name in ("OPENING", "BEFORE", "$A", "$B", "AFTER", "CLOSING") if name[0] == "$" or name in there
        ),
        special_tokens=[{"id": name, "ids": ids, "tokens": names[name]} for name, ids in there.items()],
    )
    if leads:
        own = [made.normalizer] if made.normalizer is not None else []
        made.normalizer = normalizers.Sequence([normalizers.Prepend(" "), *own])
    placed = Placed(len(opening) + len(before), len(between), len(after) + len(closing), frame.copies)
    # The class of the model's own tokenizer may write its post-processor anew when it is loaded.
    framed = PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=_longest(tokenizer, placed, model),
        padding_side=tokenizer.padding_side, truncation_side=tokenizer.truncation_side,
        model_input_names=list(tokenizer.model_input_names), **tokenizer.special_tokens_map,
    )  # fmt: skip
    _check(tokenizer, framed, placed, " " if leads else "", model)
    return framed, placed


def _special_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer itself puts before and after a text."""
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = [at for at in range(len(whole) - len(alone) + 1) if whole[at : at + len(alone)] == alone]
    at = starts[-1] if starts else 0
    return whole[:at], whole[at + len(alone) :]


def _leading_space(tokenizer: Any, frame: Frame) -> bool:
    """Return whether the space before a text is left to the text's own tokens, as where both are one string."""
    ends = [part[-1:] for part in (frame.before, frame.between) if part]
    spaced = bool(ends) and set(ends) == {" "}
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    return spaced and "ByteLevel" in json.dumps([settings["pre_tokenizer"], settings["normalizer"]])


def _ids(tokenizer: Any, frame: Frame, leads: bool, model: str) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of what stands before, between and after the text."""
    end = -1 if leads else None
    before = _alone(tokenizer, frame.before[:end] if leads else frame.before, model)
    between = frame.between or ""
    return before, _after(tokenizer, between[:end] if leads else between, model), _after(tokenizer, frame.after, model)


def _alone(tokenizer: Any, words: str, model: str) -> list[int]:
    ids: list[int] = tokenizer(words, add_special_tokens=False)["input_ids"] if words else []
    unknown = tokenizer.unk_token_id
    if words.strip() and (not ids or (unknown is not None and set(ids) == {unknown})):
        raise OptionError(
            f"`template` must be in words that the tokenizer of {model} knows, but {words!r} leaves "
            f"{'unknown tokens only' if ids else 'no token'}. Try other words."
        )
    return ids


def _after(tokenizer: Any, words: str, model: str) -> list[int]:
    """Return the ids of what follows a text: those that it has there, where that does not depend on the text."""
    alone = _alone(tokenizer, words, model)
    found: list[list[int]] = []
    for text in ("a", "the"):
        first = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer(text + words, add_special_tokens=False)["input_ids"]
        found.append(whole[len(first) :] if whole[: len(first)] == first else alone)
    return found[0] if found[0] == found[1] and found[0] else alone


def _longest(tokenizer: Any, placed: Placed, model: str) -> int:
    """Return the length to truncate to, at which the whole, with both copies of a text, is no longer than before."""
    most = int(tokenizer.model_max_length)
    room = (most - placed.added) // placed.copies
    if room < _SHORTEST:
        raise OptionError(
            f"`template` must leave room for a text: with it {placed.added} tokens are not the text's, and {model} is "
            f"to take {most}. Write a shorter one, or pass a larger `max_length`."
        )
    return room + placed.added


def _check(plain: Any, framed: Any, placed: Placed, lead: str, model: str) -> None:
    """Raise unless a text's own tokens stand where they should."""
    text = "A text of words"
    own, whole = plain(lead + text, add_special_tokens=False)["input_ids"], framed(text)["input_ids"]
    length = (len(whole) - placed.added) // placed.copies
    last = whole[len(whole) - placed.back - length : len(whole) - placed.back]
    if len(whole) != placed.added + placed.copies * length or last != own:
        raise OptionError(
            f"`template` cannot be put into the tokenizer of {model}, which makes other tokens of a text inside it. "
            "Put the words around the texts yourself."
        )
