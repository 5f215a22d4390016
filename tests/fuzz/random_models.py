"""Random tiny models, each encoded at a random layer with random options and compared with the uncut model.

The expected vectors come from plain transformers and NumPy: the uncut model runs on one text at a time, without
padding, its hidden states or hooks on its blocks give the layer, and the pooling is written out below.
"""

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers as tf
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import MidlayerError
from tests.support.tiny_folders import tokenizer

Array = npt.NDArray[np.float64]

VOCAB = 99
TOLERANCE = 5e-4  # relative to the length of the vector: another order of summation
POOLINGS = ("mean", "cls", "last", "max", "weightedmean")
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz 0123456789.,:!?'"


class WrongVectorError(AssertionError):
    """An encoder gave a vector that the uncut model does not give."""


@dataclass(frozen=True)
class Uncut:
    """An uncut model as the oracle sees it.

    Attributes:
        states: from token ids to the states of every layer, ``(T, D)`` each, before the final norm; several
            alternatives if the model does not define which ones are those of a layer.
        final: the final norm; None if there is none.
        depth: number of blocks.
    """

    states: Callable[[list[int]], list[list[Tensor]]]
    final: Callable[[Tensor], Tensor] | None
    depth: int


@dataclass
class RandomCase:
    """One random model, layer and options."""

    description: str
    encoder: Callable[[], LayerEncoder]
    uncut: Uncut
    layer: int
    norm: str
    pooling: str
    texts: list[str]
    tokenize: Callable[[str], list[int]]
    batch_size: int
    prompt: str = ""
    max_length: int | None = None
    truncate_dim: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Raise a :class:`WrongVectorError` unless every vector is that of the uncut model, or another error."""
        encoder = self.encoder()
        prompt = {"prompt": self.prompt} if self.prompt else {}
        vectors = encoder.encode(self.texts, batch_size=self.batch_size, show_progress_bar=False, **prompt)
        for text, vector in zip(self.texts, np.asarray(vectors, dtype=np.float64), strict=True):
            candidates = self.expected(self.prompt + text)
            errors = [_relative_error(expected[: self.truncate_dim], vector) for expected in candidates]
            if not min(errors) <= TOLERANCE:
                raise WrongVectorError(f"relative error {min(errors):.2g} on {text!r}")

    def expected(self, text: str) -> list[Array]:
        """Return the vectors that the uncut model gives a text."""
        ids = self.tokenize(text)[: self.max_length]
        with torch.no_grad():
            candidates = self.uncut.states(ids)[self.layer]
            if self.norm == "final" and self.uncut.final is not None:
                candidates = [self.uncut.final(states) for states in candidates]
        return [pooled(states.double().numpy(), self.pooling) for states in candidates]


def pooled(states: Array, pooling: str) -> Array:
    """Return the pooled vector of the states of one text, shape ``(T, D)``."""
    if pooling == "cls":
        return states[0]
    if pooling == "last":
        return states[-1]
    if pooling == "max":
        return np.asarray(states.max(axis=0))
    weights = np.arange(1, len(states) + 1) if pooling == "weightedmean" else np.ones(len(states))
    return np.asarray((states * weights[:, None]).sum(axis=0) / weights.sum())


def _relative_error(expected: Array, vector: Array) -> float:
    if expected.shape != vector.shape:
        return float("inf")
    error = float(np.linalg.norm(expected - vector) / max(float(np.linalg.norm(expected)), 1e-6))
    return error if np.isfinite(error) else float("inf")


# --- parts that all kinds of models share ----------------------------------------------------------------------------


def _random_texts(random: Random) -> list[str]:
    lengths = [random.choice([1, 2, 3, 5, 9, 17, 30, 60]) for _ in range(random.randint(1, 5))]
    return ["".join(random.choices(_CHARACTERS, k=length)).strip() or "a" for length in lengths]


def _randomize(model: nn.Module, seed: int) -> None:
    """Fill every weight, norms and biases too, so that a missing or repeated module is detected."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def _options(random: Random, depth: int, width: int) -> dict[str, Any]:
    """Return the fields of a case that do not depend on the kind of model."""
    layer = random.randint(0, depth)
    return {
        "layer": layer,
        "norm": random.choice(["final", "none"]),
        "pooling": random.choice(POOLINGS),
        "texts": _random_texts(random),
        "batch_size": random.choice([1, 2, 8]),
        "prompt": random.choice(["", "", "query: "]),
        "truncate_dim": random.choice([None, None, width // 2]),
    }


def _encoder_options(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in ("norm", "pooling", "truncate_dim") if fields[name] is not None}


def _block_states(
    model: nn.Module, blocks: Sequence[nn.Module], call: Callable[[Tensor], Any]
) -> Callable[[list[int]], list[list[Tensor]]]:
    """Return the input of the first call of a block, then the output of each call and the input of the next one."""

    def states(ids: list[int]) -> list[list[Tensor]]:
        calls: list[tuple[Tensor, Tensor]] = []

        def record(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append(((*args, *kwargs.values())[0], output[0] if isinstance(output, tuple) else output))

        handles = [block.register_forward_hook(record, with_kwargs=True) for block in blocks]
        try:
            call(torch.tensor([ids]))
        finally:
            for handle in handles:
                handle.remove()
        inputs = [before[0] for before, _ in calls]
        outputs = [after[0] for _, after in calls]
        later_inputs = [[states] for states in inputs[1:]] + [[]]
        return [[inputs[0]], *([after, *before] for after, before in zip(outputs, later_inputs, strict=True))]

    return states


# --- folders of architectures in transformers ------------------------------------------------------------------------


def _decoder(random: Random) -> dict[str, Any]:
    heads = random.choice([2, 4])
    return {"num_attention_heads": heads, "num_key_value_heads": random.choice([1, heads])}


_ARCHITECTURES: dict[str, tuple[str, str, Callable[[Random], dict[str, Any]]]] = {
    # name: the class, the path of the final norm, and options of the configuration
    "Llama": ("norm", "layers", lambda r: {**_decoder(r), "hidden_act": r.choice(["silu", "gelu", "relu"])}),
    "Qwen2": ("norm", "layers", _decoder),
    "Qwen3": ("norm", "layers", lambda r: {**_decoder(r), "head_dim": 8}),
    "Mistral": ("norm", "layers", lambda r: {**_decoder(r), "sliding_window": r.choice([None, 3])}),
    "Gemma": ("norm", "layers", lambda r: {**_decoder(r), "head_dim": 8}),
    "Gemma2": ("norm", "layers", lambda r: {**_decoder(r), "head_dim": 8, "sliding_window": 3}),
    "Phi3": ("norm", "layers", _decoder),
    "Olmo2": ("norm", "layers", _decoder),
    "StableLm": ("norm", "layers", lambda r: {**_decoder(r), "use_parallel_residual": r.choice([True, False])}),
    "Cohere": ("norm", "layers", _decoder),
    "Granite": (
        "norm",
        "layers",
        lambda r: {**_decoder(r), "embedding_multiplier": r.choice([1.0, 3.0]), "residual_multiplier": 0.5},
    ),
    "GPTNeoX": ("final_layer_norm", "layers", lambda r: {"use_parallel_residual": r.choice([True, False])}),
    "GPT2": ("ln_f", "h", lambda r: {"scale_attn_by_inverse_layer_idx": r.choice([True, False])}),
    "Bert": ("", "encoder.layer", lambda r: {"hidden_act": r.choice(["gelu", "relu"])}),
    "Roberta": ("", "encoder.layer", lambda _: {}),
    "ModernBert": (
        "final_norm",
        "layers",
        lambda r: {"global_attn_every_n_layers": r.choice([1, 2, 3]), "local_attention": 4},
    ),
}


@contextmanager
def folder_case(random: Random) -> Iterator[RandomCase]:
    """Yield a case of a folder with a model of transformers."""
    name = random.choice(list(_ARCHITECTURES))
    norm_path, blocks_path, more = _ARCHITECTURES[name]
    depth = random.randint(1, 6)
    width = random.choice([16, 32])
    options = {
        "vocab_size": VOCAB, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 4,
        "intermediate_size": 24, "max_position_embeddings": 80, "pad_token_id": 0, "bos_token_id": 3,
        "eos_token_id": 2,
    } | more(random)  # fmt: skip
    if name == "GPT2":
        options["n_inner"] = options.pop("intermediate_size")
    config = getattr(tf, f"{name}Config")(**options)
    model: Any = getattr(tf, f"{name}Model")(config).eval()
    _randomize(model, random.randrange(2**31))
    fields = _options(random, depth, width)
    side = random.choice(["left", "right"])
    max_length = random.choice([None, None, 7])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        text_tokenizer = tokenizer()
        text_tokenizer.padding_side = side
        text_tokenizer.save_pretrained(folder)
        loaded: Any = tf.AutoModel.from_pretrained(folder).eval()
        text_tokenizer = tf.AutoTokenizer.from_pretrained(folder)  # Qwen2's class splits texts at spaces

        def states(ids: list[int]) -> list[list[Tensor]]:
            output = loaded(torch.tensor([ids]), output_hidden_states=True)
            raw_last = _block_states(loaded, loaded.get_submodule(blocks_path), loaded)(ids)[-1]
            return [*([hidden[0]] for hidden in output.hidden_states[:-1]), raw_last]

        final = loaded.get_submodule(norm_path) if norm_path else None
        keywords = _encoder_options(fields) | ({} if max_length is None else {"max_length": max_length})
        layer = fields["layer"]
        yield RandomCase(
            f"{name}, {depth} blocks of {width}, {options}, padding {side}, layer {layer}, {keywords}",
            lambda: LayerEncoder(folder, layer, device="cpu", **keywords),
            Uncut(states, final, depth),
            tokenize=lambda text: list(text_tokenizer(text)["input_ids"]),
            max_length=max_length or 64,
            **fields,
        )


# --- models of generated code: folders with remote code, and modules in memory ----------------------------------------

_SOURCE = """
import math

import torch
from torch import nn
{imports}

class Mixer(nn.Module):
    def __init__(self, width, causal, masked):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.causal = causal
        self.masked = masked

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / x.shape[-1] ** 0.5
        if self.masked and mask is not None:
            scores = scores.masked_fill(mask[:, None, :] == 0, -1e9)
        if self.causal:
            length = x.shape[1]
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
        return scores.softmax(-1) @ self.value(x)


class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        width = config.hidden_size
        self.norm = nn.LayerNorm(width)
        self.mixer = Mixer(width, {causal}, {masked})
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), {activation}, nn.Linear(2 * width, width))
        self.index = index
        self.scale = {scale}

    def forward(self, x, mask=None):
        x = x + self.scale * self.mixer(self.norm(x), mask)
        x = x + self.scale * self.mlp(x)
        return {returned}


class FuzzModel({base}):
    {attributes}

    def __init__(self, config):
        super().__init__({init})
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.{blocks} = nn.ModuleList([Block(config, index) for index in range(config.num_hidden_layers)])
        self.norm = {norm}
        {post_init}

    def forward(self, input_ids=None, attention_mask=None, output_hidden_states=None, **kwargs):
        blocks = self.{blocks}
        x = self.embed(input_ids) * {embedding}
        first = x
        stack = []
        hidden = [x]
        for index, block in enumerate({order}):
            {before}
            x = {call}
            {after}
            hidden.append(x)
        x = self.norm(x)
        hidden[-1] = x
        {output}
"""

_CONFIG_SOURCE = """
from transformers import PretrainedConfig


class FuzzConfig(PretrainedConfig):
    model_type = "fuzz"

    def __init__(self, vocab_size=99, hidden_size=16, num_hidden_layers=4, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
"""

# The first choice of each is usual and drawn most often; the others make early layers depend on the number of blocks,
# on the position of a block, or on states of other blocks.
_CHOICES: dict[str, tuple[str, ...]] = {
    "scale": (
        "1.0",
        "1 / math.sqrt(2 * config.num_hidden_layers)",
        "1 / (index + 1)",
        "(index + 1) / config.num_hidden_layers",
        "2.0 if index >= config.num_hidden_layers - 2 else 1.0",
        "1.0 if index < 3 else 3.0",
        "0.5 if index % 2 else 1.0",
    ),
    "activation": (
        "nn.GELU()",
        "nn.Tanh() if index >= 3 else nn.GELU()",
        "nn.ReLU() if index >= config.num_hidden_layers // 2 else nn.GELU()",
    ),
    "embedding": (
        "1.0",
        "math.sqrt(self.config.hidden_size)",
        "len(self.{blocks}) ** 0.5",
        "self.config.num_hidden_layers ** -0.5",
    ),
    "order": ("blocks", "blocks", "reversed(blocks)"),
    "before": (
        "pass",
        "pass",
        "stack.append(x) if index < len(blocks) // 2 else None",
        "x = x + 0.1 * first",
        "x = x * (1 + index / len(blocks))",
    ),
    "after": (
        "pass",
        "pass",
        "x = x + stack.pop() if stack and index >= len(blocks) // 2 else x",
        "x = x / math.sqrt(len(blocks))",
        "x = x * 0.5 if index >= 3 else x",
    ),
    "norm": ("nn.LayerNorm(config.hidden_size)", "nn.Identity()"),
    "causal": ("True", "False"),
    "masked": ("True", "True", "True", "False"),
    "returned": ("x", "(x,)"),
    "blocks": ("layers", "h", "blocks"),
}


def _generated(random: Random, *, remote: bool) -> tuple[str, dict[str, str]]:
    """Return the source of a model, and the choices in it that are not the usual ones."""
    parts = {
        name: choices[0] if random.random() < 0.6 else random.choice(choices) for name, choices in _CHOICES.items()
    }
    unusual = {name: part for name, part in parts.items() if part != _CHOICES[name][0]}
    parts["embedding"] = parts["embedding"].format(blocks=parts["blocks"])
    parts["call"] = "block(x, attention_mask)" + ("[0]" if parts["returned"] == "(x,)" else "")
    if remote:
        parts |= {
            "imports": "from transformers import PreTrainedModel\n"
            "from transformers.modeling_outputs import BaseModelOutput\n"
            "from .configuration_fuzz import FuzzConfig\n",
            "base": "PreTrainedModel",
            "attributes": "config_class = FuzzConfig",
            "init": "config",
            "post_init": "self.post_init()",
            "output": "return BaseModelOutput(last_hidden_state=x, hidden_states=tuple(hidden) "
            "if output_hidden_states else None)",
        }
    else:
        parts |= {
            "imports": "",
            "base": "nn.Module",
            "attributes": "",
            "init": "",
            "post_init": "",
            "output": "return x",
        }
    return _SOURCE.format(**parts), unusual


def _uncut_generated(model: Any) -> Uncut:
    blocks = next(module for module in model.children() if isinstance(module, nn.ModuleList))

    def call(ids: Tensor) -> Any:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids))

    final = None if isinstance(model.norm, nn.Identity) else model.norm
    return Uncut(_block_states(model, list(blocks), call), final, len(blocks))


@contextmanager
def remote_case(random: Random) -> Iterator[RandomCase]:
    """Yield a case of a folder whose model is its own code."""
    source, unusual = _generated(random, remote=True)
    depth = random.randint(1, 6)
    fields = _options(random, depth, 16)
    text_tokenizer = tokenizer()
    text_tokenizer.padding_side = random.choice(["left", "right"])
    seed = random.randrange(2**31)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, f"fuzz{random.randrange(10**12)}")  # transformers caches code by the name of the folder
        folder.mkdir()
        (folder / "configuration_fuzz.py").write_text(_CONFIG_SOURCE)
        (folder / "modeling_fuzz.py").write_text(source)
        auto_map = {"AutoConfig": "configuration_fuzz.FuzzConfig", "AutoModel": "modeling_fuzz.FuzzModel"}
        config = {"model_type": "fuzz", "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": depth}
        config |= {"auto_map": auto_map, "architectures": ["FuzzModel"], "pad_token_id": 0}
        (folder / "config.json").write_text(json.dumps(config))
        text_tokenizer.save_pretrained(folder)
        code_config = tf.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model: Any = tf.AutoModel.from_config(code_config, trust_remote_code=True).eval()
        _randomize(model, seed)
        from safetensors.torch import save_file

        save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
        layer, keywords = fields["layer"], _encoder_options(fields)
        yield RandomCase(
            f"{unusual or 'usual'}, {depth} blocks, padding {text_tokenizer.padding_side}, layer {layer}, {keywords}",
            lambda: LayerEncoder(str(folder), layer, device="cpu", trust_remote_code=True, **keywords),
            _uncut_generated(model),
            tokenize=lambda text: list(text_tokenizer(text)["input_ids"]),
            max_length=64,
            **fields,
        )


