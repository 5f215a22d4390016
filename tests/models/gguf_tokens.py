"""Token ids of GGUF files: tiny files of every kind of tokenizer, texts, and llama.cpp's ids of them.

    python -m tests.models.gguf_tokens    # gguf_vocabularies.json, with llama.cpp's ids: needs xllamacpp

llama.cpp adds and parses special tokens, as in its embeddings.
"""

import base64
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from midlayer_encoders.extras.gguf.file import read_gguf
from midlayer_encoders.extras.gguf.tokenizer import SPLITS, build_tokenizer

FIXTURE = Path(__file__).with_name("gguf_vocabularies.json")
KINDS = ("llama", "gpt2", "bert", "t5")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"pre={name}": ("gpt2", {"pre": name}) for splits in SPLITS for name in splits.names.split()
} | {
    "gpt2 without pre": ("gpt2", {"pre": None}),
    "gpt2 with BOS and EOS": ("gpt2", {"add_bos_token": True, "add_eos_token": True}),
    "llama without prefix": ("llama", {"add_space_prefix": False}),
    "llama with EOS, without BOS": ("llama", {"add_bos_token": False, "add_eos_token": True}),
    "llama named Phi-3": ("llama", {"general.name": "Phi-3 mini"}),
    "gpt2 named ModernBERT": ("gpt2", {"general.name": "modern-bert-base"}),
    "bert, cased": ("bert", {"normalizer.lowercase": False}),
    "bert with accents": ("bert", {"normalizer.strip_accents": False}),
    "t5 without prefix": ("t5", {"add_space_prefix": False}),
    "t5 with all spaces": ("t5", {"remove_extra_whitespaces": False}),
    "t5 without flags": ("t5", {"remove_extra_whitespaces": None, "add_space_prefix": None}),
    "t5 without replaced characters": ("t5", {"precompiled_charsmap": None}),
    "t5 with BOS, without EOS": ("t5", {"add_bos_token": True, "bos_token_id": 1, "add_eos_token": False}),
}
"""Files whose ids are compared, too: a kind, and fields that replace those of its tiny vocabulary; None removes one."""
_WORDS = (
    "The year 2024 was good and I'll don't WE'RE it'S naïve café Straße größer ﬁne x² ½ ⅷ １２ 3.14159 1234567 1,000,000 "
    "0x1F i++ foo_bar(baz) def f(x): return x**2 camelCase XMLFile iPhone's </s> <s> <bos> <eos> <pad> <unk> [CLS] [SEP] "
    "[MASK] [UNK] [PAD] <|im_end|> <|im_start|> <|endoftext|> <extra_id_0> <user> <0x0A> ▁ ▁▁a ##ing 你好世界 こんにちは カタカナ "
    "안녕하세요 Привет مرحبا שלום हिन्दी ไทย e\u0301 \u00e9 👩\u200d👩\u200d👧 😀 🇩🇪 ♥\ufe0f … — “quotes” 'single' ‘’ « » $5 €7 "
    "%^&*() ~`| \\ / {} [] <> @user #tag http://a.b/c?d=e&f=g a@b.co"
)
_SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000", "\u2003", "", " " * 8, "\n" * 4]
_SPACES += ["\u200b", "\x0b", "\x0c", "\x85", "\u2028", " \t "]
_BLOCKS = [
    (32, 126),
    (160, 0x24F),
    (0x370, 0x5FF),
    (0x900, 0xDFF),
    (0x2000, 0x2BFF),
    (0x3000, 0x30FF),
    (0x4E00, 0x9FFF),
]
_BLOCKS += [(0xAC00, 0xD7A3), (0x1F300, 0x1FAFF)]
_SHORT = [
    "",
    " ",
    "  ",
    "\n",
    "a",
    " a",
    "a ",
    "½",
    "\u00a0",
    "\x00a",
    "\ufffd",
    "'s",
    "it'S",
    "I'LL",
    "’s",
    "</s>",
    "<s>a",
]


