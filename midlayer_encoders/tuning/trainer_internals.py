"""Everything private of trainers and of PEFT that this room relies on: see ``tests/tuning/test_compat.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from sentence_transformers import SentenceTransformerTrainer
from torch import nn
from transformers import TrainerCallback, TrainerState

from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.files import atomic_write

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = [
    "WEIGHTS",
    "WeightsTrainer",
    "add_lora",
    "check_lora",
    "check_packages",
    "merge_lora",
    "since_best",
    "without_autocast",
]

WEIGHTS = "trained.safetensors"


class WeightsTrainer(SentenceTransformerTrainer):
    """Keeps in a checkpoint what is trained, and nothing else of the model.

    The trainer's own writes a folder of the model and loads it as a plain one, which has no adapters in it; and where
    that fails for the best checkpoint, it logs the error and ends with other weights.
    """

    def add_model_card_callback(self, *_: Any) -> None:
        """Mark the model as trained; the card is ours, so that no examples from the data are collected for it."""
        self.model.model_card_data.add_tags("generated_from_trainer")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:  # noqa: ARG002
        trained = {name: one.detach().contiguous() for name, one in _trained(self.model)}
        with atomic_write(Path(output_dir or self.args.output_dir) / WEIGHTS) as aside:
            safetensors.torch.save_file(trained, aside)

    def _load_from_checkpoint(self, checkpoint_path: str, model: Any = None) -> None:  # noqa: ARG002
        kept = safetensors.torch.load_file(Path(checkpoint_path) / WEIGHTS)
        for name, one in _trained(self.model):
            one.data.copy_(kept[name])

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def had_ended(self, checkpoint: str, steps: int, patience: int | None) -> bool:
        """Return whether a checkpoint is the end of its run: all steps are done, or its patience is spent."""
        state = _state(checkpoint)
        return state.global_step >= steps or (patience is not None and since_best(state) >= patience)

    def end_again(self, checkpoint: str, callback: TrainerCallback | None) -> None:
        """Do, for a callback, what the run of such a checkpoint does after its last step, without another one."""
        self.state = _state(checkpoint)
        given = {"model": self.model, "processing_class": self.processing_class}
        self._load_from_checkpoint(checkpoint)
        if callback is not None:
            callback.on_train_begin(self.args, self.state, self.control, **given)
        if self.state.best_model_checkpoint is not None:
            self._load_best_model()
        if callback is not None:
            callback.on_train_end(self.args, self.state, self.control, **given)


def _state(checkpoint: str) -> TrainerState:
    return TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))


def since_best(state: TrainerState) -> int:
    """Return how many evaluations of a run came after its best one."""
    best = state.best_global_step
    return sum(best is not None and "eval_loss" in entry and entry["step"] > best for entry in state.log_history)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, one) for name, one in model.named_parameters() if one.requires_grad]


def check_packages(*, lora: bool) -> None:
    """Raise with the line that installs what a run needs, where it is missing."""
    for argument, package in (("tune", "accelerate"), *([("lora", "peft")] if lora else [])):
        if importlib.util.find_spec(package) is None:
            raise MidlayerError(f"`{argument}` needs the {package} package: pip install 'midlayer-encoders[tuning]'.")


def add_lora(encoder: LayerEncoder, rank: int) -> None:
    """Put adapters of a rank into every linear layer of the model, and freeze all else."""
    encoder.requires_grad_(False)
    _inject(encoder, rank)


def check_lora(encoder: LayerEncoder) -> None:
    """Raise where PEFT has no adapters for a model: they are put in without memory of their own, and taken out."""
    _inject(encoder, 1, empty=True)  # on the device "meta": nothing is drawn
    _take_out(encoder)


def _inject(encoder: LayerEncoder, rank: int, *, empty: bool = False) -> None:
    import peft

    # The model itself stays in place, without PEFT's wrapper around it: callbacks and exports know it as it is.
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.05, target_modules="all-linear")
    try:
        peft.inject_adapter_in_model(config, encoder.transformer, low_cpu_mem_usage=empty)
    except ValueError as error:  # as of state-space models, whose layers it has no adapters for
        raise OptionError(f"`lora` must be False for {encoder.name}, which PEFT refuses: {error}") from error


def merge_lora(encoder: LayerEncoder) -> None:
    """Add what the adapters learned to the weights, and leave a model without them."""
    _take_out(encoder, merge=True)


def _take_out(encoder: LayerEncoder, *, merge: bool = False) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    model: Any = encoder.transformer
    for path, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            if merge:
                module.merge()
            above, _, name = path.rpartition(".")
            setattr(model.get_submodule(above), name, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    encoder.requires_grad_(True)


def without_autocast(model: nn.Module) -> None:
    """Take off the autocast that a trainer leaves around a model's forward pass: it would round every later vector."""
    for name in ("forward", "_original_forward"):
        model.__dict__.pop(name, None)