@contextmanager
def module_case(random: Random) -> Iterator[RandomCase]:
    """Yield a case of a module in memory, with a tokenizer or with a function that pads."""
    source, unusual = _generated(random, remote=False)
    depth = random.randint(1, 6)
    fields = _options(random, depth, 16)
    fields["prompt"] = ""
    namespace: dict[str, Any] = {"__name__": "fuzz"}
    exec(compile(source, "<fuzz>", "exec"), namespace)
    config = SimpleNamespace(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=depth)
    model = namespace["FuzzModel"](config).eval()
    _randomize(model, random.randrange(2**31))
    text_tokenizer = tokenizer()
    text_tokenizer.padding_side = random.choice(["left", "right", "right"])
    kind = random.choice([*["tokenizer"] * 3, *["function"] * 2, "function without a mask"])

    def prepare(texts: list[str]) -> dict[str, Tensor]:
        features = text_tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
        names = ("input_ids",) if "without" in kind else ("input_ids", "attention_mask")
        return {name: features[name] for name in names}

    processor = text_tokenizer if kind == "tokenizer" else prepare
    blocks = next(name for name, child in model.named_children() if isinstance(child, nn.ModuleList))
    explicit: dict[str, Any] = random.choice([{}, {"blocks": blocks}, {"blocks": blocks, "final": ["norm"]}])
    layer, keywords = fields["layer"], _encoder_options(fields)
    yield RandomCase(
        f"{unusual or 'usual'}, {depth} blocks, {kind}, padding {text_tokenizer.padding_side}, {explicit}, layer {layer}, "
        f"{keywords}",
        lambda: LayerEncoder.from_module(
            model, layer, processor=processor, medium="text", device="cpu", **explicit, **keywords
        ),
        _uncut_generated(model),
        tokenize=lambda text: list(text_tokenizer(text)["input_ids"]),
        max_length=64,
        **fields,
    )


