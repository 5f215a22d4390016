"""Recipes: templates around texts, the tokens to pool, transformations of vectors, and the named recipes.

A template is stored as token ids in the tokenizer's post-processor: a folder with such a tokenizer applies it wherever
it is loaded; special tokens keep their places, and truncation shortens the text, not the template.
The module imports torch only inside functions because the command line reads the names of recipes.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from midlayer_encoders._types import JOINS, NORMS, POOLINGS, Join, Layer, Norm, Pooling
from midlayer_encoders.errors import OptionError, did_you_mean, short_repr
from midlayer_encoders.token_selector import TokenLayout
from midlayer_encoders.validation import check_choice, check_count, check_flag, check_text

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger(__name__)

#: ``'Before {text} after'``, or one for each of ``"query"``, ``"document"`` and ``"text"`` (all other texts).
Template: TypeAlias = str | Mapping[str, str]

_PLACEHOLDER = "{text}"
_MARK = "{read}"
#: Characters of a repeated text that are read for each token that fits; those beyond are removed before tokenizing.
#:
#: Truncation makes an encoding of each remaining stretch of a text, and two copies every combination of them.
CHARACTERS_PER_TOKEN = 8
_LARGEST_REPEAT = 100_000  # in a pattern of Oniguruma
_UNLIMITED = 10**30  # tokens, as transformers says it
_BEYOND = {"right": r"\A(?:[\s\S]{%d}){%d}\K[\s\S]+", "left": r"\A[\s\S]+(?=(?:[\s\S]{%d}){%d}\z)"}
#: The kinds of texts that can have different templates.
TEXT_KINDS = ("text", "query", "document")


# --- templates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TemplateParts:
    """The parts of a template.

    Attributes:
        before: the part before the text.
        between: the part between two copies of the text, or after the mark if there is one; ``None`` for one copy.
        after: the part after the text.
        question: the part between the first copy and the mark ``{read}``, whose last token is read; ``None`` without.
    """

    before: str = ""
    between: str | None = None
    after: str = ""
    question: str | None = None


def check_template(argument: str, template: Any) -> str | dict[str, str]:
    """Return a valid template, or raise an :class:`OptionError`.

    Example:
        >>> check_template("template", 'The essence of "{text}" is:"')
        'The essence of "{text}" is:"'
    """
    split_template(template, argument)
    return dict(template) if isinstance(template, Mapping) else str(template)


def split_template(template: Template | None, argument: str = "template") -> dict[str, TemplateParts]:
    """Return the parts of the template for each kind of text; only the part before the text may differ.

    Example:
        >>> split_template('"{text}" in one word:')["query"]
        TemplateParts(before='"', between=None, after='" in one word:', question=None)
    """
    if not isinstance(template, Mapping):
        return dict.fromkeys(TEXT_KINDS, TemplateParts() if template is None else _split(argument, template))
    for kind in template or [None]:
        check_choice(f"kind of text in {argument}", kind, TEXT_KINDS)
    templates = {kind: _split(f"{argument}[{kind!r}]", text) for kind, text in template.items()}
    parts = {kind: templates.get(kind, templates.get("text", TemplateParts())) for kind in TEXT_KINDS}
    if len({(part.question, part.between, part.after) for part in parts.values()}) > 1:
        missing = [kind for kind in TEXT_KINDS if kind not in template]
        hint = f" Add a template for {missing[0]!r}, which is the text alone by default." if missing else ""
        raise OptionError(
            "`template` must have the same ending for queries, documents and other texts: the tokenizer adds the part "
            "after a text and cannot distinguish them; only the part before a text may differ." + hint
        )
    return parts


def is_marked(template: Template | None) -> bool:
    """Return True if a template marks a token to pool.

    Example:
        >>> is_marked('"{text}" means:"{read}" Again: "{text}'), is_marked('"{text}" means:"')
        (True, False)
    """
    return split_template(template)["text"].question is not None


def _split(argument: str, template: Any) -> TemplateParts:
    parts = check_text(argument, template).split(_PLACEHOLDER)
    if len(parts) not in (2, 3):
        raise OptionError(
            f"`{argument}` must hold {_PLACEHOLDER} once, or twice to repeat the text, but got {short_repr(template)}."
        )
    marked = parts[1].split(_MARK) if len(parts) > 2 else [""]
    if len(marked) > 2 or template.count(_MARK) != len(marked) - 1 or (len(marked) == 2 and not marked[0]):
        raise OptionError(
            f"`{argument}` must hold {_MARK} at most once, between two copies of the text and after other words, but "
            f"got {short_repr(template)}."
        )
    between = marked[-1] if len(parts) > 2 else None
    return TemplateParts(parts[0], between, parts[-1], marked[0] if len(marked) > 1 else None)


def add_template(
    tokenizer: Any, parts: TemplateParts, *, model: str, max_length: int | None = None, positions: int | None = None
) -> tuple[Any, TokenLayout]:
    """Return a copy of a tokenizer that adds a template to every text, and the positions of the text's tokens.

    Args:
        tokenizer: a fast tokenizer.
        parts: the template.
        model: name of the model, for errors.
        max_length: the user's limit. It applies to the text, which keeps the tokens that it has without a template; the
            limit of the model applies to the whole sequence.
        positions: the limit of the model, ``None`` for none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise OptionError(f"`template` must be None for {model}: only fast tokenizers can hold one.")
    from tokenizers import Regex, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    opening, closing = _special_ids(tokenizer)
    smallest = len(opening) + len(closing) + 1
    if max_length is not None and max_length < smallest:
        raise OptionError(
            f"`max_length` must be at least {smallest} for {model} with a template: one token of the text, and "
            f"{smallest - 1} special ones, but got {max_length}."
        )
    space_in_text = _space_belongs_to_text(tokenizer, parts)
    end = -1 if space_in_text else None
    before = _ids(tokenizer, parts.before[:end], model)
    after = _following_ids(tokenizer, parts.after, model)
    question: list[int] = []
    if parts.question is None:
        between = _following_ids(tokenizer, (parts.between or "")[:end], model)
    else:  # the first half ends as a text of its own, and no token crosses the mark
        question = _following_ids(tokenizer, parts.question, model) + closing
        between = _ids(tokenizer, (parts.between or "")[:end], model)
        closing = []
    pieces = {"OPENING": opening, "BEFORE": before, "QUESTION": question, "BETWEEN": between, "AFTER": after}
    pieces = {name: ids for name, ids in {**pieces, "CLOSING": closing}.items() if ids}
    copies = ["$A"] if parts.between is None else ["$A", "QUESTION", "BETWEEN", "$A"]

    def sequence(texts: list[str]) -> str:
        names = ["OPENING", "BEFORE", *texts, "AFTER", "CLOSING"]
        return " ".join(name for name in names if name.startswith("$") or name in pieces)

    backend = copy.deepcopy(backend)
    backend.post_processor = processors.TemplateProcessing(
        single=sequence(copies),
        pair=sequence([part for name in copies for part in (("$A", "$B") if name == "$A" else (name,))]),
        special_tokens=[
            {"id": name, "ids": ids, "tokens": [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]}
            for name, ids in pieces.items()
        ],
    )
    back = len(after) + len(closing)
    layout = TokenLayout(len(opening) + len(before), len(between), back, copies.count("$A"), len(question))
    limit = int(tokenizer.model_max_length) if max_length is None else positions or _UNLIMITED
    room = (limit - layout.added) // layout.copies
    if max_length is not None:
        room = min(room, max_length - smallest + 1)
    if room < 1:
        raise OptionError(
            f"`template` must leave room for a text, but adds {layout.added} tokens, and {model} takes "
            f"{limit}. Write a shorter template, or pass a larger `max_length`."
        )
    steps: list[Any] = [normalizers.Prepend(" ")] if space_in_text else []
    if layout.copies > 1 and room <= _LARGEST_REPEAT:
        beyond = _BEYOND[tokenizer.truncation_side] % (room, CHARACTERS_PER_TOKEN)
        steps.insert(0, normalizers.Replace(Regex(beyond), ""))
    if steps:
        existing = [backend.normalizer] if backend.normalizer is not None else []
        backend.normalizer = normalizers.Sequence([*steps, *existing])
    # The class of the model's tokenizer might rebuild its post-processor when it is loaded.
    with_template = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=room + layout.added,  # truncation leaves the template whole
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        model_input_names=list(tokenizer.model_input_names),
        split_special_tokens=tokenizer.split_special_tokens,
        **tokenizer.special_tokens_map,
    )
    _verify_layout(tokenizer, with_template, layout, " " if space_in_text else "", model)
    return with_template, layout


