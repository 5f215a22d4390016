"""Settings of the extras, checked without torch: by the functions in Python and by the command line alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from midlayer_encoders.errors import MidlayerError, OptionError, did_you_mean
from midlayer_encoders.files import check_output_folder, check_writable, expand_home
from midlayer_encoders.validation import check_choice, check_count, check_fields, check_flag, check_number, check_path

Objective: TypeAlias = Literal["pairs", "mntp"]
Target: TypeAlias = Literal["sentence-transformers", "vllm", "onnx", "gguf"]
#: Export targets.
TARGETS: tuple[Target, ...] = get_args(Target)
ENGINE_PACKAGES: dict[str, tuple[str, ...]] = {"onnx": ("onnxruntime", "onnx", "onnxscript"), "gguf": ("gguf",)}
#: File with the settings of a training run.
RUN_FILE = "tuning.json"
#: Formats of vectors.
SUFFIXES = (".npy", ".safetensors", ".parquet")
Match: TypeAlias = Literal["vectors", "centered", "similarities", "both"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings that every kind of training has.

    Attributes:
        lora: Rank of LoRA adapters, merged at the end; 0 trains all weights. ``True`` is 16. They are in every linear
            layer.
        epochs: Passes over the training data.
        max_steps: Number of steps, instead of epochs.
        batch_size: Pairs per step: more pairs mean more in-batch negatives.
        learning_rate: Peak; by default 5e-5, or 5e-4 with ``lora``. It is reached after a tenth of the steps.
        held_out: Fraction of the rows held out for early stopping; or 0. Their loss also chooses the checkpoint.
        patience: Evaluations without a lower held-out loss before stopping.
        checkpoints: Number of evaluations and checkpoints; 0 for none.
        seed: Random seed.
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
        check_fields(
            self,
            lora=_check_rank,
            epochs=partial(check_number, minimum=1e-6),
            max_steps=partial(check_count, unit="steps"),
            batch_size=partial(check_count, unit="rows", minimum=2),
            learning_rate=check_number,
            held_out=partial(check_number, maximum=0.5),
            patience=check_count,
            checkpoints=partial(check_count, minimum=0),
            seed=partial(check_count, minimum=0, maximum=2**32 - 1),
        )
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


def _check_rank(argument: str, value: object) -> int | bool:
    return bool(value) if value is True or value == 0 else check_count(argument, value)


@dataclass(frozen=True, kw_only=True)
class TuneSettings(TrainingSettings):
    """Settings of :func:`~midlayer_encoders.tune`: of any training (``lora`` to ``seed``), and of its loss.

    The learning rate with ``lora`` is 5e-4 for pairs only.

    Attributes:
        mini_batch: Rows in memory at a time, if a batch does not fit. The loss is then
            ``CachedMultipleNegativesRankingLoss``.
        matryoshka: Numbers of leading dimensions to train too: 128,64. The loss is then a ``MatryoshkaLoss``.
        objective: pairs, or mntp: predict masked tokens of ``texts``. They are predicted from the states before them,
            which adapts a causal model to ``bidirectional`` attention (LLM2Vec).
    """

    mini_batch: int | None = None
    matryoshka: Sequence[int] | None = None
    objective: Objective = "pairs"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("objective", self.objective, ("pairs", "mntp"))
        if self.objective == "mntp" and (self.mini_batch or self.matryoshka):
            raise OptionError(
                "`mini_batch` and `matryoshka` cannot be combined with objective='mntp': they are for pairs."
            )

    @property
    def _default_learning_rate(self) -> float:
        return 5e-5 if self.objective == "mntp" else super()._default_learning_rate


@dataclass(frozen=True, kw_only=True)
class DistillSettings(TrainingSettings):
    """Settings of :func:`~midlayer_encoders.distill`: of any training (``lora`` to ``seed``), and of its loss.

    Attributes:
        match: What to learn: vectors, centered (minus their mean), similarities (other widths) or both. Vectors are
            compared by their cosine, similarities among the texts of a batch.
        batch_size: Texts per step.
        learning_rate: Peak; by default 2e-4, or 1e-3 with ``lora``.
        held_out: Fraction of the texts held out for early stopping; or 0.
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