# --- GGUF files ------------------------------------------------------------------------------------------------------
# The reference tokenizers are written from their definitions, for ASCII texts.

_GPT_2_WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def _merged(symbols: list[str], best: Callable[[str, str], float | None]) -> list[str]:
    """Merge the pair with the lowest value of ``best``, the leftmost of equals, until no pair has one."""
    while True:
        values = [(best(left, right), place) for place, (left, right) in enumerate(itertools.pairwise(symbols))]
        ranked = [(value, place) for value, place in values if value is not None]
        if not ranked:
            return symbols
        _, place = min(ranked)
        symbols = [*symbols[:place], symbols[place] + symbols[place + 1], *symbols[place + 2 :]]


@dataclass(frozen=True)
class Vocabulary:
    """The fields of a tokenizer in a GGUF file, and a reference tokenizer."""

    fields: dict[str, Any]
    tokenize: Callable[[str], list[int]]


def _pieces(random: Random, count: int) -> list[str]:
    letters = _CHARACTERS.replace(" ", "")
    return sorted({"".join(random.choices(letters, k=random.choice([2, 2, 3]))) for _ in range(count)})


def _sentencepiece_vocabulary(random: Random) -> Vocabulary:
    characters = ["\u2581", *_CHARACTERS.replace(" ", "")]
    words = [*_pieces(random, 60), *(f"\u2581{letter}" for letter in "abcdefgh"), "\u2581\u2581"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *pieces, *words, *characters]
    scores = [0.0] * 259 + [-float(rank) for rank in random.sample(range(1000), len(words))] + [-1e4] * len(characters)
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(characters))
    index = {token: number for number, token in enumerate(tokens)}
    flags = {
        name: random.choice([None, True, False]) for name in ("add_bos_token", "add_eos_token", "add_space_prefix")
    }

    def best(left: str, right: str) -> float | None:
        return -scores[index[left + right]] if left + right in index else None

    def tokenize(text: str) -> list[int]:
        text = (" " if flags["add_space_prefix"] is not False else "") + text
        ids = [index[symbol] for symbol in _merged(list(text.replace(" ", "\u2581")), best)]
        return [*([1] if flags["add_bos_token"] is not False else []), *ids, *([2] if flags["add_eos_token"] else [])]

    fields = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1}
    return Vocabulary({**fields, "eos_token_id": 2, "unknown_token_id": 0, **flags}, tokenize)


