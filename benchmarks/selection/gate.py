"""Half match of every layer of models that were never trained, beside trained ones: where does the gate of ``auto`` open?

    python -m benchmarks.selection.gate measure        # about ten minutes on two idle cores
    python -m benchmarks.selection.gate table          # writes its part of README.md

Untrained models have the tokenizer of a real one, so that the halves of a text share real tokens: MiniLM's own config and SmolLM2's
with 8 blocks, both initialized anew, and small ones of five families at two widths, three seeds each. Writes ``results/gate.csv``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch
import transformers

from benchmarks.selection.real import corpus, encoder
from benchmarks.selection.run import write_part
from midlayer_encoders import LayerEncoder
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.selection.kind import is_embedding_model
from midlayer_encoders.selection.rules import DEPTH

HERE = Path(__file__).parent
RESULT = HERE / "results" / "gate.csv"
CORPORA = ("wikitext", "banking", "emotion", "titles", "sts")
TEXTS = 96
SEEDS = 3
BLOCKS = 6
TOKENS = 64
ANEW = ", initialized anew"
REAL = {"all-MiniLM-L6-v2": "embedding", "SmolLM2-135M": "instruct"}


def configs(vocab: int, width: int) -> Iterator[tuple[str, transformers.PretrainedConfig]]:
    """Yield small configs of several families."""
    sizes = {"vocab_size": vocab, "hidden_size": width, "num_hidden_layers": BLOCKS}
    heads = {"num_attention_heads": width // 32, "intermediate_size": 4 * width, "max_position_embeddings": 512}
    gpt2 = {"n_embd": width, "n_layer": BLOCKS, "n_head": width // 32, "n_positions": 512}
    yield "Llama", transformers.LlamaConfig(**sizes, **heads)
    yield "GPTNeoX", transformers.GPTNeoXConfig(**sizes, **heads)
    yield "GPT2", transformers.GPT2Config(vocab_size=vocab, **gpt2)
    if width < 256:  # MiniLM's own config is BERT's of 384, and Mamba's steps are one after another on a CPU
        yield "BERT", transformers.BertConfig(**sizes, **heads)
        yield "Mamba", transformers.MambaConfig(**sizes, state_size=8)


def untrained(real: LayerEncoder, of: str, folder: Path) -> Iterator[tuple[str, int, LayerEncoder]]:
    """Yield the name, the seed and the encoder of models with random weights, as transformers initializes them."""
    own, width = real.transformer.config, 384
    if of == "SmolLM2-135M":
        width, kept = 128, {**own.to_dict(), "num_hidden_layers": BLOCKS, "quantization_config": None}
        own = transformers.LlamaConfig(**kept)
    for name, config in [(of + ANEW, own), *configs(len(real.tokenizer), width)]:
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            path = folder / f"{name}-{of}-{seed}".replace(" ", "_")
            transformers.AutoModel.from_config(config).save_pretrained(path)
            real.tokenizer.save_pretrained(path)
            yield name if name.startswith(of) else f"{name} of {width}", seed, LayerEncoder(str(path), -1, device="cpu")


def measure() -> None:
    """Write half match of every layer, model and corpus, as they come."""
    texts = {name: corpus(name, TEXTS)[0][:TEXTS] for name in CORPORA}
    rows: list[tuple[object, ...]] = []

    def add(name: str, kind: str, seed: int, made: LayerEncoder) -> None:
        made.max_seq_length = TOKENS
        for dataset, some in texts.items():
            frame = measure_layers(made, some, metrics=["half_match"])
            for layer, value in frame.sort("layer").select("layer", "value").iter_rows():
                rows.append((name, kind, seed, dataset, made.num_layers, layer, round(value, 4)))
        names = ["model", "kind", "seed", "dataset", "num_layers", "layer", "half_match"]
        pl.DataFrame(rows, schema=names, orient="row").write_csv(RESULT)
        print(name, seed, flush=True)

    for of, kind in REAL.items():
        real = encoder(of)
        with tempfile.TemporaryDirectory() as folder:
            for name, seed, made in untrained(real, of, Path(folder)):
                add(name, "untrained", seed, made)
        add(of, kind, 0, real)


@dataclass(frozen=True)
class Looked:
    """One model on one corpus: half match by layer."""

    model: str
    kind: str
    values: list[float]

    @property
    def last(self) -> float:
        return self.values[-1]

    @property
    def highest(self) -> bool:
        return self.last > max(self.values[:-1])

    @property
    def others(self) -> float:
        """The highest value up to the depth that would be taken otherwise."""
        blocks = len(self.values) - 1
        return max(self.values[: min(round(DEPTH * blocks) + 1, blocks)])

    @property
    def opens(self) -> bool:
        return bool(is_embedding_model(torch.tensor(self.values)))

    @property
    def opened(self) -> bool:
        """What the gate was before: highest at the last layer, and half or more there."""
        return self.highest and self.last >= 0.5


def table() -> list[str]:
    """Return a row for each model: the ranges over corpora and seeds, and how often each gate opens."""
    frame = pl.read_csv(RESULT)
    keys = ["model", "kind", "seed", "dataset"]
    looked = [
        Looked(model, kind, part.sort("layer")["half_match"].to_list())
        for (model, kind, _, _), part in frame.group_by(keys, maintain_order=True)
    ]
    lines = [
        "| model | | first layer | last layer | last above the first | last above those up to depth 0.8 | passes in 0.1 | passes now |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, kind in dict.fromkeys((one.model, one.kind) for one in looked):
        of = [one for one in looked if one.model == model]

        def span(numbers: list[float], form: str = ".2f") -> str:
            return f"{min(numbers):{form}} to {max(numbers):{form}}"

        cells = [
            span([one.values[0] for one in of]), span([one.last for one in of]),
            span([one.last - one.values[0] for one in of], "+.2f"), span([one.last - one.others for one in of], "+.2f"),
            f"{sum(one.opened for one in of)} of {len(of)}", f"{sum(one.opens for one in of)} of {len(of)}",
        ]  # fmt: skip
        lines.append(f"| {model} | {kind} | " + " | ".join(cells) + " |")
    # The first blocks of an untrained model are an untrained model of fewer.
    cut = [Looked(o.model, o.kind, o.values[: n + 1]) for o in looked if o.kind == "untrained" for n in (3, 4, 5)]
    gain = max(one.last - one.others for one in cut)
    lines.append(
        f"| untrained models, cut after 3, 4 and 5 blocks | untrained | | | | at most {gain:+.2f} | "
        f"{sum(one.opened for one in cut)} of {len(cut)} | {sum(one.opens for one in cut)} of {len(cut)} |"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "table"])
    given = parser.parse_args()
    if given.what == "measure":
        measure()
    else:
        write_part("gate", table())


if __name__ == "__main__":
    main()
