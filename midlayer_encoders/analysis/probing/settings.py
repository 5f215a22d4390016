"""How probes are trained."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ProbeTraining"]


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