def _byte_level_vocabulary(random: Random) -> Vocabulary:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    pairs = [(piece[0], piece[1]) for piece in _pieces(random, 60)] + [("\u0120", letter) for letter in "abcdefgh"]
    merges = list(dict.fromkeys(pairs))
    random.shuffle(merges)
    tokens = ["<|endoftext|>", *alphabet, *(left + right for left, right in merges)]
    index = {token: number for number, token in enumerate(tokens)}
    ranks = {pair: float(rank) for rank, pair in enumerate(merges)}
    add_bos = random.choice([None, True, False])

    def tokenize(text: str) -> list[int]:
        words = [word.replace(" ", "\u0120") for word in _GPT_2_WORDS.findall(text)]
        ids = [index[symbol] for word in words for symbol in _merged(list(word), lambda a, b: ranks.get((a, b)))]
        return [0, *ids] if add_bos else ids

    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [3] + [1] * (len(tokens) - 1)}
    fields |= {"merges": [f"{left} {right}" for left, right in merges], "bos_token_id": 0, "eos_token_id": 0}
    return Vocabulary({**fields, "add_bos_token": add_bos}, tokenize)


def _word_piece_vocabulary(random: Random) -> Vocabulary:
    letters = _CHARACTERS.replace(" ", "")
    known = [letter for letter in letters if letter not in random.sample(letters, 3)]  # the others are unknown
    pieces = _pieces(random, 60)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*specials, *(f"\u2581{piece}" for piece in (*known, *pieces)), *known, *pieces]
    index = {token: number for number, token in enumerate(tokens)}

    def word_ids(word: str) -> list[int]:
        word, ids = f"\u2581{word}", []
        while word:
            end = next((end for end in range(len(word), 0, -1) if word[:end] in index), 0)
            if not end:
                return [1]
            ids.append(index[word[:end]])
            word = word[end:]
        return ids

    def tokenize(text: str) -> list[int]:
        words = re.findall(r"[a-z0-9]+|[^a-z0-9\s]", text)
        return [2, *(number for word in words for number in word_ids(word)), 3]

    types = [3, 2, 3, 3, 3] + [1] * (len(tokens) - len(specials))
    fields = {"model": "bert", "tokens": tokens, "token_type": types, "bos_token_id": 2, "seperator_token_id": 3}
    return Vocabulary({**fields, "padding_token_id": 0, "unknown_token_id": 1, "mask_token_id": 4}, tokenize)