def special_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of BOS, EOS, CLS, SEP and other special tokens that a tokenizer adds around a text, ascending."""
    opening, closing = _special_ids(tokenizer)
    named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "cls", "sep"))
    added = {*opening, *closing} & set(tokenizer.all_special_ids)
    return tuple(sorted(added | {token for token in named if token is not None}))


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
    if ends != {" "}:
        return False
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    return "ByteLevel" in json.dumps([settings["pre_tokenizer"], settings["normalizer"]])


def _ids(tokenizer: Any, words: str, model: str) -> list[int]:
    ids: list[int] = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"] if words else []
    unknown = tokenizer.unk_token_id
    if words.strip() and (not ids or (unknown is not None and set(ids) == {unknown})):
        raise OptionError(
            f"`template` must use words that the tokenizer of {model} knows, but {words!r} becomes "
            f"{'only unknown tokens' if ids else 'no tokens'}. Use other words."
        )
    return ids


def _following_ids(tokenizer: Any, words: str, model: str) -> list[int]:
    """Return the ids of words that follow a text, tokenized in context if the result does not depend on the text."""
    isolated = _ids(tokenizer, words, model)
    in_context: list[list[int]] = []
    for text in ("a", "the"):
        text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer(text + words, add_special_tokens=False, verbose=False)["input_ids"]
        in_context.append(whole[len(text_ids) :] if whole[: len(text_ids)] == text_ids else isolated)
    return in_context[0] if in_context[0] == in_context[1] and in_context[0] else isolated


def _verify_layout(plain: Any, with_template: Any, layout: TokenLayout, prefix: str, model: str) -> None:
    """Raise an :class:`OptionError` unless a text's tokens are at the positions of the layout."""
    room = with_template.model_max_length - layout.added
    text = "A text of words"[: CHARACTERS_PER_TOKEN * room]  # characters beyond those that fit are removed
    text_ids = plain(prefix + text, add_special_tokens=False, verbose=False)["input_ids"]
    whole = with_template(text, verbose=False)["input_ids"]
    length = (len(whole) - layout.added) // layout.copies
    last_copy = whole[len(whole) - layout.back - length : len(whole) - layout.back]
    if len(whole) != layout.added + layout.copies * length or last_copy != text_ids:
        raise OptionError(f"`template` must be None for {model}, whose tokenizer changes texts in it. Add it yourself.")