def sample_texts(number: int = 1000, seed: int = 0) -> list[str]:
    """Return texts of words, unicode, digits, spaces, line breaks, emoji, code and lookalikes of special tokens."""
    rng = random.Random(seed)
    words = _WORDS.split(" ")
    texts = list(_SHORT)
    while len(texts) < number:
        kind = rng.random()
        if kind < 0.5:
            spaces = _SPACES if rng.random() < 0.3 else [" "]
            parts = [rng.choice(words) + rng.choice(spaces) for _ in range(rng.randint(1, 14))]
        elif kind < 0.65:
            parts = [chr(rng.randint(*rng.choice(_BLOCKS))) for _ in range(rng.randint(1, 30))]
        elif kind < 0.75:
            points = [rng.randint(1, 0x10FFFF) for _ in range(rng.randint(1, 12))]
            parts = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
        elif kind < 0.85:
            parts = [rng.choice("0123456789 .,-+eE%½²٣") for _ in range(rng.randint(1, 20))]
        else:
            parts = [rng.choice([*_SPACES, "x", "if", "{", "}", ";", "//", "'"]) for _ in range(rng.randint(1, 25))]
        texts.append("".join(parts))
    return texts[:number]


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def llama_ids(path: Path, texts: list[str]) -> list[list[int]]:
    """Return llama.cpp's token ids, from a process of its own: llama.cpp exits on files that it cannot read."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.models.gguf_tokens", "--serve", str(path)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)},
    )
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        raise RuntimeError(f"llama.cpp does not read {path.name}: {process.stderr[-500:]}")
    ids: list[list[int]] = json.loads(lines[-1])
    return ids


def _serve(path: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 256
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    server = xllamacpp.Server(params)
    ids = []
    for text in json.load(sys.stdin):
        content = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            ids.append(json.load(response)["tokens"])
    sys.stdout.write("\n" + json.dumps(ids) + "\n")
    sys.stdout.flush()
    os._exit(0)  # llama.cpp's threads do not end on their own


# --- tiny files -------------------------------------------------------------------------------------------------------


def write_vocabulary(path: Path, fields: dict[str, Any], *, blocks: int = 1, architecture: str = "llama") -> Path:
    """Write a tiny Llama or Qwen2 with the tokenizer that these fields describe, in float32."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "context_length": 512,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "head_count": 2,
        "block_count": blocks,
    }
    if architecture == "qwen2":
        sizes["head_count_kv"] = 2
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(fields["tokens"]))
    for name, value in fields.items():
        if value is None:
            continue
        key = name if name.startswith("general.") else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str) and name != "precompiled_charsmap":
            writer.add_string(key, value)
        else:
            writer.add_array(key, base64.b64decode(value) if isinstance(value, str) else value)
    rng = np.random.default_rng(0)
    shapes = {f"blk.{n}.{name}": shape for n in range(blocks) for name, shape in _BLOCK_SHAPES.items()}
    shapes |= {"token_embd": (len(fields["tokens"]), 32), "output_norm": (32,)}
    for name, shape in shapes.items():
        values = rng.normal(size=shape, scale=0.3).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values + (1 if len(shape) == 1 else 0))
        if architecture == "qwen2" and name.endswith(("attn_q", "attn_k", "attn_v")):
            writer.add_tensor(f"{name}.bias", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_BLOCK_SHAPES: dict[str, tuple[int, ...]] = {f"attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
_BLOCK_SHAPES |= {f"ffn_{name}": (32, 32) for name in ("gate", "up", "down")} | {"attn_norm": (32,), "ffn_norm": (32,)}


def write_fixture() -> None:
    """Write llama.cpp's ids of the fixture's vocabularies into it, again."""
    stored = json.loads(FIXTURE.read_text("utf8"))
    texts = stored["texts"]
    with tempfile.TemporaryDirectory() as folder:
        for kind, fields in stored["vocabularies"].items():
            stored["ids"][kind] = llama_ids(write_vocabulary(Path(folder, f"{kind}.gguf"), fields), texts)
        stored["digests"] = {}
        for name, (kind, changes) in VARIANTS.items():
            path = write_vocabulary(Path(folder, "variant.gguf"), stored["vocabularies"][kind] | changes)
            stored["digests"][name] = digest(llama_ids(path, variant_texts(name, texts)))
    FIXTURE.write_text(json.dumps(stored, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf8")


def variant_texts(name: str, texts: list[str]) -> list[str]:
    """Return the texts to compare: of a space beside a token that takes it in, llama.cpp knows ASCII ones only."""
    return [text for text in texts if text.isascii()] if "named" in name else texts


def digest(ids: list[list[int]]) -> str:
    """Return a short digest of token ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(path: Path, texts: list[str]) -> tuple[int, int]:
    """Return the number of texts with other ids than llama.cpp's, and the number of ids."""
    expected = llama_ids(path, texts)
    tokenizer = build_tokenizer(read_gguf(path).fields)
    different = sum(tokenizer(text)["input_ids"] != ids for text, ids in zip(texts, expected, strict=True))
    return different, sum(map(len, expected))


if __name__ == "__main__":
    _serve(sys.argv[2]) if sys.argv[1:2] == ["--serve"] else write_fixture()