def _unigram_vocabulary(random: Random) -> Vocabulary:
    characters = ["\u2581", *_CHARACTERS.replace(" ", "")]
    words = [*_pieces(random, 60), *(f"\u2581{letter}" for letter in "abcdefgh")]
    tokens = ["<pad>", "</s>", "<unk>", *characters, *words]
    scores = [0.0] * 3 + [-10 - random.random() for _ in characters] + [-12 - 4 * random.random() for _ in words]
    scores = [float(np.float32(score)) for score in scores]
    index = {token: number for number, token in enumerate(tokens)}
    prefix = random.choice([None, True, False])

    def tokenize(text: str) -> list[int]:
        text = ((" " if prefix else "") + text).replace(" ", "\u2581")
        best: list[tuple[float, list[int]]] = [(0.0, [])]  # for the first characters of the text
        for end in range(1, len(text) + 1):
            starts = [start for start in range(max(0, end - 4), end) if text[start:end] in index]
            choices = [(best[start], index[text[start:end]]) for start in starts]
            best.append(max((score + scores[number], [*ids, number]) for (score, ids), number in choices))
        return [*best[-1][1], 1]

    types = [3, 3, 2] + [1] * (len(tokens) - 3)
    fields = {"model": "t5", "tokens": tokens, "scores": scores, "token_type": types, "eos_token_id": 1}
    return Vocabulary({**fields, "padding_token_id": 0, "unknown_token_id": 2, "add_space_prefix": prefix}, tokenize)


