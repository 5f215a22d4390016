"""Find the checkpoints of a model: revisions on the hub, or sub-folders of a folder, ordered by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from midlayer_encoders._types import content_digest
from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.files import exists, expand_home
from midlayer_encoders.frame.steps import step_of
from midlayer_encoders.models.hub import load_config, local_only
from midlayer_encoders.validation import check_text, check_texts

_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model")


@dataclass(frozen=True)
class Checkpoint:
    """A model at one training step.

    Attributes:
        name: of the revision or the sub-folder.
        step: the training step in that name.
        source: folder, or name on the hub.
        revision: on the hub; ``None`` for a folder.
    """

    name: str
    step: int
    source: str
    revision: str | None

    @property
    def fingerprint(self) -> str:
        """The revision on the hub, or a hash of names, sizes and times of a folder's files."""
        return files_fingerprint(self.source) if self.revision is None else self.revision


def files_fingerprint(path: Path | str) -> str:
    """Return a hash of names, sizes and times of a file or of the files in a folder; empty if there are none.

    Example:
        >>> files_fingerprint("EleutherAI/pythia-410m")
        ''
    """
    resolved = expand_home(path)
    if not exists(resolved):
        return ""
    files = sorted(file for file in resolved.iterdir() if file.is_file()) if resolved.is_dir() else [resolved]
    # The change time too, because a copy can preserve the modification time of weights of the same size.
    stats = [(file.name, file.stat()) for file in files]
    identity = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return content_digest(repr(identity), 8)


def find_checkpoints(
    model: str, revisions: Sequence[str] | None = None, *, trust_remote_code: bool = False
) -> list[Checkpoint]:
    """Return the checkpoints of a model ordered by step, or raise if they cannot be compared.

    Args:
        model: name on the hub, or a folder with sub-folders such as ``checkpoint-500`` or ``step500``.
        revisions: on the hub, branches or tags that name steps; in a folder, names or steps of sub-folders (``None``
            for all of them); or paths of folders anywhere.
        trust_remote_code: whether the model's code on the hub may run, to read its config.

    Raises:
        OptionError: fewer than two checkpoints, equal steps, a missing checkpoint, different numbers of blocks.
        ModelNotFoundError: a revision that the hub does not have, or a hub that cannot be reached.
    """
    check_text("model", model)
    names = None if revisions is None else check_texts("revisions", revisions, minimum=0)
    if is_folder(model):
        folder = expand_home(model)
        subfolders = [_checkpoint_at(path) for path in folder.iterdir() if _is_checkpoint(path)]
        inside = sorted(subfolders, key=attrgetter("step"))
        if not (inside or names):
            contents = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
            raise OptionError(
                "`model` must be a folder that contains checkpoints, such as checkpoint-500 or step500 with a "
                f"config.json in each, but {folder} holds {contents}."
            )
        checkpoints = inside if names is None else [_find_checkpoint(name, inside, folder) for name in names]
    elif names:
        checkpoints = [
            _checkpoint_at(name) if _is_path(name) else Checkpoint(name, step_of(name), model, name) for name in names
        ]
    else:
        raise OptionError(
            f"`revisions` must be given for a model on the hub, such as ['step1000', 'step2000'], but got none; "
            f"{model!r} is not a local folder."
        )
    checkpoints.sort(key=attrgetter("step"))
    _check_checkpoints(checkpoints, trust_remote_code)
    return checkpoints


def is_folder(name: str) -> bool:
    """Return True if a name is the path of a folder."""
    return exists(expand_home(name)) and expand_home(name).is_dir()


def _find_checkpoint(name: str, checkpoints: Sequence[Checkpoint], folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder with a name or a step, or the one at a path."""
    by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints}
    if name in by_name or _is_path(name):
        return by_name.get(name) or _checkpoint_at(name)
    step = int(name) if name.isdecimal() else step_of(name)
    matches = [checkpoint for checkpoint in checkpoints if checkpoint.step == step]
    if len(matches) != 1:
        raise OptionError(
            f"`revisions` must name checkpoints in {folder}, but {name!r} is {'two' if matches else 'none'} of them. "
            f"There are: {', '.join(by_name) or 'none'}.{did_you_mean(name, by_name)}"
        )
    return matches[0]


def _is_path(name: str) -> bool:
    return "/" in name and is_folder(name)


def _checkpoint_at(name: Path | str) -> Checkpoint:
    path = expand_home(name)
    return Checkpoint(path.name, step_of(path.name), str(path), None)


def _is_checkpoint(path: Path) -> bool:
    try:
        step_of(path.name)
    except OptionError:
        return False
    return (path / "config.json").is_file()


def _check_checkpoints(checkpoints: Sequence[Checkpoint], trust_remote_code: bool) -> None:
    """Raise before weights are loaded if checkpoints, in the order of their steps, cannot be compared."""
    if len(checkpoints) < 2:
        raise OptionError(
            f"`revisions` must be two or more, but got {checkpoints[0].name!r} alone. "
            "For one model use `midlayer metrics`."
        )
    depths = {}
    for position, checkpoint in enumerate(checkpoints):
        previous, folder = checkpoints[position - 1], Path(checkpoint.source)
        if position and previous.step == checkpoint.step:
            raise OptionError(
                f"`revisions` must be of different steps, but {previous.name!r} and {checkpoint.name!r} are both of "
                f"step {checkpoint.step}; drop one."
            )
        # transformers would create an empty tokenizer, which drops every text
        if checkpoint.revision is None and not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
            raise OptionError(
                f"`revisions` must have their tokenizer with them, but {checkpoint.source} has none. Write it there "
                "with `tokenizer.save_pretrained(folder)`; a Trainer does so with `processing_class=tokenizer`."
            )
        local = local_only(checkpoint.source, checkpoint.revision)
        config = load_config(checkpoint.source, checkpoint.revision, local=local, trust_remote_code=trust_remote_code)
        depths[checkpoint.name] = getattr(config, "num_hidden_layers", None)
    if len(set(depths.values()) - {None}) > 1:
        listing = ", ".join(f"{name} has {depth}" for name, depth in list(depths.items())[:6])
        raise OptionError(f"`revisions` must be one model, with as many blocks at every step, but {listing}.")
