"""The runs of the record: one base, and what differs from it in each of the others."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["VARIANTS", "Variant"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What decides a run, beside the size and the data.

    Attributes:
        blocks: ``"llama"``, ``"gpt_neox"`` or ``"mamba2"``.
        objective: ``"causal"``, or ``"masked"``: both sides are seen, and 30 % of the tokens are hidden.
        bos: share of the sequences that begin with ``[BOS]``.
        peak: learning rate after the warm-up.
        decay: weight decay of the matrices.
        sink: what a head may attend to instead of the first token, one of ``attention.SINKS``; empty for nothing else.
        tied: whether the output layer has the embeddings' weights.
        seed: of the first weights; the order of the data is the same for all.
        steps: of 65,536 tokens each.
        more: whether the text of ``more_text.py`` follows the novels, 94M tokens after their 40M, so that a long run repeats
            itself less; the held-out part is of the novels alone, as every other variant's.
    """

    blocks: str = "llama"
    objective: str = "causal"
    bos: float = 1.0
    peak: float = 2e-3
    decay: float = 0.1
    sink: str = ""
    tied: bool = True
    seed: int = 0
    steps: int = 2000
    more: bool = False

    def changed(self) -> dict[str, object]:
        """Return what differs from the base."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}


BASE = Variant()
FIRST = replace(BASE, blocks="gpt_neox", bos=0.0, peak=1e-3, tied=False, steps=1024)
VARIANTS = {
    "base": BASE,
    "base-seed1": replace(BASE, seed=1),
    "base-seed2": replace(BASE, seed=2),
    "no-bos": replace(BASE, bos=0.0),
    "half-bos": replace(BASE, bos=0.5),
    "gpt-neox": replace(BASE, blocks="gpt_neox"),
    "low-rate": replace(BASE, peak=5e-4),
    "no-decay": replace(BASE, decay=0.0),
    "one-added": replace(BASE, sink="one"),
    "own-key": replace(BASE, sink="key"),
    "first-hidden": replace(BASE, sink="hidden"),
    "masked": replace(BASE, objective="masked"),
    "mamba2": replace(BASE, blocks="mamba2"),
    "long": replace(BASE, steps=9216, more=True),
    # What docs/training_first.md tells of: 67M tokens, no BOS.
    "first-causal": FIRST,
    "first-masked": replace(FIRST, objective="masked"),
    "first-mamba2": replace(FIRST, blocks="mamba2"),
}
