"""Seeded views of texts: the paper's three nlpaug augmentations in sequence, and copies without some words.

nlpaug draws from the global random generators; here its augmenters draw from a local generator instead.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from midlayer_encoders.validation import check_count, check_list, check_seed, check_text

_P = 0.3
_JOINERS = ("\u200c", "\u200d")  # zero-width characters inside words and emoji


def augment(texts: Sequence[str], *, views: int = 2, seed: int = 0, max_words: int | None = 10) -> list[list[str]]:
    """Return views of every text with randomly split words and mistyped characters.

    nlpaug's ``SplitAug``, ``RandomCharAug`` (substitute) and ``KeyboardAug`` in sequence, each on ``0.3`` of the words
    (of at least four characters) and the latter two on ``0.3`` of such a word's characters. Single spaces join the
    words of a view. A text of at most one character besides spaces is its own view.

    A view depends on the text, ``seed``, the view's number, ``max_words`` and the number of equal texts before it in
    ``texts``, but not on the other texts, their order, ``views`` or the machine.

    Args:
        texts: N texts.
        views: number V of views of each text.
        seed: seed of the views.
        max_words: number of words that each augmentation may change in a text, ``None`` for no limit. ``10`` is
            nlpaug's default, which the paper uses; it changes fewer than ``0.3`` of the words of texts over 33 words.

    Returns:
        V lists of N texts.

    Example:
        >>> first, second = augment(["the evening train was late again"])
        >>> first
        ['the e & eu ing t + aiq was & a2e aga in']
        >>> second
        ['the e ^! niaF rrWi2 was la te aga in']
    """
    texts, seed = _check_strings(texts), check_seed(seed)
    check_count("views", views)
    augmenters = _augmenters(max_words if max_words is None else check_count("max_words", max_words))
    random = Random()
    for augmenter in augmenters:
        augmenter.sample = partial(_sample, random)  # replaces a class method that uses the global generators

    def augmented(text: str, number: int, view: int) -> str:
        if len(text.strip()) <= 1:
            return text  # nlpaug turns an empty text into an empty list
        # "surrogatepass": a text with an unpaired surrogate should not end a long run.
        content = "\0".join(map(str, (seed, view, number, text))).encode("utf-8", "surrogatepass")
        random.seed(int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "big"))
        for augmenter in augmenters:
            (text,) = augmenter.augment(text)  # one at a time: for a list, nlpaug returns the first sentence
        return text

    counts: Counter[str] = Counter()
    numbers: list[int] = []  # of equal texts before each text
    for text in texts:
        numbers.append(counts[text])
        counts[text] += 1
    numbered = list(zip(texts, numbers, strict=True))
    return [[augmented(text, number, view) for text, number in numbered] for view in range(views)]


def drop_words(texts: Sequence[str], *, seed: int = 0) -> list[str]:
    """Return a copy of every text without a random quarter of its words, rounded down but at least one.

    Whitespace separates words; single spaces join a copy's words. A text of one word or none is its own copy. A copy
    depends on the text and ``seed`` only, so equal texts have equal copies.

    Args:
        texts: N texts.
        seed: seed of the copies.

    Example:
        >>> drop_words(["the evening train was late again", "Hello"])
        ['the evening train late again', 'Hello']
    """
    texts, seed = _check_strings(texts), check_seed(seed)

    def shortened(text: str) -> str:
        words = text.split()
        if len(words) < 2:
            return text
        random = Random(f"{seed}\0{text}".encode("utf-8", "surrogatepass"))
        remaining = random.sample(range(len(words)), len(words) - max(1, len(words) // 4))
        return " ".join(words[place] for place in sorted(remaining))

    return [shortened(text) for text in texts]


def _check_strings(texts: Sequence[str]) -> list[str]:
    """Return texts as a list; unlike ``check_texts``, unpaired surrogates are allowed."""
    texts = check_list("texts", texts, minimum=0)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            check_text(f"texts[{place}]", text)
    return texts


def _augmenters(max_words: int | None) -> list[Any]:
    import nlpaug.augmenter.char as nac
    import nlpaug.augmenter.word as naw

    words = {"tokenizer": _tokens}
    chars = {"aug_char_p": _P, "aug_word_p": _P, "aug_word_max": max_words}
    return [
        naw.SplitAug(aug_p=_P, aug_max=max_words, **words),
        nac.RandomCharAug(action="substitute", **chars, **words),
        nac.KeyboardAug(**chars, **words),
    ]


def _tokens(text: str) -> list[str]:
    r"""Return the words and punctuation of a text like nlpaug, but keep combining marks with their letters.

    nlpaug treats a mark as punctuation, which splits every word of Hindi or of decomposed French.

    Example:
        >>> _tokens("Cut it, now!")
        ['Cut', 'it', ',', 'now', '!']
        >>> len(_tokens("re\u0301sume\u0301, cafe\u0301"))
        3
    """
    pieces = re.split(r"(\W)", text)
    if text.isascii():
        return [piece for piece in pieces if piece.strip()]
    tokens: list[str] = []
    previous = ""  # the character before the piece; empty at the start and after a space
    for piece in filter(None, pieces):
        if piece.isspace():
            previous = ""
            continue
        if previous and (_is_mark(piece) or previous in _JOINERS or (_is_mark(previous) and piece[0].isalnum())):
            tokens[-1] += piece
        else:
            tokens.append(piece)
        previous = piece[-1]
    return tokens


def _is_mark(character: str) -> bool:
    return character in _JOINERS or unicodedata.category(character[0]).startswith("M")


def _sample(random: Random, x: list[Any] | int, num: int | None = None) -> Any:
    """Return ``num`` items of a list, or the position at which to split a word of length ``x``, like nlpaug."""
    return random.sample(x, num or 0) if isinstance(x, list) else random.randrange(1, x - 1)