# --- transformations of pooled vectors --------------------------------------------------------------------------------


def centering_offset(vectors: Tensor) -> Tensor:
    """Return minus the mean of vectors ``(N, *, D)`` of sample texts, shape ``(*, D)``; raise for too few of them.

    Zeros, the vectors of texts without tokens, do not count.
    """
    if len(vectors) < SMALLEST_SAMPLE:
        raise OptionError(f"`center` must hold {SMALLEST_SAMPLE} texts or more, but got {len(vectors)}.")
    count = vectors.any(dim=-1, keepdim=True).sum(dim=0).clamp(min=1)
    return -(vectors.double().sum(dim=0) / count).cpu()


# --- recipes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a text becomes a vector, before and after the model.

    Attributes:
        name: name in frames, on pages and in commands.
        template: text with ``{text}`` once, or twice to repeat the text. ``{read}`` between two copies marks the end of
            a question about the text, which is tokenized with the first copy and whose last token is pooled, too.
        join: how the three spans of a template with ``{read}`` become one vector: the ``"sum"`` of their unit vectors
            (the default), the first copy weighted by its length; ``"text"``, ``"word"`` or ``"echo"`` for the mean of
            the first copy, the last token of the question, or the mean of the second copy alone; or ``"none"`` for all
            side by side and not scaled.
        layer: default layer of an encoder; sweeps and selections read all layers.
        norm: ``None`` keeps the encoder's norm.
        pooling: ``None`` keeps the encoder's pooling; a template that the model continues needs ``"last"``.
        skip_special: whether to leave BOS, EOS, CLS and SEP out of pooling.
        skip_first: number of tokens at the start to leave out of pooling: causal models have massive activations there.
        template_tokens: whether to pool the tokens of the template, too. Otherwise only the text is pooled, and only
            the second copy of a repeated text.
        center: subtract the mean vector of sample texts.
        normalize: scale every vector to length 1.
        source: where the recipe comes from.
    """

    name: str
    template: Template | None = field(default=None, hash=False)  # a mapping has no hash
    join: Join | None = None
    layer: Layer | None = None
    norm: Norm | None = None
    pooling: Pooling | None = None
    skip_first: int = 0
    skip_special: bool = False
    template_tokens: bool = True
    center: bool = False
    normalize: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if not check_text("name", self.name).strip():
            raise OptionError("`name` must not be blank: it appears in frames, on pages and in commands.")
        if self.template is not None:
            # A copy, because a mapping may change later.
            object.__setattr__(self, "template", check_template("template", self.template))
        check_choice("norm", self.norm or "final", NORMS)
        check_choice("pooling", self.pooling or "mean", POOLINGS)
        check_choice("join", self.join or "sum", JOINS)
        check_count("skip_first", self.skip_first, minimum=0)
        for name in ("skip_special", "template_tokens", "center", "normalize"):
            check_flag(name, getattr(self, name))
        if is_marked(self.template):
            object.__setattr__(self, "join", self.join or "sum")
            object.__setattr__(self, "template_tokens", False)
        check_join(self.template, self.join, self.pooling, self.skip_first, self.skip_special)

    @property
    def changes_vectors(self) -> bool:
        """Whether the recipe transforms pooled vectors."""
        return self.center or self.normalize

    def apart(self) -> Recipe:
        """Return this recipe with its spans side by side, from which every way of joining them follows."""
        return replace(self, join="none") if self.join is not None else self

    def before_vectors(self) -> Recipe:
        """Return this recipe without its layer and its transformations of pooled vectors."""
        parts = [part for part in self.name.split("+") if part not in ("center", "normalize")]
        return replace(self, name="+".join(parts), layer=None, center=False, normalize=False)

    def non_defaults(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("name", "source") and getattr(self, item.name) != item.default
        }


def check_join(
    template: Template | None, join: str | None, pooling: str | None, skip_first: int, skip_special: bool
) -> None:
    """Raise an :class:`OptionError` unless the options match the template's spans."""
    if not is_marked(template):
        if join is not None:
            raise OptionError(f"`join` applies only to a template with a {_MARK}, but got {join!r}.")
        return
    settings = {"pooling": (pooling or "mean", "mean"), "skip_first": (skip_first, 0)}
    for name, (value, required) in (settings | {"skip_special": (skip_special, False)}).items():
        if value != required:
            raise OptionError(
                f"`{name}` must be {required!r} for a template with {_MARK}, whose spans have their own tokens, but "
                f"got {value!r}."
            )


