"""A template with every kind of tokenizer: positions of its tokens, truncation, and invalid templates."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

from midlayer_encoders.errors import OptionError
from midlayer_encoders.recipes import RECIPES, Recipe, TemplateParts, add_template, check_template, split_template
from midlayer_encoders.token_selector import TokenLayout
from tests.support.tiny_folders import tokenizer as characters

CORPUS = ['this sentence : "a cat sat" means in one word:"', "Query: the cat {text} }{ sat on the mat", "a the"] * 9
ASK = 'this sentence : "{text}" means in one word:"'
NAMES = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}


def trained(model: Any, trainer: Any, pre: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level(post: Any = None) -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(NAMES.values()), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    result = trained(
        models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False), decoder=decoders.ByteLevel()
    )
    if post is not None:
        result.post_processor = post
    return PreTrainedTokenizerFast(tokenizer_object=result, model_max_length=64, **NAMES)


def wordpiece() -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(NAMES.values()), show_progress=False)
    result = trained(
        models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(),
        normalizer=normalizers.BertNormalizer(),
    )  # fmt: skip
    result.post_processor = processors.BertProcessing(("[EOS]", 3), ("[BOS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=result, model_max_length=64, **NAMES)


def metaspace() -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=list(NAMES.values()), unk_token="[UNK]", show_progress=False
    )
    result = trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoder=decoders.Metaspace())
    result.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=result, model_max_length=64, **NAMES)


def with_bos() -> Any:
    """Return a tokenizer whose class rebuilds its post-processor from `add_bos_token` when it is loaded."""
    plain = byte_level()
    return LlamaTokenizerFast(
        vocab=plain.get_vocab(), merges=[], model_max_length=64, add_bos_token=True, add_eos_token=True, **NAMES
    )


TOKENIZERS = {
    "characters": characters,
    "byte level": byte_level,
    "byte level, Roberta's ends": lambda: byte_level(processors.RobertaProcessing(("[EOS]", 3), ("[BOS]", 2))),
    "WordPiece, BERT's ends": wordpiece,
    "Metaspace, one token before": metaspace,
    "Llama, both ends by its class": with_bos,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_stay_at_the_ends_and_the_template_around_the_text(name: str, tmp_path: Path) -> None:
    plain = TOKENIZERS[name]()
    framed, placed = add_template(plain, split_template(ASK)["text"], model="m")
    bare = plain("a cat sat", add_special_tokens=False)["input_ids"]
    complete = plain("a cat sat")["input_ids"]
    at = complete.index(bare[0]) if bare[0] not in (2, 3) else 0
    opening, closing = complete[:at], complete[at + len(bare) :]
    actual = framed("a cat sat")["input_ids"]
    assert actual[: len(opening)] == opening
    assert actual[len(actual) - len(closing) :] == closing
    assert actual[placed.front : len(actual) - placed.back] == bare
    assert placed.added == len(actual) - len(bare)
    words = framed.decode(actual[placed.front - 3 :], skip_special_tokens=True).replace(" ", "")
    assert words.endswith('"acatsat"meansinoneword:"')
    framed.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("a cat sat")["input_ids"] == actual
    assert plain("a cat sat")["input_ids"] == complete  # the model's own tokenizer is unchanged
    short = loaded("a cat sat on the mat " * 9, truncation=True, max_length=placed.added + 2)["input_ids"]
    assert len(short) == placed.added + 2
    assert short[: placed.front] == actual[: placed.front]
    assert short[len(short) - placed.back :] == actual[len(actual) - placed.back :]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("recipe", ["one-word", "echo", "word-echo"])
def test_smallest_max_length_keeps_one_token_of_the_text(name: str, recipe: str) -> None:
    plain = TOKENIZERS[name]()
    template = split_template(RECIPES[recipe].template)["text"]
    smallest = plain.num_special_tokens_to_add() + 1
    framed, placed = add_template(plain, template, model="m", max_length=smallest)
    ids = framed("a cat sat on the mat " * 9, truncation=True)["input_ids"]
    assert len(ids) == placed.added + placed.copies
    with pytest.raises(OptionError, match=f"`max_length` must be at least {smallest} for m .* got {smallest - 1}"):
        add_template(plain, template, model="m", max_length=smallest - 1)


def test_kinds_without_a_template_have_that_of_other_texts() -> None:
    parts = split_template({"text": "A text: {text}", "query": "A question: {text}"})
    assert {kind: part.before for kind, part in parts.items()} == {
        "text": "A text: ", "query": "A question: ", "document": "A text: ",
    }  # fmt: skip
    assert {part.before for part in split_template({"query": "{text}"}).values()} == {""}


def test_text_in_a_byte_level_template_has_the_tokens_of_one_string() -> None:
    plain = byte_level()
    for template in ("Query: {text}", ASK, "{text} means in one word:"):
        framed, _ = add_template(plain, split_template(template)["text"], model="m")
        for text in ("the cat", "sat on the mat", "{text} }{"):
            assert framed(text)["input_ids"] == plain(template.replace("{text}", text, 1))["input_ids"]


def test_repeated_text_is_truncated_so_that_both_copies_fit() -> None:
    framed, placed = add_template(characters(), TemplateParts("ab", "cd", "e"), model="m")
    assert placed == TokenLayout(front=2, between=2, back=1, copies=2)
    actual = framed("x" * 500, truncation=True)["input_ids"]
    own_values, x = (64 - 5) // 2, characters()("x")["input_ids"][0]
    assert len(actual) == 5 + 2 * own_values <= 64
    assert actual[2 : 2 + own_values] == actual[4 + own_values : 4 + 2 * own_values] == [x] * own_values


LONG_TEXT = """
import resource, sys
from tokenizers import Tokenizer
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.enable_truncation(int(sys.argv[2]), direction=sys.argv[3])
print(tokenizer.encode("y" * 40 + "x" * 32000 + "z" * 40).ids)
"""


@pytest.mark.parametrize(("side", "letter"), [("right", "y"), ("left", "z")])
def test_repeated_text_of_32000_tokens_needs_little_memory(side: str, letter: str, tmp_path: Path) -> None:
    plain = characters()
    plain.truncation_side = side
    framed, _ = add_template(plain, TemplateParts("ab", "cd", "e"), model="m")
    framed.save_pretrained(tmp_path)
    command = [sys.executable, "-c", LONG_TEXT, str(tmp_path / "tokenizer.json"), str(framed.model_max_length), side]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    copies = letter * ((64 - 5) // 2)
    assert json.loads(run.stdout) == plain(f"ab{copies}cd{copies}e")["input_ids"]


def test_text_that_names_a_special_token_keeps_its_tokens(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(
        tokenizer_object=byte_level().backend_tokenizer, split_special_tokens=True, **NAMES
    ).save_pretrained(tmp_path / "plain")
    plain = AutoTokenizer.from_pretrained(tmp_path / "plain")
    framed, placed = add_template(plain, split_template(ASK)["text"], model="m")
    framed.save_pretrained(tmp_path / "framed")
    for each in (framed, AutoTokenizer.from_pretrained(tmp_path / "framed")):
        ids = each("a [EOS] b")["input_ids"]
        assert ids[placed.front : len(ids) - placed.back] == plain("a [EOS] b")["input_ids"]


def test_repeated_text_of_an_unlimited_tokenizer_is_whole() -> None:
    plain = characters()
    plain.model_max_length = 10**30
    framed, _ = add_template(plain, TemplateParts("ab", "cd", "e"), model="m")
    assert len(framed("x" * 9000)["input_ids"]) == 18005


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no place", r"`template` must hold \{text\} once, or twice to repeat the text, but got 'no place'"),
        ("{text}{text}{text}", r"must hold \{text\} once, or twice"),
        (7, r"`template` must be a string, but got 7"),
        ({"query": "{text}", "passage": "{text}"}, r"must be one of 'text', 'query', 'document', but got 'passage'"),
        ({"query": "q {text}", "document": "d"}, r"`template\['document'\]` must hold \{text\}"),
        (
            {"query": "q {text}?", "document": "d {text}"},
            r"must have the same ending for queries, documents and other texts",
        ),
        ({"query": "q {text}:", "document": "d {text}:"}, r"Add a template for 'text'"),
        ("half \ud83d {text}", r"contains the unpaired surrogate"),
        ({}, r"must be one of 'text', 'query', 'document', but got None"),
    ],
)
def test_invalid_templates_are_refused(template: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_template("template", template)
    with pytest.raises(OptionError, match="`name` must not be blank"):
        Recipe(name=" ", template="{text}")


def test_recipe_copies_its_templates_and_is_hashable() -> None:
    options = {"query": "q {text}"}
    recipe = Recipe(name="mine", template=options)
    options["query"] = "nothing"
    assert recipe.template == {"query": "q {text}"}
    assert {recipe, Recipe(name="mine", template={"query": "q {text}"})} == {recipe}
    assert Recipe(name="mine", template={"query": "other {text}"}) != recipe


def test_templates_the_tokenizer_cannot_hold_are_refused() -> None:
    with pytest.raises(OptionError, match=r"adds 70 tokens, and m takes 64. Write a shorter"):
        add_template(characters(), TemplateParts("x" * 70), model="m")
    with pytest.raises(OptionError, match=r"adds 63 tokens, .* pass a larger `max_length`"):
        add_template(characters(), TemplateParts("x" * 60, "y", "zz"), model="m")
    with pytest.raises(OptionError, match="'雪' becomes only unknown tokens"):
        add_template(characters(), TemplateParts("", None, "雪"), model="m")
    silent = wordpiece()
    silent.backend_tokenizer.normalizer = normalizers.Replace(":", "")
    with pytest.raises(OptionError, match=r"the tokenizer of m knows, but '::' becomes no tokens"):
        add_template(silent, TemplateParts("a", None, "::"), model="m")
    with pytest.raises(OptionError, match="only fast tokenizers can hold one"):
        add_template(object(), TemplateParts("a"), model="m")
