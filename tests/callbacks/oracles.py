"""The weights of a run at each step and their metrics by `measure`: reference values for the callbacks."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import polars
import torch
from torch import Tensor
from transformers import TrainerCallback

from midlayer_encoders import LayerEncoder, measure
from tests.callbacks.training import TOKENIZER, neox

TEXTS = [
    "a", "to be", "the cat sat on the mat", "a cat is sitting on a mat", "stock markets fell sharply today",
    "shares dropped on Wall Street as the day went on", "how do I reset my card pin?", "short one",
    "a card pin can be reset at any machine", "the mat was on the cat", "markets rose again", "it rains",
]  # fmt: skip
VIEWS = [[f"{word} {text[::-1]}" for text in TEXTS] for word in ("one", "two", "three")]


class Weights(pl.Callback):
    """Records the model's weights after each optimizer step of a Lightning run."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Tensor]] = {}

    def _keep(self, trainer: Any, module: Any) -> None:
        self.steps[trainer.global_step] = {k: v.clone() for k, v in module.backbone.state_dict().items()}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._keep(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._keep(trainer, pl_module)


class TrainerWeights(TrainerCallback):
    """Records the model's weights after each optimizer step of a Hugging Face run."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps[state.global_step] = {k: v.clone() for k, v in kwargs["model"].state_dict().items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_train_begin(args, state, control, **kwargs)


def make_encoder(weights: dict[str, Tensor], folder: Path) -> LayerEncoder:
    """Return an encoder of the full tiny model with these weights."""
    model = neox()
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return LayerEncoder(str(folder), -1, device="cpu")


def measure_steps(encoders: dict[int, LayerEncoder], max_length: int = 64, **options: Any) -> polars.DataFrame:
    """Return the metrics of `measure` for the weights of each step, in the order and columns of a callback's frame."""
    frames = []
    encoder_options = {"norm": options.pop("norm", "none"), "pooling": options.pop("pooling", "mean")}
    for step, encoder in encoders.items():
        step_encoder = LayerEncoder(encoder.source, -1, device="cpu", max_length=max_length, **encoder_options)
        frames.append(measure(step_encoder, TEXTS, **options).with_columns(revision=polars.lit(f"step{step}")))
    return polars.concat(frames).select("revision", "name", "layer", "depth", "value")


def assert_frames_match(actual: polars.DataFrame, expected: polars.DataFrame, rtol: float = 1e-4) -> None:
    """Compare row by row: the same steps, metrics, layers and order, and equal values."""
    keys = ["revision", "name", "layer", "depth"]
    assert actual.select(keys).rows() == expected.select(keys).rows()
    torch.testing.assert_close(torch.tensor(actual["value"]), torch.tensor(expected["value"]), rtol=rtol, atol=1e-5)