_VOCABULARIES = (_sentencepiece_vocabulary, _byte_level_vocabulary, _word_piece_vocabulary, _unigram_vocabulary)


def _write_gguf(path: Path, arch: str, model: Any, fields: dict[str, Any]) -> None:
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{name}", value)
        elif value is not None:
            writer.add_array(f"tokenizer.ggml.{name}", value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        part = name.split(".")[-2]
        if arch == "llama" and part in heads:  # llama.cpp interleaves the halves of each head
            shape = values.shape
            values = values.reshape(heads[part], 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(names.get_name(f"model.{name}", try_suffixes=(".weight", ".bias")), values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def gguf_case(random: Random) -> Iterator[RandomCase]:
    """Yield a case of a GGUF file with a vocabulary of one of the four kinds."""
    arch = random.choice(["llama", "qwen2"])
    make = random.choice(_VOCABULARIES)
    vocabulary = make(random)
    depth = random.randint(1, 5)
    options = {
        "vocab_size": len(vocabulary.fields["tokens"]), "hidden_size": 32, "num_hidden_layers": depth,
        "num_attention_heads": 4, "num_key_value_heads": random.choice([1, 2, 4]), "intermediate_size": 32,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    name = {"llama": "Llama", "qwen2": "Qwen2"}[arch]
    model: Any = getattr(tf, f"{name}Model")(getattr(tf, f"{name}Config")(**options)).eval()
    _randomize(model, random.randrange(2**31))
    fields = _options(random, depth, 32)
    keywords = _encoder_options(fields)
    layer = fields["layer"]
    with tempfile.TemporaryDirectory() as folder:
        _write_gguf(Path(folder, "model.gguf"), arch, model, vocabulary.fields)
        flags = {name: value for name, value in vocabulary.fields.items() if name.startswith("add_")}
        yield RandomCase(
            f"{arch}, {vocabulary.fields['model']}, {flags}, {depth} blocks, layer {layer}, {keywords}",
            lambda: LayerEncoder(folder, layer, gguf_file="model.gguf", device="cpu", **keywords),
            Uncut(_block_states(model, model.layers, model), model.norm, depth),
            tokenize=vocabulary.tokenize,
            **fields,
        )


KINDS: dict[str, Callable[[Random], Any]] = {
    "folder": folder_case,
    "remote": remote_case,
    "module": module_case,
    "gguf": gguf_case,
}


def run_case(kind: str, number: int) -> tuple[str, str, str]:
    """Return the outcome of a case (exact, refused, wrong or traceback), its description and its error."""
    with KINDS[kind](Random(f"{kind} {number}")) as case:
        try:
            case.run()
        except MidlayerError as error:
            return "refused", case.description, str(error)
        except WrongVectorError as error:
            return "wrong", case.description, str(error)
        except Exception as error:
            return "traceback", case.description, f"{type(error).__name__}: {error}"
        return "exact", case.description, ""