#: The name of the recipe that changes nothing.
PLAIN = "plain"
#: Minimum number of texts to center on.
SMALLEST_SAMPLE = 16

_NAMED = (
    Recipe(name=PLAIN, source="the text itself, with the encoder's own pooling"),
    Recipe(
        name="one-word",
        template='This sentence : "{text}" means in one word:"',
        pooling="last",
        source="PromptEOL: Jiang et al., 'Scaling Sentence Embeddings with Large Language Models', 2023",
    ),
    Recipe(
        name="echo",
        template='Rewrite the sentence "{text}". The rewritten sentence: "{text}"',
        pooling="mean",
        template_tokens=False,
        source="Springer et al., 'Repetition Improves Language Model Embeddings', 2024",
    ),
    Recipe(
        name="word-echo",
        template='This sentence : "{text}" means in one word:"{read}". The rewritten sentence: "{text}',
        join="sum",
        norm="final",
        pooling="mean",
        template_tokens=False,
        source="one-word and echo in one sequence, whose spans are added",
    ),
)
#: The named recipes.
#:
#: Token prepending (Fu et al., 2024) is not included: it changes states between blocks,
#: which a plain sentence-transformers folder cannot do.
RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _NAMED}

#: Suffixes of a recipe's name, after a plus sign.
_SUFFIXES: Mapping[str, Mapping[str, Any]] = {
    "center": {"center": True},
    "normalize": {"normalize": True},
    "skip-first": {"skip_first": 1},
    "skip-special": {"skip_special": True},
    "mean": {"pooling": "mean"},
    "last": {"pooling": "last"},
    "weightedmean": {"pooling": "weightedmean", "template_tokens": True},
}
#: Names of one span alone, after a slash.
_SPANS: tuple[Join, ...] = ("text", "word", "echo")


