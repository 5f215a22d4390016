"""Templates around texts, stored as token ids in the tokenizer's post-processor.

A folder with such a tokenizer applies the template wherever it is loaded; special tokens keep their places, and
truncation shortens the text, not the template.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.validation import check_text

_PLACEHOLDER = "{text}"
TEXT_KINDS = ("text", "query", "document")
_MAX_COPIES = 2


@dataclass(frozen=True)
class TemplateParts:
    """The parts of a template before the text, between its two copies (``None`` for one copy) and after it."""

    before: str = ""
    between: str | None = None
    after: str = ""

    @property
    def copies(self) -> int:
        """Number of copies of the text."""
        return 1 if self.between is None else 2


@dataclass(frozen=True)
class TokenLayout:
    """Positions of a text's tokens in a template.

    Attributes:
        front: number of tokens before the first copy, including special tokens.
        between: number of tokens between two copies.
        back: number of tokens after the last copy, including special tokens.
        copies: number of copies of the text.
    """

    front: int = 0
    between: int = 0
    back: int = 0
    copies: int = 1

    @property
    def added(self) -> int:
        """Number of tokens that do not belong to the text."""
        return self.front + self.between + self.back


def check_template(argument: str, template: Any) -> str | dict[str, str]:
    """Return a valid template, or raise an :class:`OptionError`.

    Example:
        >>> check_template("template", 'The essence of "{text}" is:"')
        'The essence of "{text}" is:"'
    """
    if isinstance(template, Mapping):
        templates = {check_text(f"kind in {argument}", kind): text for kind, text in template.items()}
        if not templates:
            raise OptionError(f"`{argument}` must be for one of {', '.join(map(repr, TEXT_KINDS))}, but is empty.")
        if unknown := sorted(set(templates) - set(TEXT_KINDS)):
            raise OptionError(f"`{argument}` must be for {', '.join(map(repr, TEXT_KINDS))}, but has {unknown[0]!r}.")
        for kind, text in templates.items():
            _split(f"{argument}[{kind!r}]", text)
        split_template(templates)
        return templates
    _split(argument, template)
    return str(template)


def split_template(template: str | Mapping[str, str] | None) -> dict[str, TemplateParts]:
    """Return the parts of the template for each kind of text; they must end alike, because one tokenizer adds them.

    Example:
        >>> split_template('"{text}" in one word:')["query"]
        TemplateParts(before='"', between=None, after='" in one word:')
    """
    if template is None or isinstance(template, str):
        return dict.fromkeys(TEXT_KINDS, TemplateParts() if template is None else _split("template", template))
    parts = {kind: _split("template", template.get(kind, template.get("text", _PLACEHOLDER))) for kind in TEXT_KINDS}
    if len({(part.between, part.after) for part in parts.values()}) > 1:
        missing = [kind for kind in TEXT_KINDS if kind not in template]
        cure = f" Give a template for {missing[0]!r} too: without one it is the text alone." if missing else ""
        raise OptionError(
            "`template` must end alike for queries, documents and other texts: the tokenizer adds the part after a "
            "text and cannot distinguish them; only the part before a text may differ." + cure
        )
    return parts


def _split(argument: str, template: Any) -> TemplateParts:
    parts = check_text(argument, template).split(_PLACEHOLDER)
    if not 2 <= len(parts) <= _MAX_COPIES + 1:
        raise OptionError(
            f"`{argument}` must hold {_PLACEHOLDER} once, or twice to repeat the text, but got {short_repr(template)}."
        )
    return TemplateParts(parts[0], parts[1] if len(parts) > 2 else None, parts[-1])


def add_template(tokenizer: Any, parts: TemplateParts, *, model: str) -> tuple[Any, TokenLayout]:
    """Return a copy of a tokenizer that adds a template to every text, and the positions of the text's tokens.

    Args:
        tokenizer: a fast tokenizer.
        parts: the template.
        model: name of the model, for errors.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise OptionError(
            f"`template` must be None for {model}: only fast tokenizers of the `tokenizers` library can hold a "
            "template. Add the template to the texts yourself."
        )
    from tokenizers import normalizers, processors
    from transformers import PreTrainedTokenizerFast

    opening, closing = _special_ids(tokenizer)
    space_in_text = _space_belongs_to_text(tokenizer, parts)
    before, between, after = _part_ids(tokenizer, parts, space_in_text, model)
    pieces = {"OPENING": opening, "BEFORE": before, "BETWEEN": between, "AFTER": after, "CLOSING": closing}
    pieces = {name: ids for name, ids in pieces.items() if ids}
    copies = ["$A", "BETWEEN", "$A"] if parts.copies > 1 else ["$A"]

    def sequence(texts: list[str]) -> str:
        names = ["OPENING", "BEFORE", *texts, "AFTER", "CLOSING"]
        return " ".join(name for name in names if name.startswith("$") or name in pieces)

    backend = copy.deepcopy(backend)
    backend.post_processor = processors.TemplateProcessing(
        single=sequence(copies),
        pair=sequence(["$A", "$B"]),
        special_tokens=[
            {"id": name, "ids": ids, "tokens": [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]}
            for name, ids in pieces.items()
        ],
    )
    if space_in_text:
        existing = [backend.normalizer] if backend.normalizer is not None else []
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(" "), *existing])
    layout = TokenLayout(len(opening) + len(before), len(between), len(after) + len(closing), parts.copies)
    # The class of the model's tokenizer might rebuild its post-processor when it is loaded.
    with_template = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=_max_length(tokenizer, layout, model),
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        model_input_names=list(tokenizer.model_input_names),
        **tokenizer.special_tokens_map,
    )
    _verify(tokenizer, with_template, layout, " " if space_in_text else "", model)
    return with_template, layout