#: For each kind of probe, the :class:`ProbeSettings` without effect and the reason.
UNUSED_SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "attentive": ("pools the tokens by itself", ()),
    "linear": ("reads one vector of each example", ("heads", "keep_gb")),
}


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Settings of :func:`~midlayer_encoders.probe`.

    Attributes:
        epochs: Maximum number of epochs; each layer keeps its best.
        patience: a layer is finished after this many epochs without a better accuracy or loss on the validation
            examples; training ends when all layers are.
        batch_size: Examples per step.
        learning_rate: Initial learning rate of AdamW. It decays to zero along a cosine.
        weight_decay: of AdamW.
        heads: attention heads of ``"attentive"``; ``None`` for one per 64 dimensions.
        keep_gb: Memory for token states; beyond it each epoch runs again. They are cached in half precision.
        seed: Random seed. It is for split, weights and order.
    """

    epochs: int = 30
    patience: int = 5
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    heads: int | None = None
    keep_gb: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(
            self,
            epochs=partial(check_count, unit="epochs"),
            patience=partial(check_count, unit="epochs"),
            batch_size=partial(check_count, unit="examples"),
            learning_rate=check_number,
            weight_decay=check_number,
            heads=check_count,
            keep_gb=check_number,
            seed=partial(check_count, minimum=0, maximum=2**32 - 1),
        )


def check_arguments(target: str, folder: Path | None, *, overwrite: bool, int8: bool, stock: bool) -> None:
    """Raise an :class:`OptionError` if :func:`export_for` would reject these arguments."""
    check_choice("target", target, TARGETS)
    check_flag("overwrite", overwrite)
    if check_flag("int8", int8) and target not in ("onnx", "gguf"):
        raise OptionError(f"`int8` cannot be combined with target={target!r}: it applies to 'onnx' and 'gguf'.")
    if check_flag("stock", stock) and target != "sentence-transformers":
        raise OptionError(f"`stock` cannot be combined with target={target!r}: its files contain no code.")
    if folder is not None and (folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not overwrite)):
        raise OptionError(
            f"`folder` must be a new or empty folder, but {folder} is not. Choose another, or pass overwrite=True "
            "(--overwrite)."
        )
    if folder is not None:
        check_writable(expand_home(folder))
    require_packages(target, *ENGINE_PACKAGES.get(target, ()))


def require_packages(extra: str, *packages: str) -> None:
    """Raise an error with the install command if a package is missing; none is imported."""
    for name in packages:
        if find_spec(name) is None:
            raise MidlayerError(
                f"The extra {extra!r} needs {' and '.join(packages)}, but {name} is not installed: "
                f"pip install 'midlayer-encoders[{extra}]'."
            )


def check_out(out: Path | str) -> Path:
    """Return the path to write to, or raise if it cannot be written."""
    path = check_parent(out)
    if path.suffix not in SUFFIXES:
        raise OptionError(
            f"`out` must end in {', '.join(SUFFIXES)}, which selects the format, but got {path.name!r}."
            f"{did_you_mean(path.suffix, SUFFIXES)}"
        )
    if path.is_dir():
        raise OptionError(f"`out` must be a file, but {path} is a folder: use another name.")
    return path


def check_parent(out: Path | str) -> Path:
    """Return the path of the output, or raise unless its parent folder exists."""
    check_path("out", out)
    path = expand_home(out)
    if not path.parent.is_dir():
        raise OptionError(f"`out` must be in an existing folder, but {path.parent} does not exist: create it first.")
    return path


def checked_folder(out: Path | str) -> Path:
    """Return the folder of a run, or raise if it holds anything else."""
    check_path("out", "" if out is None else out)
    folder = expand_home(out)
    check_output_folder(folder, {RUN_FILE})
    return folder