def recipe_of(argument: str, value: Any) -> Recipe:
    """Return a recipe from its name, with optional suffixes such as ``+center``, or return a :class:`Recipe`.

    Example:
        >>> recipe_of("recipe", "one-word").pooling
        'last'
        >>> recipe_of("recipe", "plain+skip-first+center").non_defaults()
        {'skip_first': 1, 'center': True}
    """
    if isinstance(value, Recipe):
        return value
    whole, *suffixes = value.split("+") if isinstance(value, str) else ("",)
    name, slash, span = whole.partition("/")
    unknown = next((suffix for suffix in suffixes if suffix not in _SUFFIXES), None)
    if slash and (name not in RECIPES or RECIPES[name].join is None or span not in _SPANS):
        joined = ", ".join(f"'{each.name}/{span}'" for each in _NAMED if each.join for span in _SPANS)
        raise OptionError(f"`{argument}` must name a span of a recipe, one of {joined}, but got {value!r}.")
    if name not in RECIPES or unknown is not None:
        hint = did_you_mean(name, RECIPES) if unknown is None else did_you_mean(unknown, _SUFFIXES)
        raise OptionError(
            f"`{argument}` must be a Recipe or one of {', '.join(map(repr, RECIPES))}, with optional "
            f"{', '.join('+' + suffix for suffix in _SUFFIXES)}, but got {value!r}.{hint}"
        )
    changes: dict[str, Any] = {"join": span} if slash else {}
    for suffix in suffixes:
        changes |= _SUFFIXES[suffix]
    return replace(RECIPES[name], **changes, name=value) if changes else RECIPES[name]


def has_name(recipe: Recipe) -> bool:
    """Return True if the recipe's name alone defines it."""
    try:
        return recipe_of("recipe", recipe.name) == recipe
    except OptionError:
        return False


def recipes_of(argument: str, values: Any) -> list[Recipe]:
    """Return several recipes from names, :class:`Recipe` objects or ``"all"`` named ones; their names must differ."""
    if values == "all":
        return list(_NAMED)
    recipes = [recipe_of(argument, value) for value in (values if isinstance(values, list | tuple) else [values])]
    if not recipes:
        raise OptionError(f"`{argument}` must name a recipe, but got none. Write {argument}=['plain', 'one-word'].")
    names = [recipe.name for recipe in recipes]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"`{argument}` must have different names, but got {min(repeated)!r} twice.")
    return recipes


def try_recipe(encoder: Any, recipe: Recipe) -> Any:
    """Return the encoder with a recipe, its spans side by side; ``None`` and a warning if the model refuses it.

    A marked template needs a causal model, and any template a fast tokenizer.
    """
    try:
        return encoder.with_recipe(recipe.apart())
    except OptionError as reason:
        _logger.warning("The recipe %s is left out for %s: %s", recipe.name, encoder.name, reason)
        return None


def fitting_recipes(encoder: Any, recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return recipes; if all named ones are among them, without marked templates that the model does not take."""
    if not set(RECIPES) <= {recipe.name for recipe in recipes}:
        return list(recipes)
    return [recipe for recipe in recipes if recipe.join is None or try_recipe(encoder, recipe) is not None]
