"""Token ids of GGUF files: this package's tokenizer and llama.cpp's own, on the same texts.

    python -m benchmarks.gguf_tokens [FILE …]     # benchmarks/results/gguf_tokens.md
    python -m benchmarks.gguf_tokens --loading    # benchmarks/results/gguf_loading.md
    python -m benchmarks.gguf_tokens --fixture    # tests/models/gguf_vocabularies.json, with llama.cpp's ids

The first and the last need xllamacpp, the last also sentencepiece. llama.cpp adds and parses special tokens, as in its embeddings.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from midlayer_encoders.extras.gguf.cache import GGUF_CACHE
from midlayer_encoders.extras.gguf.file import read_gguf
from midlayer_encoders.extras.gguf.tokenizer import SPLITS, build_tokenizer
from midlayer_encoders.models.hub import built_in_model

RESULTS = Path(__file__).parent / "results" / "gguf_tokens.md"
FIXTURE = Path(__file__).parent.parent / "tests" / "models" / "gguf_vocabularies.json"
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
        [sys.executable, "-m", "benchmarks.gguf_tokens", "--serve", str(path)],
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


def _train_vocabularies() -> dict[str, dict[str, Any]]:
    """Return the fields of a small tokenizer of each kind, trained on the README and the words above."""
    import sentencepiece
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [*(Path(__file__).parent.parent / "README.md").read_text("utf8").splitlines(), _WORDS] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabularies: dict[str, dict[str, Any]] = {}
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    named = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>", "[MASK]", "<user>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=named, initial_alphabet=alphabet)
    byte_level.train_from_iterator(texts, trainer)
    state = json.loads(byte_level.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in state["merges"]]
    tokens.remove("ò")  # a byte without a token
    vocabularies["gpt2"] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges}
    vocabularies["gpt2"] |= {
        "token_type": [3, 3, 3, 3, 3, 4, *[1] * (len(tokens) - 6)],
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    replaced = {"\u00a0": " ", "\n": " ", "\t": " ", "ﬁ": "fi", "e\u0301": "\u00e9", "１": "1", "２": "2", "½": "1⁄2"}
    replaced |= {"\u200b": "", "…": "..."}
    with tempfile.TemporaryDirectory() as folder:
        rows = [[" ".join(f"{ord(char):X}" for char in side) for side in pair] for pair in replaced.items()]
        Path(folder, "rules.tsv").write_text(
            "".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf8"
        )
        Path(folder, "texts").write_text("\n".join(texts), encoding="utf8")
        for kind, trained_as in (("llama", "bpe"), ("t5", "unigram")):
            options: dict[str, Any] = {"byte_fallback": True, "normalization_rule_name": "identity"}
            options |= {"remove_extra_whitespaces": False, "vocab_size": 700, "pad_id": -1}
            if kind == "t5":
                options = {"vocab_size": 400, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
                options["normalization_rule_tsv"] = str(Path(folder, "rules.tsv"))
            sentencepiece.SentencePieceTrainer.train(
                input=str(Path(folder, "texts")),
                model_prefix=str(Path(folder, kind)),
                model_type=trained_as,
                character_coverage=0.98,
                user_defined_symbols=["<user>"],
                control_symbols=["<|endoftext|>"],
                hard_vocab_limit=False,
                minloglevel=2,
                **options,
            )
            vocabularies[kind] = _sentencepiece_fields(kind, Path(folder, f"{kind}.model"))
    word_piece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    word_piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    named = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    word_piece.train_from_iterator(
        [text.lower() for text in texts], trainers.WordPieceTrainer(vocab_size=600, special_tokens=named)
    )
    ordered = sorted(word_piece.get_vocab(), key=word_piece.get_vocab().__getitem__)
    pieces = [*named, *(token.removeprefix("##") if token.startswith("##") else f"▁{token}" for token in ordered[5:])]
    vocabularies["bert"] = {"model": "bert", "tokens": pieces, "token_type": [3] * 5 + [1] * (len(pieces) - 5)}
    ids = {"bos": 2, "unknown": 1, "seperator": 3, "padding": 0, "mask": 4}
    vocabularies["bert"] |= {f"{role}_token_id": number for role, number in ids.items()}
    return vocabularies


def _sentencepiece_fields(kind: str, path: Path) -> dict[str, Any]:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = range(model.get_piece_size())
    types = [2 if model.is_unknown(n) else 3 if model.is_control(n) else 6 if model.is_byte(n) else 1 for n in pieces]
    tokens = [model.id_to_piece(n) for n in pieces]
    types[tokens.index("<user>")] = 4
    fields = {
        "model": kind,
        "tokens": tokens,
        "scores": [round(model.get_score(n), 4) for n in pieces],
        "token_type": types,
    }
    if kind == "t5":
        proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
        fields["precompiled_charsmap"] = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
        fields |= {"add_space_prefix": True, "remove_extra_whitespaces": True}
    return fields


def _write_fixture() -> None:
    vocabularies = _train_vocabularies()
    texts = sample_texts(80, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        ids = {}
        for kind, fields in vocabularies.items():
            ids[kind] = llama_ids(write_vocabulary(Path(folder, f"{kind}.gguf"), fields), texts)
        digests = {}
        for name, (kind, changes) in VARIANTS.items():
            path = write_vocabulary(Path(folder, "variant.gguf"), vocabularies[kind] | changes)
            digests[name] = digest(llama_ids(path, variant_texts(name, texts)))
    content = {"vocabularies": vocabularies, "texts": texts, "ids": ids, "digests": digests}
    FIXTURE.write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf8")


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


def main() -> None:
    """Compare, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--fixture", action="store_true")
    parser.add_argument("--loading", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return _serve(args.serve)
    if args.fixture:
        return _write_fixture()
    if args.loading:
        return _write_loading()
    return _write_results(args.files)


def _write_results(files: list[Path]) -> None:
    from importlib.metadata import version

    folder, file = built_in_model()
    texts = sample_texts()
    fixture = json.loads(FIXTURE.read_text("utf8"))
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        tiny = [write_vocabulary(Path(temporary, f"tiny {kind}"), fixture["vocabularies"][kind]) for kind in KINDS]
        for path in [Path(folder, str(file)), *files, *tiny]:
            fields = read_gguf(path).fields
            kind = fields["tokenizer.ggml.model"] + (f", {pre}" if (pre := fields.get("tokenizer.ggml.pre")) else "")
            different, number = compare(path, texts)
            rows.append(
                f"| {path.name} | {kind} | {len(fields['tokenizer.ggml.tokens']):,} | {number:,} | {different} |"
            )
            print(rows[-1], flush=True)
        differences = []
        for name, (kind, changes) in VARIANTS.items():
            path = write_vocabulary(Path(temporary, "variant"), fixture["vocabularies"][kind] | changes)
            differences.append((name, compare(path, variant_texts(name, texts))[0]))
            print(*differences[-1], flush=True)
    lines = [
        "# Token ids of GGUF files",
        "",
        f"Texts of {len(texts):,} whose token ids differ between this package and llama.cpp "
        f"(xllamacpp {version('xllamacpp')}). The texts mix words, unicode, digits, spaces, line breaks, emoji, code and "
        "lookalikes of special tokens; special tokens are added and parsed. The tiny files are those of the tests. "
        "`python -m benchmarks.gguf_tokens FILE …`.",
        "",
        "| file | kind | tokens | ids | texts that differ |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "The same texts (ASCII ones for models that llama.cpp recognizes by name) with other fields in the tiny files, "
        "among them each supported pre-tokenizer of byte-level BPE:",
        "",
        "| fields | texts that differ |",
        "|---|---|",
        *(f"| {name} | {number} |" for name, number in differences),
    ]
    wrapped = [line if line.startswith("|") else textwrap.fill(line, 118, break_on_hyphens=False) for line in lines]
    RESULTS.write_text("\n".join(wrapped) + "\n", encoding="utf8")


def _write_loading() -> None:
    """Load the built-in model at layers 24 and 30, with an empty cache first."""
    import torch

    from midlayer_encoders import LayerEncoder

    rows = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as tiny:
        os.environ[GGUF_CACHE] = tiny
        write_vocabulary(Path(tiny, "model.gguf"), json.loads(FIXTURE.read_text("utf8"))["vocabularies"]["gpt2"])
        LayerEncoder(tiny, 1, gguf_file="model.gguf", device="cpu")  # imports
        os.environ[GGUF_CACHE] = folder
        for layer, what in ((24, "first"), (24, "second"), (30, "first"), (30, "second")):
            start, used = time.perf_counter(), time.process_time()
            LayerEncoder("built-in", layer, device="cpu")
            seconds, cpu = time.perf_counter() - start, time.process_time() - used
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 1e6
            rows.append(f"| {layer} | {what} | {seconds:.1f} | {cpu:.1f} | {size:.1f} |")
            print(rows[-1], flush=True)
    lines = [
        "# Loading a GGUF file",
        "",
        'Time to construct `LayerEncoder("built-in", layer)` (SmolLM2-135M, Q4_1) after imports, with an empty cache of '
        f"converted models at the start. `python -m benchmarks.gguf_tokens --loading`: one thread, torch {torch.__version__}.",
        "",
        "| layer | load | s | CPU s | cache afterwards, MB |",
        "|---|---|---|---|---|",
        *rows,
    ]
    wrapped = [line if line.startswith("|") else textwrap.fill(line, 118, break_on_hyphens=False) for line in lines]
    (RESULTS.parent / "gguf_loading.md").write_text("\n".join(wrapped) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
