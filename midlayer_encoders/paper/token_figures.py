"""The paper's figures on tokens, spectra and theorems."""

from __future__ import annotations

import polars as pl

from midlayer_encoders.paper.depth_figures import Rows
from midlayer_encoders.paper.extreme_prompts import LENGTHS, PROMPT_KINDS, extreme_prompts
from midlayer_encoders.paper.prefix_entropy import entropy_along
from midlayer_encoders.paper.setting import MissingInputError, Setting
from midlayer_encoders.paper.subblocks import subblocks
from midlayer_encoders.paper.theorems import STATEMENTS, theorem_verdicts

# --- Figure 5: along the sequence -----------------------------------------------------------------------------------


def along_solutions(setting: Setting) -> pl.DataFrame:
    """Return prompt entropy along worked solutions."""
    texts = setting.solutions[: 2 * setting.limit]
    if not texts:
        raise MissingInputError("It needs worked solutions: pass --solutions FILE (the paper's are GSM8K's).")
    return pl.concat(
        entropy_along(
            setting.encoder(model),
            texts,
            stride=4,
            max_length=min(2 * setting.max_length, setting.encoder(model).max_seq_length or 2 * setting.max_length),
            pass_per_prefix=setting.pass_per_prefix,
            dataset="solutions",
        )
        for model in setting.required_models()
    )


def along_words(frame: pl.DataFrame) -> list[str]:
    """Return the entropy at the end of the solutions, and its spread over them."""
    words = []
    for (model,), part in frame.group_by("model", maintain_order=True):
        reached = part.filter(pl.col("texts") >= part["texts"].max() / 2)  # type: ignore[operator]
        end = reached.filter(pl.col("position") == reached["position"].max())
        words.append(
            f"{model}, after {end['position'][0]} tokens: {end['value'].to_numpy().mean():.2f} nats over all layers, "
            f"with a deviation over texts of {end['deviation'].to_numpy().mean():.2f}."
        )
    if frame["model"].n_unique() == 1:
        words.append("The claim compares a base model with one tuned on chains of thought: pass --model twice.")
    return words


# --- Figure 6: extreme prompts --------------------------------------------------------------------------------------


def changed_prompts(setting: Setting) -> pl.DataFrame:
    """Return prompt entropy of repeated, random and growing prompts."""
    lengths = [length for length in LENGTHS if length <= setting.max_length]
    return pl.concat(
        extreme_prompts(
            setting.encoder(model), setting.required_texts(), kinds=PROMPT_KINDS, lengths=lengths,
            max_length=setting.max_length, seed=setting.seed,
        )
        for model in setting.required_models()
    )  # fmt: skip


def prompt_words(frame: pl.DataFrame) -> list[str]:
    """Return how the entropy of each third of the layers changes from the least amount to the most."""
    words = []
    third = pl.min_horizontal(pl.col("depth") * 3, 2.999).floor()
    for (model, condition), part in frame.group_by("model", "condition", maintain_order=True):
        amounts = part["amount"].to_list()
        ends = min(amounts), max(amounts)
        means = (
            part.filter(pl.col("amount").is_in(ends))
            .group_by("amount", third.alias("third"))
            .agg(pl.col("value").mean())
        )
        low, high = (means.filter(pl.col("amount") == end).sort("third")["value"].to_list() for end in ends)
        change = ", ".join(
            f"{before:.2f} to {after:.2f} in the {where} third"
            for before, after, where in zip(low, high, ("first", "middle", "last"), strict=True)
        )
        words.append(f"{model}, {condition} from {ends[0]:g} to {ends[1]:g}: {change} of the layers.")
    return words


# --- Figure 7: orders -----------------------------------------------------------------------------------------------


def order_words(frame: pl.DataFrame) -> list[str]:
    """Return what the smaller eigenvalues contribute at each order."""
    tail = frame.filter(pl.col("name") == "tail_share", pl.col("beta") == 1.0).sort("alpha")
    shares = ", ".join(f"{100 * value:.1f} % (α = {alpha:g})" for alpha, value in tail.select("alpha", "value").rows())
    return [
        f"On λ = 1/i the smaller half of the eigenvalues carries {shares} of the entropy: the higher the order, the "
        "less small eigenvalues count, the contrary of what the paper's text says of its figure."
    ]


# --- Figure 15: inside the blocks -----------------------------------------------------------------------------------


def inside_blocks(setting: Setting) -> pl.DataFrame:
    """Return token metrics at every point inside the blocks."""
    return pl.concat(
        subblocks(setting.encoder(model), setting.required_texts(), max_length=setting.max_length)
        for model in setting.required_models()
    )


def inside_words(frame: pl.DataFrame) -> list[str]:
    """Return the entropy at each point inside the blocks, over the middle of the depth."""
    words = []
    rows = frame.filter(pl.col("name") == "prompt_entropy", pl.col("site") != "residual_in")
    for (model,), part in rows.group_by("model", maintain_order=True):
        middle = part.filter(pl.col("depth").is_between(0.3, 0.8)).group_by("site", maintain_order=True)
        said = ", ".join(
            f"{str(site).replace('_', ' ')} {value:.2f}" for site, value in middle.agg(pl.col("value").mean()).rows()
        )
        words.append(f"{model}, mean prompt entropy between 30 and 80 % of the depth: {said} nats.")
    return words


# --- theorems -------------------------------------------------------------------------------------------------------


def theorem_words(frame: pl.DataFrame) -> list[str]:
    """Return in how many draws each statement holds."""
    return [
        f"Theorem {statement} ({STATEMENTS[statement]}) holds in {holds} of {draws} draws."
        for statement, draws, holds in theorem_verdicts(frame).select("statement", "draws", "holds").iter_rows()
    ]


def theorem_table(frame: pl.DataFrame) -> Rows:
    """Return a row for each statement."""
    rows = [("theorem", "statement", "draws", "holds", "left / right, lowest", "highest")]
    for statement, draws, holds, low, high in theorem_verdicts(frame).iter_rows():
        rows.append((statement, STATEMENTS[statement], str(draws), str(holds), f"{low:.4g}", f"{high:.4g}"))
    return tuple(rows)
