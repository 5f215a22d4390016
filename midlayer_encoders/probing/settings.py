"""How probes are trained."""

from __future__ import annotations

from dataclasses import dataclass

from midlayer_encoders.validation import check_count, check_number, check_seed

__all__ = ["WITHOUT_EFFECT", "ProbeTraining"]

WITHOUT_EFFECT: dict[str, tuple[str, tuple[str, ...]]] = {
    "attentive": ("pools the tokens by itself", ("neighbors",)),
    "linear": ("reads one vector of each example", ("heads", "neighbors", "keep_gb")),
    "knn": (
        "trains nothing",
        ("heads", "keep_gb", "epochs", "patience", "batch_size", "learning_rate", "weight_decay"),
    ),
}
"""Why some arguments of :func:`probe` would have no effect with each kind, and which."""


@dataclass(frozen=True, kw_only=True)
class ProbeTraining:
    """How the probes of all layers are trained together.

    Attributes:
        epochs: at the most.
        patience: epochs in which neither accuracy nor loss on the validation examples was better than before, after
            which a layer is done; when all are, training ends.
        batch_size: examples in a step.
        learning_rate: of AdamW at the first step; it falls to zero along a cosine.
        weight_decay: of AdamW.
        seed: of weights and order.
    """

    epochs: int = 30
    patience: int = 5
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, what in (("epochs", "epochs"), ("patience", "epochs"), ("batch_size", "examples")):
            object.__setattr__(self, name, check_count(name, getattr(self, name), what))
        for name in ("learning_rate", "weight_decay"):
            object.__setattr__(self, name, check_number(name, getattr(self, name)))
        object.__setattr__(self, "seed", check_seed(self.seed))