def _special_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer adds before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = [start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare]
    start = starts[-1] if starts else 0
    return whole[:start], whole[start + len(bare) :]


def _space_belongs_to_text(tokenizer: Any, parts: TemplateParts) -> bool:
    """Return True if the space before the text is tokenized with the text, as in one string."""
    ends = {part[-1:] for part in (parts.before, parts.between) if part}
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    return ends == {" "} and "ByteLevel" in json.dumps([settings["pre_tokenizer"], settings["normalizer"]])


def _part_ids(
    tokenizer: Any, parts: TemplateParts, space_in_text: bool, model: str
) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of the parts before, between and after the text."""
    before = parts.before
    between = parts.between or ""
    if space_in_text:
        before = before[:-1]
        between = between[:-1]
    return (
        _ids(tokenizer, before, model),
        _following_ids(tokenizer, between, model),
        _following_ids(tokenizer, parts.after, model),
    )


def _ids(tokenizer: Any, words: str, model: str) -> list[int]:
    ids: list[int] = tokenizer(words, add_special_tokens=False)["input_ids"] if words else []
    unknown = tokenizer.unk_token_id
    if words.strip() and (not ids or (unknown is not None and set(ids) == {unknown})):
        raise OptionError(
            f"`template` must be in words that the tokenizer of {model} knows, but {words!r} gives "
            f"{'unknown tokens only' if ids else 'no token'}. Try other words."
        )
    return ids


def _following_ids(tokenizer: Any, words: str, model: str) -> list[int]:
    """Return the ids of words after a text, in context if these do not depend on the text."""
    isolated = _ids(tokenizer, words, model)
    in_context: list[list[int]] = []
    for text in ("a", "the"):
        text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer(text + words, add_special_tokens=False)["input_ids"]
        in_context.append(whole[len(text_ids) :] if whole[: len(text_ids)] == text_ids else isolated)
    return in_context[0] if in_context[0] == in_context[1] and in_context[0] else isolated


def _max_length(tokenizer: Any, layout: TokenLayout, model: str) -> int:
    """Return the length to truncate to, so that template and all copies fit the model's maximum."""
    max_length = int(tokenizer.model_max_length)
    room = (max_length - layout.added) // layout.copies
    if room < 1:
        raise OptionError(
            f"`template` must leave room for a text, but adds {layout.added} tokens, and {model} takes {max_length}. "
            "Write a shorter template, or pass a larger `max_length`."
        )
    return room + layout.added


def _verify(plain: Any, with_template: Any, layout: TokenLayout, lead: str, model: str) -> None:
    """Raise an :class:`OptionError` unless a text's tokens are at the positions of the layout."""
    text = "A text of words"
    text_ids = plain(lead + text, add_special_tokens=False)["input_ids"]
    whole = with_template(text)["input_ids"]
    length = (len(whole) - layout.added) // layout.copies
    last_copy = whole[len(whole) - layout.back - length : len(whole) - layout.back]
    if len(whole) != layout.added + layout.copies * length or last_copy != text_ids:
        raise OptionError(
            f"`template` cannot be added to the tokenizer of {model}, which tokenizes a text differently inside it. "
            "Add the template to the texts yourself."
        )
