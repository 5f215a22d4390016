"""What a GGUF file says of a byte-level BPE tokenizer."""

from __future__ import annotations

import json
from typing import Any

from midlayer_encoders.errors import CutError

__all__ = ["add_tokenizer"]

# llama.cpp has the rules by which a text is split before merges as code, under names; these are those of Llama-type
# models. https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    ("ByteLevel with its own pattern",): "gpt-2",
    ("Digits, each alone", "ByteLevel with its own pattern"): "smollm",
    (_LLAMA_3, "ByteLevel"): "llama-bpe",
    (_LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"), "ByteLevel"): "qwen2",
}


def add_tokenizer(writer: Any, tokenizer: Any, rows: int) -> None:
    """Add a tokenizer to a file.

    Args:
        writer: of the file.
        tokenizer: as transformers has it.
        rows: number of token embeddings; numbers that no token has get a placeholder.

    Raises:
        CutError: llama.cpp would read texts otherwise.
    """
    from gguf import TokenType

    if not getattr(tokenizer, "is_fast", False):
        raise _refusal(f"{type(tokenizer).__name__} is no fast tokenizer")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    name = _split_name(described)
    model, added = described["model"], {one["id"]: one for one in described["added_tokens"]}
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    kinds = [
        TokenType.UNUSED if number not in tokens
        else TokenType.NORMAL if number not in added
        else TokenType.CONTROL if added[number]["special"]
        else TokenType.USER_DEFINED
        for number in range(rows)
    ]  # fmt: skip
    starts, ends = _around(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(rows)])
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in model["merges"]])
    writer.add_add_bos_token(starts)
    writer.add_add_eos_token(ends)
    for kind in ("bos", "eos", "pad", "unk"):
        if (number := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)


def _refusal(why: str) -> CutError:
    return CutError(
        f"The tokenizer cannot be written into a GGUF file here: {why}. Byte-level BPE that splits texts as GPT-2, "
        "SmolLM, Llama 3 or Qwen 2 can. Write target='sentence-transformers', and run llama.cpp's "
        "convert_hf_to_gguf.py on that folder."
    )


def _split_name(described: dict[str, Any]) -> str:
    """Return llama.cpp's name for how a tokenizer splits texts before merges."""
    model, normalizer, splitter = described["model"], described["normalizer"], described["pre_tokenizer"]
    if model["type"] != "BPE" or model.get("byte_fallback") or splitter is None:
        kind = "BPE of characters with bytes for others, whose scores" if model.get("byte_fallback") else model["type"]
        raise _refusal(f"it is {kind}" + (" tokenizer.json does not hold" if model.get("byte_fallback") else ""))
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _refusal(f"it changes texts first ({normalizer['type']})")
    steps = tuple(_step(one) for one in splitter.get("pretokenizers", [splitter]))
    if steps not in _SPLITS:
        raise _refusal(f"it splits texts by {' and '.join(steps)}")
    return _SPLITS[steps]


def _step(step: dict[str, Any]) -> str:
    """Return one step of splitting in words, or the pattern it splits by."""
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return "ByteLevel with its own pattern" if step.get("use_regex", True) else "ByteLevel"
    if step["type"] == "Digits" and step["individual_digits"]:
        return "Digits, each alone"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
        return str(step["pattern"]["Regex"])
    return json.dumps(step)


def _around(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether a token that starts, and one that ends, stands around every text."""
    plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    for starts in (False, True):
        for ends in (False, True):
            before = [tokenizer.bos_token_id] if starts else []
            after = [tokenizer.eos_token_id] if ends else []
            if whole == before + plain + after:
                return starts, ends
    raise _refusal("it puts more around a text than one token that starts and one that ends it")
