"""Views of texts: seeded, the same everywhere, and made as nlpaug makes them."""

import math
import random
import unicodedata

import numpy as np
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import text_views
from midlayer_encoders.metrics.text_views import augment, drop_words

WORDS = ["elephant", "mountain", "umbrella", "keyboard", "notebook", "sunlight", "hospital", "calendar"]
TEXTS = [" ".join(WORDS[i % 8 :] + WORDS[: i % 8]) + f" number{i}" for i in range(150)]

KNOWN = [
    ["Eve ry mo 5HihK the old RalsY epePs his lXtti) sh op."],
    ["E GeWs mo 3Hio # the old b! rer )33Rs his P&tt le stkp."],
]


@pytest.fixture(scope="module")
def two_views() -> list[list[str]]:
    return augment(TEXTS, views=2, seed=3)


def words_of(text: str) -> list[str]:
    return text.split()


def test_shape_is_views_by_texts(two_views: list[list[str]]) -> None:
    assert [len(view) for view in two_views] == [len(TEXTS)] * 2
    assert augment([], views=3) == [[], [], []]


def test_known_views_are_the_same_on_every_machine() -> None:
    assert augment(["Every morning the old baker opens his little shop."], seed=7) == KNOWN


def test_view_depends_only_on_its_text(two_views: list[list[str]]) -> None:
    backwards = augment(TEXTS[::-1], views=2, seed=3)
    assert [view[::-1] for view in backwards] == two_views
    separate = augment([TEXTS[40]], views=2, seed=3)
    assert separate == [[view[40]] for view in two_views]


def test_more_views_keep_the_first_ones(two_views: list[list[str]]) -> None:
    assert augment(TEXTS, views=4, seed=3)[:2] == two_views


def test_views_seeds_and_repeats_differ(two_views: list[list[str]]) -> None:
    first, second = two_views
    other_item = augment(TEXTS, views=1, seed=4)[0]
    for item, another in [(first, second), (first, other_item), (first, TEXTS)]:
        assert sum(a == b for a, b in zip(item, another, strict=True)) == 0
    repeats = augment(["a sentence said again and again"] * 5)[0]
    assert len(set(repeats)) == 5


def test_global_generators_are_unchanged() -> None:
    random.seed(1)
    np.random.seed(2)
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    augment(TEXTS[:20])
    drop_words(TEXTS[:20])
    assert random.getstate() == python
    np.testing.assert_equal(np.random.get_state(legacy=False), numpy)


def test_global_seeds_do_not_change_the_views(two_views: list[list[str]]) -> None:
    random.seed(123)
    np.random.seed(123)
    assert augment(TEXTS, views=2, seed=3) == two_views


def test_each_step_changes_three_tenths_of_the_words() -> None:
    text = " ".join(WORDS * 2 + WORDS[:4])  # 20 words: 6 of them
    split, substituted, mistyped = (step for step in text_views._augmenters(10))
    assert len(words_of(split.augment(text)[0])) == 20 + 6
    for step in (substituted, mistyped):
        changed = sum(a != b for a, b in zip(words_of(text), words_of(step.augment(text)[0]), strict=True))
        assert 5 <= changed <= 6  # a drawn character may be the one that was there
    characters = sum(
        a != b
        for old, new in zip(words_of(text), words_of(mistyped.augment(text)[0]), strict=True)
        for a, b in zip(old, new, strict=True)
    )
    assert characters == 6 * math.ceil(0.3 * 8)  # three of the eight characters of each


@pytest.mark.slow
def test_the_sequence_changes_as_much_as_nlpaug_does() -> None:
    import nlpaug.augmenter.char as nac
    import nlpaug.augmenter.word as naw
    import nlpaug.flow as naf

    text = " ".join(WORDS * 2 + WORDS[:4])
    reference = naf.Sequential([naw.SplitAug(), nac.RandomCharAug(), nac.KeyboardAug()])
    random.seed(0)
    np.random.seed(0)
    for measure in (lambda view: sum(word in WORDS for word in words_of(view)), lambda view: len(words_of(view))):
        ours = [measure(view) for (view,) in augment([text], views=400)]
        theirs = [measure(reference.augment(text)[0]) for _ in range(400)]
        assert np.mean(ours) == pytest.approx(np.mean(theirs), abs=4 * np.std(theirs) / math.sqrt(200))
        assert np.std(ours) == pytest.approx(np.std(theirs), rel=0.25)


def test_max_words_bounds_each_step() -> None:
    text = " ".join(WORDS * 25)  # 200 words
    assert len(words_of(text_views._augmenters(10)[0].augment(text)[0])) == 210
    assert len(words_of(text_views._augmenters(None)[0].augment(text)[0])) == 260
    bounded, free = (augment([text], views=1, max_words=most)[0][0] for most in (10, None))
    assert sum(word in WORDS for word in words_of(bounded)) >= 200 - 3 * 10
    assert sum(word in WORDS for word in words_of(free)) < 0.5 * 200
    assert augment(TEXTS[:3], max_words=None) == augment(TEXTS[:3])


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "a", "é", "語", "😀", " x ", "\ud800"])
def test_texts_of_one_character_or_none_are_supported(text: str) -> None:
    assert augment([TEXTS[0], text, TEXTS[1]], views=2)[1][1] == text


