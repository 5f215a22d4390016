"""Settings of training on pairs and on the vectors of a teacher."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from midlayer_encoders.errors import OptionError
from midlayer_encoders.validation import check_choice, check_count, check_number, check_seed

Objective: TypeAlias = Literal["pairs", "mntp"]
Match: TypeAlias = Literal["vectors", "centered", "similarities", "both"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings that every kind of training has.

    Attributes:
        lora: train adapters of this rank (``True``: 16) in every linear layer, merged into the weights at the end;
            otherwise all weights are trained.
        epochs: passes over the rows.
        max_steps: number of steps instead of ``epochs``.
        batch_size: rows per step.
        learning_rate: at its peak, after a tenth of the steps; the default depends on the kind of training.
        held_out: share of the rows to hold out. Their loss chooses the checkpoint and stops the run early.
        patience: evaluations without a lower loss after which the run stops.
        checkpoints: number of evaluations and checkpoints over the run; 0 for none.
        seed: for every random draw.
    """

    lora: bool | int = False
    epochs: float = 1.0
    max_steps: int | None = None
    batch_size: int = 32
    learning_rate: float | None = None
    held_out: float = 0.1
    patience: int = 3
    checkpoints: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        checked = {
            "lora": self.lora if isinstance(self.lora, bool) else check_count("lora", self.lora),
            "epochs": check_number("epochs", self.epochs, minimum=1e-6),
            "max_steps": None if self.max_steps is None else check_count("max_steps", self.max_steps, "steps"),
            "batch_size": check_count("batch_size", self.batch_size, "rows", minimum=2),
            "learning_rate": None if self.learning_rate is None else check_number("learning_rate", self.learning_rate),
            "held_out": check_number("held_out", self.held_out, maximum=0.5),
            "patience": check_count("patience", self.patience),
            "checkpoints": check_count("checkpoints", self.checkpoints, minimum=0),
            "seed": check_seed(self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.held_out and not self.checkpoints:
            raise OptionError("`held_out` must be 0 with checkpoints=0: its loss chooses the best checkpoint.")

    @property
    def lora_rank(self) -> int:
        """The rank of the adapters, 0 if all weights are trained."""
        return 16 if self.lora is True else int(self.lora)

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warmup."""
        return self._default_learning_rate if self.learning_rate is None else self.learning_rate

    @property
    def _default_learning_rate(self) -> float:
        return 5e-4 if self.lora else 5e-5


@dataclass(frozen=True, kw_only=True)
class TuneSettings(TrainingSettings):
    """Settings of :func:`~midlayer_encoders.tune`: those of any training (``lora`` to ``seed``), and its loss.

    The learning rate is 5e-5 by default, or 5e-4 with ``lora`` and pairs.

    Attributes:
        mini_batch: rows in memory at a time, for batches that do not fit (``CachedMultipleNegativesRankingLoss``).
        matryoshka: numbers of leading dimensions to train in addition to all of them (``MatryoshkaLoss``).
        objective: ``"pairs"``, or ``"mntp"``: predict masked tokens of ``texts`` from the states before them, which
            adapts a causal model to ``bidirectional`` attention (LLM2Vec).
    """

    mini_batch: int | None = None
    matryoshka: Sequence[int] | None = None
    objective: Objective = "pairs"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("objective", self.objective, ("pairs", "mntp"))
        if self.objective == "mntp" and (self.mini_batch or self.matryoshka):
            raise OptionError(
                "`mini_batch` and `matryoshka` must be left out with objective='mntp': they are for pairs."
            )

    @property
    def _default_learning_rate(self) -> float:
        return 5e-5 if self.objective == "mntp" else super()._default_learning_rate


@dataclass(frozen=True, kw_only=True)
class DistillSettings(TrainingSettings):
    """Settings of :func:`~midlayer_encoders.distill`: those of any training (``lora`` to ``seed``), and its loss.

    The learning rate is 2e-4 by default, or 1e-3 with ``lora``.

    Attributes:
        match: what of the teacher the student learns: its ``"vectors"`` (their cosine), its vectors minus their mean
            (``"centered"``), the ``"similarities"`` of the texts of a batch, for a teacher of another width, or
            ``"both"`` vectors and similarities.
    """

    match: Match = "vectors"
    epochs: float = 10.0
    batch_size: int = 128
    held_out: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("match", self.match, get_args(Match))

    @property
    def _default_learning_rate(self) -> float:
        return 1e-3 if self.lora else 2e-4
