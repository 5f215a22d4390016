"""Settings and arguments of calls, checked without torch: by the functions in Python and by the command line alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from midlayer_encoders.errors import MidlayerError, OptionError, did_you_mean, short_repr
from midlayer_encoders.files import LOCK, check_writable, expand_home
from midlayer_encoders.validation import check_choice, check_count, check_flag, check_number, check_path, check_seed

#: The seven metrics of "Layer by Layer" (Skean et al., 2025).
PAPER_METRICS = ("prompt_entropy", "dataset_entropy", "effective_rank", "curvature", "infonce", "lidar", "dime")
#: All metrics by the name that the function, command-line option and log key share.
METRIC_NAMES = (
    *PAPER_METRICS,
    *("matrix_entropy", "prompt_effective_rank", "anisotropy", "intrinsic_dimension", "alpha_req", "logdet_entropy"),
    *("first_token_share", "cka", "block_influence", "neighbor_overlap", "half_match", "alignment", "uniformity"),
)
#: Names of a metric with other options.
METRIC_ALIASES = ("rankme", "exp_lidar", "raw_uniformity")
_NOT_COMPARABLE = ("matrix_entropy", "cka", "block_influence", "neighbor_overlap", "half_match")
#: Metrics that are defined for one layer and any subset of the texts.
COMPARABLE = tuple(name for name in METRIC_NAMES if name not in _NOT_COMPARABLE)

#: Every rule that chooses a layer.
RULE_NAMES = (
    *("last", "fixed-depth", "min-dime", "min-infonce", "min-dataset-entropy", "min-prompt-entropy"),
    *("valley-midpoint", "half-match", "few-labels", "auto"),
)

Objective: TypeAlias = Literal["pairs", "mntp"]
Target: TypeAlias = Literal["sentence-transformers", "vllm", "onnx", "gguf"]
#: Export targets.
TARGETS: tuple[Target, ...] = get_args(Target)
TokenBudget: TypeAlias = int | Literal["auto"]
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
        checked = {
            "lora": bool(self.lora) if self.lora is True or self.lora == 0 else check_count("lora", self.lora),
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
        units = {"epochs": "epochs", "patience": "epochs", "batch_size": "examples"}
        checked: dict[str, object] = {
            **{name: check_count(name, getattr(self, name), unit) for name, unit in units.items()},
            "learning_rate": check_number("learning_rate", self.learning_rate),
            "weight_decay": check_number("weight_decay", self.weight_decay),
            "heads": None if self.heads is None else check_count("heads", self.heads),
            "keep_gb": check_number("keep_gb", self.keep_gb),
            "seed": check_seed(self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class IntervalSettings:
    """Settings of the intervals of :func:`~midlayer_encoders.compare`.

    Attributes:
        resamples: Random halves of the texts, for the intervals. At least 2.
        confidence: of the intervals, in ``(0, 1)``.
    """

    resamples: int = 50
    confidence: float = 0.95

    def __post_init__(self) -> None:
        object.__setattr__(self, "resamples", check_count("resamples", self.resamples, minimum=2))
        confidence = check_number("confidence", self.confidence, maximum=1.0)
        if not 0 < confidence < 1:
            raise OptionError(f"`confidence` must be in (0, 1), as 0.95, but got {self.confidence}.")
        object.__setattr__(self, "confidence", confidence)


def metric_names(
    metrics: str | Sequence[str], known: Sequence[str] = METRIC_NAMES, aliases: Sequence[str] = METRIC_ALIASES
) -> tuple[str, ...]:
    """Return the names of metrics, each once, or raise an :class:`OptionError` if one is unknown.

    Args:
        metrics: ``"all"``, ``"paper"`` (the paper's seven), one name, or several.
        known: the names that ``"all"`` stands for.
        aliases: other names that may be requested.

    Example:
        >>> metric_names("paper")
        ('prompt_entropy', 'dataset_entropy', 'effective_rank', 'curvature', 'infonce', 'lidar', 'dime')
    """
    groups = {"all": tuple(known), "paper": PAPER_METRICS}
    names = [*known, *aliases]
    if isinstance(metrics, str):
        check_choice("metrics", metrics, [*groups, *names])
        return groups.get(metrics, (metrics,))
    if not isinstance(metrics, list | tuple) or not metrics:
        got = "none" if isinstance(metrics, list | tuple) else f"{short_repr(metrics)}. Write a list of names"
        raise OptionError(f"`metrics` must be 'all', 'paper', or some of {', '.join(names)}, but got {got}.")
    for name in metrics:
        check_choice("metrics", name, names)
    return tuple(dict.fromkeys(metrics))


def check_budget(token_budget: TokenBudget) -> TokenBudget:
    """Validate a number of tokens or ``"auto"``."""
    return "auto" if token_budget == "auto" else check_count("token_budget", token_budget, "tokens")


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
                f"The target {extra!r} needs {' and '.join(packages)}, but {name} is not installed: "
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
    check_path("out", out)
    if out is None:
        raise OptionError("`out` must be a folder, but got None.")
    folder = expand_home(out)
    names = {path.name for path in folder.glob("[!.]*")} if folder.is_dir() else set()
    if names - {LOCK} and RUN_FILE not in names:  # a run that is killed immediately leaves a lock and hidden files
        raise OptionError(
            f"`out` must be a new or empty folder, or hold an earlier run, but {folder} holds other files."
        )
    check_writable(folder)
    return folder
