"""The paper's token experiments, compared with a plain implementation that gives the same numbers.

Figure 5, plain: a forward pass for each prefix of a text. Ours: one pass for all prefixes. Figure 6, plain: a pass for each
prompt. Ours: the prompts of all probabilities in shared batches. Needs ``MIDLAYER_DATA`` (WikiText-2 and GSM8K in ``corpora/``) and the
built-in model. Writes ``benchmarks/results/experiments.md``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import torch
from metrics_cpu import DATA, Plain, prompt_entropy, tiny_folder
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "experiments.md"


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = function()
    return time.process_time() - start, found


# --- with a model ---------------------------------------------------------------------------------------------------


def along(name: str, encoder: Any, texts: list[str], tokens: int) -> str:
    """Compare all layers and all prefixes of some texts; the plain implementation passes every prefix through the model."""
    from benchmarks.paper.token_experiments import entropy_along

    plain = Plain(encoder)
    ids = [encoder.tokenizer(text, truncation=True, max_length=tokens)["input_ids"] for text in texts]

    def one_by_one() -> Tensor:
        return torch.tensor(
            [
                [[safe_entropy(layer) for layer in states_of(plain, one[:t])] for t in range(2, tokens + 1)]
                for one in ids
            ]
        ).mean(0)

    ours, frame = timed(lambda: entropy_along(encoder, texts, max_length=tokens))
    theirs, expected = timed(one_by_one)
    at = frame.filter(pl.col("position") >= 2).sort("position", "layer")["value"].to_torch().reshape(tokens - 1, -1)
    off = float((at - expected).abs().max())
    return f"| {name} | {len(texts)} x {tokens} | {theirs:.1f} | {ours:.1f} | **{theirs / ours:.1f}** | {off:.0e} |"


def safe_entropy(states: Tensor) -> float:
    """Return the prompt entropy; tokens that are all the same have none."""
    return prompt_entropy(states) if float((states - states[0]).abs().max()) > 0 else 0.0


@torch.no_grad()
def states_of(plain: Plain, ids: list[int]) -> list[Tensor]:
    """Return the raw states of every layer of one prompt."""
    plain._last.clear()
    layers = plain.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return [layer[0].double() for layer in (*layers[:-1], plain._last[0])]


def prompts(name: str, encoder: Any, texts: list[str], tokens: int) -> str:
    """Compare all kinds of replacement at six probabilities; the plain implementation passes one prompt at a time."""
    from benchmarks.paper.token_experiments import PROBABILITIES, REPLACEMENTS, extreme_prompts, replaced

    plain = Plain(encoder)
    ids = [encoder.tokenizer(text, truncation=True, max_length=tokens)["input_ids"] for text in texts]

    fixed = encoder.tokenizer.all_special_ids
    vocabulary = [token for token in range(len(encoder.tokenizer)) if token not in fixed]

    def changed(kind: str, probability: float) -> list[list[int]]:
        options = {
            "kind": kind,
            "vocabulary": vocabulary,
            "fixed": fixed,
            "generator": torch.Generator().manual_seed(0),
        }
        return [replaced(text_ids, probability, **options) for text_ids in ids]

    def one_by_one() -> Tensor:
        entropies = [
            [[safe_entropy(layer) for layer in states_of(plain, text_ids)] for text_ids in changed(kind, probability)]
            for kind in REPLACEMENTS
            for probability in PROBABILITIES
        ]
        return torch.tensor(entropies).mean(1)

    ours, frame = timed(lambda: extreme_prompts(encoder, texts, max_length=tokens))
    theirs, expected = timed(one_by_one)
    replacements = frame.filter(pl.col("condition") != "length")
    found = replacements["value"].to_torch().reshape(len(expected), -1)
    off = float((found - expected / torch.tensor(float(min(tokens, encoder[1].embedding_dimension))).log()).abs().max())
    return f"| {name} | {len(texts)} x {len(expected)} x {tokens} | {theirs:.1f} | {ours:.1f} | **{theirs / ours:.1f}** | {off:.0e} |"


def main() -> None:
    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.models.hub import built_in_model
    from midlayer_encoders.tasks.sources import own_texts
    from midlayer_encoders.tasks.table_files import Columns
    from midlayer_encoders.tasks.text_lists import read_texts, wikitext_paragraphs

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="of each text through a model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    least = 2 * given.tokens
    wiki = wikitext_paragraphs(
        read_texts(DATA / "corpora/wikitext2_raw_test.txt"), lambda line: len(line.split()), least=least
    )
    solutions = [
        text
        for text in own_texts(DATA / "corpora/gsm8k_test.jsonl", Columns("answer"))
        if len(text.split()) > given.tokens
    ]
    path, file = built_in_model()
    fig5, fig6 = [], []
    with tempfile.TemporaryDirectory() as folder:
        small = LayerEncoder(tiny_folder(folder), -1, device="cpu")
        large = LayerEncoder(path, -1, gguf_file=file, device="cpu")
        for name, encoder, tokens in (
            ("12 blocks of 64", small, 2 * given.tokens),
            ("SmolLM2-135M", large, given.tokens),
        ):
            fig5.append(along(name, encoder, (wiki if encoder is small else solutions)[:2], tokens))
            fig6.append(prompts(name, encoder, wiki[:4], tokens))
            print(fig5[-1], fig6[-1], sep="\n", flush=True)
    text = [
        "# The paper's token experiments, compared with a plain implementation", "",
        f"`python benchmarks/experiments.py --tokens {given.tokens}`: one thread, CPU time. The last column is the",
        "largest difference between the two implementations, in nats (Figure 6: in shares of the largest entropy).", "",
        "## Figure 5: every layer and every prefix, including the model", "",
        "| model | texts x tokens | plain, s | ours, s | plain / ours | difference |", "|---|---|---|---|---|---|", *fig5, "",
        "The plain implementation passes each prefix through the model, ours passes the text once.", "",
        "## Figure 6: three replacements at six probabilities, and prompts of growing length (ours only)", "",
        "| model | texts x conditions x tokens | plain, s | ours, s | plain / ours | difference |", "|---|---|---|---|---|---|", *fig6, "",
        "The plain implementation passes one prompt at a time, ours batches them.",
    ]  # fmt: skip
    RESULTS.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
