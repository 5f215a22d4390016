"""Private APIs of trainers and of PEFT that tuning relies on; see ``tests/tuning/test_trainer_internals.py``."""

from pathlib import Path
from typing import Any

import safetensors.torch
from sentence_transformers import SentenceTransformerTrainer
from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import rotate_checkpoints

from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import atomic_write, dump_with_checksum, explain_full_disk, file_checksums, write_file

WEIGHTS = "trained.safetensors"
_NUM_CHECKPOINTS = 2  # on disk; the last one and the best one stay
#: File in a checkpoint with the checksums of the others; it is written last.
CHECKSUMS = "checksums.json"


class WeightsTrainer(SentenceTransformerTrainer):
    """A trainer whose checkpoints hold only the trainable weights.

    The original trainer saves the whole model and reloads it without adapters; if that fails for the best checkpoint,
    it logs the error and ends with other weights.
    """

    def add_model_card_callback(self, *_: Any) -> None:
        """Tag the model as trained; this package writes the card, so no examples from the data are collected."""
        self.model.model_card_data.add_tags("generated_from_trainer")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:  # noqa: ARG002
        weights = {name: parameter.detach().contiguous() for name, parameter in _trainable(self.model)}
        with atomic_write(Path(output_dir or self.args.output_dir) / WEIGHTS) as temporary:
            safetensors.torch.save_file(weights, temporary)

    def _save_checkpoint(self, *arguments: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        with explain_full_disk(folder):  # torch does not say that the disk is full
            super()._save_checkpoint(*arguments)
        write_file(folder / CHECKSUMS, dump_with_checksum(file_checksums(folder)))
        # Not before this checkpoint is complete: a run that is killed resumes from the earlier ones.
        rotate_checkpoints(self.args.output_dir, _NUM_CHECKPOINTS, self.state.best_model_checkpoint)

    def _load_from_checkpoint(self, checkpoint_path: str, model: Any = None) -> None:  # noqa: ARG002
        weights = safetensors.torch.load_file(Path(checkpoint_path) / WEIGHTS)
        for name, parameter in _trainable(self.model):
            parameter.data.copy_(weights[name])

    def _load_best_model(self) -> None:
        # The state has the path of an earlier run, whose folder may have been moved.
        self._load_from_checkpoint(str(Path(self.args.output_dir, Path(self.state.best_model_checkpoint).name)))

    def is_complete(self, checkpoint: str, steps: int, patience: int | None) -> bool:
        """Return True if a checkpoint is the end of its run: all steps are done, or its patience is exhausted."""
        state = _state(checkpoint)
        return state.global_step >= steps or (patience is not None and evaluations_since_best(state) >= patience)

    def restore_complete(self, checkpoint: str, callback: TrainerCallback | None) -> None:
        """Restore the end of a complete run without training another step, and notify the callback."""
        self.state = _state(checkpoint)
        keywords = {"model": self.model, "processing_class": self.processing_class}
        self._load_from_checkpoint(checkpoint)
        if callback is not None:
            callback.on_train_begin(self.args, self.state, self.control, **keywords)
        if self.state.best_model_checkpoint is not None:
            self._load_best_model()
        if callback is not None:
            callback.on_train_end(self.args, self.state, self.control, **keywords)


def best_checkpoint(checkpoint: Path) -> str | None:
    """Return the name of the best checkpoint so far, which the end of a run needs, or ``None``."""
    best = _state(str(checkpoint)).best_model_checkpoint
    return None if best is None else Path(best).name


def _state(checkpoint: str) -> TrainerState:
    return TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))


def evaluations_since_best(state: TrainerState) -> int:
    """Return the number of evaluations of a run after its best one."""
    best = state.best_global_step
    return sum(best is not None and "eval_loss" in entry and entry["step"] > best for entry in state.log_history)


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def check_lora(encoder: LayerEncoder) -> None:
    """Raise if PEFT has no adapters for a model: inject them on the meta device, and remove them."""
    add_lora(encoder, 1, empty=True)
    remove_lora(encoder, merge=False)


def add_lora(encoder: LayerEncoder, rank: int, *, empty: bool = False) -> None:
    """Inject adapters of a rank into every linear layer of the model, and freeze everything else."""
    import peft

    encoder.requires_grad_(False)
    # The model keeps its class, without PEFT's wrapper: callbacks and exports rely on its structure.
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.05, target_modules="all-linear")
    try:
        peft.inject_adapter_in_model(config, encoder.transformer, low_cpu_mem_usage=empty)
    except ValueError as error:  # for example state-space models
        raise OptionError(f"`lora` must be False for {encoder.name}, which PEFT refuses: {error}") from error


def remove_lora(encoder: LayerEncoder, *, merge: bool = True) -> None:
    """Merge the adapters into the weights and remove them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model: Any = encoder.transformer
    for path, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            if merge:
                module.merge()
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    encoder.requires_grad_(True)


def remove_autocast(model: nn.Module) -> None:
    """Remove the autocast that a trainer leaves around the forward pass, which would round every later vector."""
    for name in ("forward", "_original_forward"):
        model.__dict__.pop(name, None)