@pytest.mark.parametrize(
    "text",
    ["no one may do it", "日本語 の テキ", "!!!", "👩‍👩‍👧 👍", "हि न्दी", "cafe\u0301 re\u0301s, ça va", "a\u200db"],
)
def test_texts_without_long_words_change_in_spaces_only(text: str) -> None:
    (view,) = augment([text], views=1)[0]
    assert view.replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    "text", ["Größenordnung natürlich überprüfen", "हिन्दी भाषा में लिखा", "Вечерний поезд опоздал", "語" * 40]
)
def test_other_scripts_are_supported(text: str) -> None:
    (view,) = augment([text], views=1)[0]
    assert view != text
    view.encode()
    saved = sum(character in text for character in view.replace(" ", ""))
    assert saved >= 0.5 * len(text.replace(" ", ""))
    assert len(view.replace(" ", "")) == len(text.replace(" ", ""))


def test_marks_stay_on_their_letters() -> None:
    for word in ["हिन्दी", unicodedata.normalize("NFD", "réé"), "👩‍👩‍👧"]:
        assert text_views._tokens(f"a {word}, b") == ["a", word, ",", "b"]


def test_tokens_match_nlpaug() -> None:
    from nlpaug.util.text.tokenizer import Tokenizer

    for text in [*TEXTS[:5], "It's 3.5 % (approx.) – “naïve”, e.g.\nthis_one", "m² ½ ﬁ Straße 日本語。テ"]:
        assert text_views._tokens(text) == Tokenizer.tokenizer(text)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("one text", {}, r"`texts` must be a list of texts, but got one: 'one text'. Write \['one text'\]"),
        (["a", None], {}, r"`texts\[1\]` must be a string, but got None \(NoneType\)"),
        (["a"], {"views": 0}, "`views` must be a whole number, 1 or more, but got 0"),
        (["a"], {"max_words": 0}, "`max_words` must be a whole number, 1 or more, but got 0"),
    ],
)
def test_invalid_arguments_are_refused(texts, options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        augment(texts, **options)


# --- copies without some words --------------------------------------------------------------------------------------


def is_subsequence(part: list[str], words: list[str]) -> bool:
    remaining = iter(words)
    return all(word in remaining for word in part)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    ("num_words", "num_dropped"), [(2, 1), (3, 1), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3), (100, 25), (103, 25)]
)
def test_a_quarter_of_the_words_is_dropped_and_the_others_stay_in_order(
    num_words: int, num_dropped: int, seed: int
) -> None:
    words = [f"w{number}" for number in range(num_words)]
    (copy,) = drop_words(["  ".join(words) + "\n"], seed=seed)
    assert len(copy.split(" ")) == num_words - num_dropped
    assert is_subsequence(copy.split(" "), words)


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "word", " word\n", "語" * 40, "\ud800"])
def test_text_of_one_word_or_none_is_its_own_copy(text: str) -> None:
    assert drop_words([text]) == [text]


def test_known_copy_is_the_same_on_every_machine() -> None:
    text = "Every morning the old baker opens his little shop."
    assert drop_words([text], seed=7) == ["the old baker opens his little shop."]
    assert drop_words(["an unpaired \ud800 surrogate"]) == ["an unpaired surrogate"]


def test_copy_depends_only_on_its_text_and_the_seed() -> None:
    copies = drop_words(TEXTS, seed=3)
    assert drop_words(TEXTS[::-1], seed=3)[::-1] == copies
    assert [drop_words([text], seed=3)[0] for text in TEXTS[:20]] == copies[:20]
    assert drop_words([TEXTS[0], TEXTS[0]], seed=3) == [copies[0], copies[0]], "unlike views"
    random.seed(123)
    assert drop_words(TEXTS, seed=3) == copies
    assert sum(a == b for a, b in zip(copies, drop_words(TEXTS, seed=4), strict=True)) < 20


def test_every_word_is_dropped_equally_often() -> None:
    counts = dict.fromkeys(WORDS, 0)
    for seed in range(2000):
        (copy,) = drop_words([" ".join(WORDS)], seed=seed)
        for word in set(WORDS) - set(copy.split()):
            counts[word] += 1
    assert sum(counts.values()) == 4000, "two of eight words each time"
    assert max(abs(count - 500) for count in counts.values()) < 5 * math.sqrt(2000 * 0.25 * 0.75)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("one text", {}, r"`texts` must be a list of texts, but got one: 'one text'"),
        (["a", None], {}, r"`texts\[1\]` must be a string, but got None \(NoneType\)"),
        (["a"], {"seed": -1}, "`seed` must be"),
    ],
)
def test_invalid_arguments_of_drop_words_are_refused(texts, options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        drop_words(texts, **options)
