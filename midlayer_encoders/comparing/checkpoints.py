"""Checkpoints of one model: revisions on the hub, or the sub-folders of a folder, in the order of their steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from midlayer_encoders.errors import ModelNotFoundError, OptionError, did_you_mean
from midlayer_encoders.files import exists, expand_home
from midlayer_encoders.frame.steps import step_of
from midlayer_encoders.models.hub import load_config, local_only
from midlayer_encoders.validation import check_text, check_texts

__all__ = ["Checkpoint", "files_fingerprint", "find_checkpoints"]

_LIGHTNING = (
    "Lightning's .ckpt holds a LightningModule's whole training state, not a model folder. Write a folder for each "
    "step: `MyModule.load_from_checkpoint(path).model.save_pretrained('step500')`, and the tokenizer into it."
)
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")


@dataclass(frozen=True)
class Checkpoint:
    """A model at one step of its training.

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
        """What changes when the files of a folder do: names, sizes and times; the revision on the hub."""
        return files_fingerprint(self.source) if self.revision is None else self.revision


def files_fingerprint(path: Path | str) -> str:
    """Return what changes when a file, or one in a folder, does: names, sizes and times; nothing where there is none.

    Example:
        >>> files_fingerprint("EleutherAI/pythia-410m")
        ''
    """
    where = expand_home(path)
    if not exists(where):
        return ""
    files = sorted(one for one in where.iterdir() if one.is_file()) if where.is_dir() else [where]
    # The time of the last change too, which no copy preserves: weights of one size may bear one time of writing.
    seen = [(one.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for one in files for stat in [one.stat()]]
    return hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()


def find_checkpoints(
    model: str, revisions: Sequence[str] | None = None, *, trust_remote_code: bool = False
) -> list[Checkpoint]:
    """Return the checkpoints of a model in the order of their steps, or raise where they cannot be compared.

    Args:
        model: name on the hub, or a folder with sub-folders such as ``checkpoint-500`` or ``step500``.
        revisions: on the hub, branches or tags that name steps; in a folder, names or steps of sub-folders (``None``
            for all of them); or paths of folders anywhere.
        trust_remote_code: whether the model's own code on the hub may run, to read its config.

    Raises:
        OptionError: fewer than two, two of one step, one that is not there, different numbers of blocks.
        ModelNotFoundError: a revision that the hub does not have, or a hub that cannot be reached.
    """
    if isinstance(revisions, str):
        raise OptionError(f"`revisions` must be a list of revisions, but got a string. Write [{revisions!r}].")
    check_text("model", model)
    revisions = None if revisions is None else check_texts("revisions", revisions, minimum=0)
    for name in (model, *(revisions or ())):
        if name.endswith(".ckpt"):
            raise OptionError(f"`{'model' if name == model else 'revisions'}` must not be {name!r}. {_LIGHTNING}")
    folder = expand_home(model)
    found = _in_folder(folder, revisions) if exists(folder) and folder.is_dir() else _on_hub(model, revisions or ())
    _check_steps(found)
    _check_tokenizers(found)
    _check_depths(found, trust_remote_code)
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _in_folder(folder: Path, revisions: Sequence[str] | None) -> list[Checkpoint]:
    subs = sorted((_folder(sub) for sub in folder.iterdir() if _is_checkpoint(sub)), key=lambda one: one.step)
    held = {checkpoint.name: checkpoint for checkpoint in subs}
    if revisions is None:
        if not held:
            raise OptionError(f"`model` must be a folder with checkpoints in it. {_seen(folder)}")
        return list(held.values())
    return [_asked(name, held, folder) for name in revisions]


def _asked(name: str, held: dict[str, Checkpoint], folder: Path) -> Checkpoint:
    """Return the checkpoint of a name, of a step, or of a path."""
    if name in held:
        return held[name]
    if _is_path(name):
        return _folder(expand_home(name))
    step = int(name) if name.isdecimal() and len(name) < 19 else step_of(name)
    same = [checkpoint for checkpoint in held.values() if checkpoint.step == step]
    if len(same) != 1:
        known = ", ".join(held) or "none"
        raise OptionError(
            f"`revisions` must name checkpoints in {folder}, but {name!r} is {'two' if same else 'none'} of them. "
            f"There are: {known}.{did_you_mean(name, held)}" + ("" if held else f" {_seen(folder)}")
        )
    return same[0]


def _on_hub(model: str, revisions: Sequence[str]) -> list[Checkpoint]:
    if not revisions:
        raise OptionError(
            f"`revisions` must be given for a model on the hub, as ['step1000', 'step2000'], but got none; "
            f"{model!r} is no folder here."
        )
    return [
        _folder(expand_home(name)) if _is_path(name) else Checkpoint(name, step_of(name), model, name)
        for name in revisions
    ]


def _is_path(name: str) -> bool:
    return "/" in name and exists(expand_home(name)) and expand_home(name).is_dir()


def _folder(path: Path) -> Checkpoint:
    return Checkpoint(path.name, step_of(path.name), str(path), None)


def _is_checkpoint(path: Path) -> bool:
    try:
        step_of(path.name)
    except OptionError:
        return False
    return (path / "config.json").is_file()


def _seen(folder: Path) -> str:
    """Return what a folder without checkpoints holds, and what to do about it."""
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    held = f"It holds {', '.join(names[:8])}{', …' if len(names) > 8 else ''}." if names else "It is empty."
    if any(name.endswith(".ckpt") for name in names):
        return f"{held} {_LIGHTNING}"
    if "config.json" in names:
        return f"{held} That is one model: pass the folder that its checkpoints lie in."
    return f"{held} Sub-folders named as checkpoint-500 or step500, with a config.json each, are checkpoints."


def _check_steps(found: Sequence[Checkpoint]) -> None:
    seen: dict[int, Checkpoint] = {}
    for checkpoint in found:
        if checkpoint.step in seen:
            raise OptionError(
                f"`revisions` must be of different steps, but {seen[checkpoint.step].name!r} and {checkpoint.name!r} "
                f"are both of step {checkpoint.step}; drop one."
            )
        seen[checkpoint.step] = checkpoint
    if len(found) < 2:
        raise OptionError(
            f"`revisions` must be two or more, or nothing can change between them, but got {found[0].name!r} alone. "
            "For one model use `midlayer metrics`."
        )


def _check_tokenizers(found: Sequence[Checkpoint]) -> None:
    """Raise where a folder has no tokenizer: transformers would make an empty one, which reads a text as nothing."""
    for checkpoint in found:
        if checkpoint.revision is None and not any((Path(checkpoint.source) / name).is_file() for name in _TOKENIZERS):
            raise OptionError(
                f"`revisions` must have their tokenizer with them, but {checkpoint.source} has none. Write it there "
                "with `tokenizer.save_pretrained(folder)`; a Trainer does so when given `processing_class=tokenizer`."
            )


def _check_depths(found: Sequence[Checkpoint], trust_remote_code: bool) -> None:
    """Raise before anything large is read where a revision is not there, or two differ in depth."""
    depths = {checkpoint.name: _depth(checkpoint, trust_remote_code) for checkpoint in found}
    if len(set(depths.values()) - {None}) > 1:
        shown = ", ".join(f"{name} has {depth}" for name, depth in list(depths.items())[:6])
        raise OptionError(f"`revisions` must be one model, with as many blocks at every step, but {shown}.")


def _depth(checkpoint: Checkpoint, trust_remote_code: bool) -> int | None:
    """Return the number of blocks that a config names; ``None`` where a folder's does not, which is refused later."""
    local = local_only(checkpoint.source, checkpoint.revision)
    try:
        config = load_config(checkpoint.source, checkpoint.revision, local=local, trust_remote_code=trust_remote_code)
    except ModelNotFoundError:
        if checkpoint.revision is None:
            return None
        raise
    depth = getattr(config, "num_hidden_layers", None)
    return depth if isinstance(depth, int) else None
