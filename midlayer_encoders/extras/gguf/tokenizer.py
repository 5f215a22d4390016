"""Build a tokenizer from the fields of a GGUF file, with the same ids as llama.cpp.

transformers' own conversion drops the BOS token of SentencePiece vocabularies, splits Gemma's words into fragments and
uses one pre-tokenizer for many. Rules and defaults here follow llama.cpp:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

import re
import tomllib
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from midlayer_encoders.errors import OptionError

_CURE = "Pass the folder of the original model, which has its tokenizer's files, instead of the GGUF file."
_FIELD = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE_TYPE = range(1, 7)  # token types
_SPACE = "▁"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_MAX_PROBES = 500
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "gpt2": {},
}
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep", "padding": "pad", "mask": "mask"}

# Characters that are words of their own in WordPiece: punctuation, ASCII symbols and Chinese characters.
_ALONE = (
    r"\p{P}$+<=>^`|~\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B81F}\x{2B920}-\x{2CEAF}"
    r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)


class _Splits(NamedTuple):
    """The pre-tokenizer of names: its patterns in order, and whether words of the vocabulary are never split."""

    names: str
    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf8"))
SPLITS = tuple(_Splits(**{**splits, "patterns": tuple(splits["patterns"])}) for splits in _TABLES["splits"])


def build_tokenizer(fields: dict[str, Any]) -> Any:
    """Return the tokenizer that the fields of a GGUF file describe, with the ids of llama.cpp.

    Special tokens in a text become their ids, as in other tokenizers of transformers and in llama.cpp's embeddings
    (``parse_special``).

    Args:
        fields: metadata of the file, by name.

    Raises:
        OptionError: if llama.cpp would use a kind or rule of tokenization that is not supported here.
    """
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    kind = fields.get(f"{_FIELD}model")
    builders = {"llama": _sentencepiece, "gpt2": _byte_level, "bert": _word_piece, "t5": _unigram}
    if kind not in builders:
        raise _refusal(f"is of the kind {kind!r}, but supported kinds are {', '.join(builders)}")
    needed = {"llama": "scores", "t5": "scores", "gpt2": "merges"}
    for name in filter(None, ("tokens", "token_type", needed.get(kind))):
        if not fields.get(f"{_FIELD}{name}"):
            raise _refusal(f"has no `{_FIELD}{name}`")
    for name in ("token_type", "scores"):
        if len(values := fields.get(f"{_FIELD}{name}", fields[f"{_FIELD}tokens"])) != len(fields[f"{_FIELD}tokens"]):
            raise _refusal(f"has {len(values):,} entries in `{_FIELD}{name}` for its tokens")
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(fields[f"{_FIELD}tokens"])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise _refusal(f"has {len(tokens) - len(vocabulary)} duplicate tokens")
    ids = {role: fields.get(f"{_FIELD}{role}_token_id", _DEFAULT_IDS[kind].get(role)) for role in _ROLES}
    names = {role: tokens[number] for role, number in ids.items() if number is not None and 0 <= number < len(tokens)}
    if kind in ("bert", "t5") and "unknown" not in names:
        raise _refusal("has no token for unknown characters")
    tokenizer = builders[kind](fields, vocabulary, names)
    special = _special_tokens(fields, tokens)
    right = "phi-3" in (model := str(fields.get("general.name", "")).lower()) or "phi3" in model
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=is_special,
                rstrip=right and token not in ("<unk>", "<s>", "<|endoftext|>"),
                lstrip=_takes_space_before(fields, token),
            )
            for token, is_special in special.items()
        ]
    )
    first, last = _surrounding_roles(fields, kind)
    if missing := [role for role in (first, last) if role and role not in names]:
        raise _refusal(f"adds a {_ROLES[missing[0]].upper()} token to each text, but does not name it")
    added = [role for role in (first, last) if role]  # templates name roles: a token such as "$" would mean the text
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[role or "$A" for role in (first, "", last) if role is not None],
        special_tokens=[{"id": role, "ids": [vocabulary[names[role]]], "tokens": [names[role]]} for role in added],
    )
    named = {f"{_ROLES[role]}_token": token for role, token in names.items() if token in special}
    if kind == "bert" and "bos_token" in named:
        named["cls_token"] = named["bos_token"]
    chat_template = fields.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **named)


def _special_tokens(fields: dict[str, Any], tokens: list[str]) -> dict[str, bool]:
    """Return the tokens that are cut out of a text before it is split, and whether they are special."""
    types = dict(zip(tokens, fields[f"{_FIELD}token_type"], strict=True))
    cut_out = {token for token, kind in types.items() if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
    cut_out |= types.keys() & _TABLES["end_tokens"].split()
    for roles, names in _TABLES["infilling_tokens"].items():
        candidates = types.keys() & names.split()
        if candidates <= cut_out or any(f"{_FIELD}{role}_token_id" in fields for role in roles.split()):
            continue
        if len(candidates) > 1:
            raise _refusal(f"has several tokens for one role in infilling: {', '.join(sorted(candidates))}")
        cut_out |= candidates
    if "<|tool_response>" in types:
        cut_out.discard("</s>")
    if (pair := _ambiguous_pair(cut_out)) is not None:
        raise _refusal(f"has special tokens that can overlap in a text: {pair[0]!r} and {pair[1]!r}")
    return {token: types[token] != _USER_DEFINED for token in tokens if token in cut_out}


def _ambiguous_pair(tokens: set[str]) -> tuple[str, str] | None:
    """Return two tokens that overlap in some text: llama.cpp then takes the longer one, tokenizers the first one."""
    by_start: dict[str, list[str]] = {}
    for token in sorted(tokens):
        for end in range(1, len(token)):
            by_start.setdefault(token[:end], []).append(token)
    for first in sorted(tokens):
        for start in range(1, len(first)):
            for second in by_start.get(first[start:], ()):
                text = first + second[len(first) - start :]
                longer = any(text[:end] in tokens for end in range(len(first) + 1, len(text) + 1))
                if second != first and len(second.encode()) >= len(first.encode()) and not longer:
                    return first, second
    return None


def _refusal(reason: str) -> OptionError:
    return OptionError(f"The tokenizer in the GGUF file cannot be read as llama.cpp reads it: it {reason}. {_CURE}")


def _flag(fields: dict[str, Any], name: str, default: bool) -> bool:
    return bool(fields.get(f"{_FIELD}{name}", default))


def _takes_space_before(fields: dict[str, Any], token: str) -> bool:
    """Return whether llama.cpp drops the spaces before a token: it knows the masks of a few models by name."""
    if token == "<mask>":
        return fields.get(f"{_FIELD}pre") in ("jina-v2-de", "jina-v2-es", "jina-v2-code") or any(
            name in fields.get("general.architecture", "") for name in ("nomic-bert-moe", "jina-bert-v3")
        )
    return token == "[MASK]" and "modern-bert" in str(fields.get("general.name", "")).lower()


def _surrounding_roles(fields: dict[str, Any], kind: str) -> tuple[str | None, str | None]:
    """Return the roles of the tokens before and after a text."""
    if kind == "bert":
        return "bos", "seperator"
    add_bos = kind == "llama" or (kind == "gpt2" and _splits(fields).add_bos)
    first = "bos" if _flag(fields, "add_bos_token", add_bos) else None
    return first, "eos" if _flag(fields, "add_eos_token", kind == "t5") else None


def _sentencepiece(fields: dict[str, Any], vocabulary: dict[str, int], names: dict[str, str]) -> Any:
    """Return SentencePiece BPE: of two adjacent pieces, those whose union has the highest score are merged first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    if missing := [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]:
        raise _refusal(f"has no token for {len(missing)} of 256 bytes")
    scores = np.asarray(fields[f"{_FIELD}scores"])
    merges = [
        (-scores[number], token[:end], token[end:])
        for token, number in vocabulary.items()
        for end in range(1, len(token))
        if token[:end] in vocabulary and token[end:] in vocabulary
    ]
    merges.sort(key=lambda merge: merge[0])
    model = models.BPE(
        vocab=vocabulary,
        merges=[(left, right) for _, left, right in merges],
        unk_token=names.get("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    if (text := _other_merges(model, vocabulary, fields)) is not None:
        raise _refusal(f"merges the pieces of {text!r} in an order that is not supported")
    tokenizer = Tokenizer(model)
    prefix = _flag(fields, "add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decoder = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoder, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def _other_merges(model: Any, vocabulary: dict[str, int], fields: dict[str, Any]) -> str | None:
    """Return a text that llama.cpp merges otherwise: by equal scores, or from characters that are not tokens."""
    types = fields[f"{_FIELD}token_type"]
    scores: dict[str, float] = dict(zip(vocabulary, fields[f"{_FIELD}scores"], strict=True))
    reachable = [  # of special tokens, only those with a mark for a space can be in a text after these are cut out
        token
        for token, number in vocabulary.items()
        if types[number] not in (_UNKNOWN, _CONTROL, _USER_DEFINED) or _SPACE in token
    ]
    by_score: dict[float, list[str]] = {}
    for token in reachable:
        if any(token[:end] in vocabulary and token[end:] in vocabulary for end in range(1, len(token))):
            by_score.setdefault(scores[token], []).append(token)
    probes = [token for token in reachable if len(token) > 1 and not vocabulary.keys() >= {*token}]
    for tied in by_score.values():
        if len(tied) > 1:
            probes += [first + second for first, second in pairwise([*tied, tied[0]])]
            probes += [token * count for token in tied[:20] for count in range(2, 6)]
    for probe in probes[:_MAX_PROBES]:
        pieces = [*probe]
        while pairs := [
            (scores[left + right], -place)
            for place, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]:
            place = -max(pairs)[1]
            pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
        whole = [piece for piece in pieces if piece in vocabulary]
        if [token.value for token in model.tokenize(probe) if not _BYTE.fullmatch(token.value)] != whole:
            return probe
    return None


def _splits(fields: dict[str, Any]) -> _Splits:
    """Return the pre-tokenizer that a file names."""
    name = fields.get(f"{_FIELD}pre", "default")
    for splits in SPLITS:
        if name in splits.names.split():
            return splits
    raise _refusal(f"splits texts by the rule {name!r}, which is not supported")


def _byte_level(fields: dict[str, Any], vocabulary: dict[str, int], _: dict[str, str]) -> Any:
    """Return byte-level BPE with the pre-tokenizer that the file names."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    splits = _splits(fields)
    pairs = [merge.partition(" ") if merge[:1] != " " else (" ", " ", merge[2:]) for merge in fields[f"{_FIELD}merges"]]
    merges = [(left, right) for left, _, right in pairs]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splits.whole_words))
    except Exception as reason:  # tokenizers has no other class
        raise _refusal(f"has invalid merges ({reason})") from reason
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if absent := "".join(sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*vocabulary})):
        # Bytes without a token are dropped; the pieces on either side are not merged.
        steps.append(pre_tokenizers.Split(Regex(f"[{re.escape(absent)}]"), "removed"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_piece(fields: dict[str, Any], vocabulary: dict[str, int], names: dict[str, str]) -> Any:
    """Return WordPiece over a vocabulary in which words start with ``▁`` and their later pieces have no mark."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = models.WordPiece(
        vocab=vocabulary, unk_token=names["unknown"], continuing_subword_prefix="", max_input_chars_per_word=10**9
    )
    tokenizer = Tokenizer(model)
    lowercase = _flag(fields, "normalizer.lowercase", True)
    steps: list[Any] = []
    if _flag(fields, "normalizer.strip_accents", lowercase):
        # llama.cpp keeps the first character of a decomposition: the first of the letters in a Hangul syllable.
        for letter in range(19):
            first = 0xAC00 + 588 * letter
            syllables = Regex(rf"[\x{{{first:X}}}-\x{{{first + 587:X}}}]")
            steps.append(normalizers.Replace(syllables, chr(0x1100 + letter)))
        steps += [normalizers.NFD(), normalizers.Replace(Regex(r"\p{M}"), "")]
    steps.append(normalizers.Replace(Regex(r"(?!\s)[\p{Cc}\p{Cf}\p{Co}\uFFFD]"), ""))
    if lowercase:
        steps.append(normalizers.Lowercase())
    # `Metaspace` adds no mark to a word that starts with one.
    steps.append(normalizers.Replace(Regex(rf"(?<![^\s{_ALONE}]){_SPACE}"), _SPACE * 2))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "removed"),
            pre_tokenizers.Split(Regex(f"[{_ALONE}]"), "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
        ]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _unigram(fields: dict[str, Any], vocabulary: dict[str, int], names: dict[str, str]) -> Any:
    """Return a Unigram model with SentencePiece's table of replaced characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    types = fields[f"{_FIELD}token_type"]
    is_user_defined = [kind == _USER_DEFINED for kind in types]
    by_kind = list(zip(types, fields[f"{_FIELD}scores"], strict=True))
    lowest = min((score for kind, score in by_kind if kind == _NORMAL), default=0.0)  # ten less is an unknown character
    if any(kind == _BYTE_TYPE or (kind == _UNUSED and score < lowest) for kind, score in by_kind):
        raise _refusal("has tokens for bytes, or unused ones with lower scores than the others")
    fixed = {_USER_DEFINED: 0.0, _UNKNOWN: lowest, _CONTROL: lowest}
    scores = [fixed.get(kind, score) for kind, score in by_kind]
    pieces = list(zip(vocabulary, scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=vocabulary[names["unknown"]]))
    steps: list[Any] = []
    if replaced := bytes(np.asarray(fields.get(f"{_FIELD}precompiled_charsmap", ()), dtype=np.int16).astype(np.uint8)):
        steps.append(normalizers.Precompiled(replaced))
    for token in compress(vocabulary, is_user_defined):  # llama.cpp leaves the start of such a token in a text as it is
        if not token.isascii() or any(step.normalize_str(char) != char for step in steps for char in token):
            raise _refusal(f"has a user-defined token with characters that are replaced elsewhere: {token!r}")
    merge_spaces = _flag(fields, "remove_extra_whitespaces", False)
    if merge_spaces:
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    if merge_spaces or _flag(fields, "add_space_prefix", False):
        # Spaces alone get no prefix.
        steps += [normalizers.Prepend(_SPACE), normalizers.Replace(Regex(rf"\A{_SPACE}(?= *\z)"), "")]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer
