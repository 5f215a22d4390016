"""A graph from tokens, or pixels, to vectors, as ONNX: norm, pooling and what follows it are inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from midlayer_encoders.encoder.inputs import moved
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.export._comparison import relative_error, sample_inputs
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.reading.turns import turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["OUTPUT", "Run", "check_near", "distance", "fed", "prepare", "refuse", "write_graph"]

OUTPUT = "embeddings"
_MOST = 1e-5  # relative error in float32
_LARGEST = 1_800_000_000  # bytes of weights in one file: protobuf ends at 2 GiB, and the rest lies beside it then

Run: TypeAlias = "Callable[[dict[str, NDArray[Any]]], NDArray[Any]]"
"""What an engine makes of the arrays that a graph reads."""


def refuse(encoder: LayerEncoder) -> None:
    """Raise where a graph would give other vectors."""
    name = type(encoder.transformer).__name__
    if encoder.dtype != torch.float32:
        raise OptionError(f"`encoder` must be in float32, but is in {encoder.dtype}: pass dtype='float32'.")
    if isinstance(encoder[0], MemoryModule):
        raise CutError(
            "A module in memory has no files of a tokenizer or processor to put beside its graph. Save it with "
            "transformers, and make the encoder of that folder."
        )
    if "audio" in encoder.media:
        raise CutError(
            f"The length of audio decides which states of {name} are pooled, and that is counted outside of the model: "
            "it is not written as a graph. Use this encoder itself, or target='sentence-transformers'."
        )
    first: Any = encoder[0]
    read = [entry["method_output_name"] for entry in first.modality_config.values()]
    if encoder.mixture or any(isinstance(one, list) for one in read):
        what = "several layers" if encoder.mixture else "norm='none'"
        cure = "Name one layer." if encoder.mixture else "Pass norm='final'."
        raise CutError(
            f"The states of {what} are read by hooks on the blocks of {name}, which torch's tracer does not see: its "
            f"graph would be of other states. {cure}"
        )
    if suffers_from_padding(encoder.transformer) or wants_padding(encoder.transformer):
        raise CutError(
            f"The states of {name} depend on how texts are padded, which a graph does not see to: its vectors would "
            "depend on the batch. Use this encoder itself."
        )


class _Graph(nn.Module):
    """The whole encoder as a function of tensors."""

    def __init__(self, encoder: LayerEncoder, names: list[str], rest: dict[str, Any]):
        super().__init__()
        self.encoder, self.names, self.rest = encoder, names, rest

    def forward(self, *tensors: Tensor) -> Tensor:
        features = {**self.rest, **dict(zip(self.names, tensors, strict=True))}
        made: Tensor = self.encoder.forward(features)["sentence_embedding"]
        return made[:, : self.encoder.truncate_dim]


@torch.no_grad()
def write_graph(encoder: LayerEncoder, medium: str, path: Path) -> list[str]:
    """Write the graph of a medium, and return the names of its inputs."""
    inputs = sample_inputs(encoder, medium)[:2]
    features = moved(encoder.preprocess(inputs), encoder.device)
    features.pop("token_type_ids", None)  # zeros for texts that are no pairs, as the model itself has them
    names = [name for name, value in features.items() if isinstance(value, Tensor)]
    tokens = [name for name in names if features[name].ndim == 2]
    shapes = tuple({0: "batch", 1: "length"} if name in tokens else {0: "batch"} for name in names)
    rest = {name: value for name, value in features.items() if name not in names}
    weights = sum(weight.numel() * weight.element_size() for weight in encoder.parameters())
    training = encoder.training
    try:
        with turn(encoder.transformer), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own tracer, about its own parts
            made: Any = torch.onnx.export(
                _Graph(encoder, names, rest).eval(),
                tuple(features[name] for name in names),
                input_names=names,
                output_names=[OUTPUT],
                dynamic_shapes=(shapes,),
                dynamo=True,
                verbose=False,
            )
            for node in made.model.graph.all_nodes():
                node.metadata_props.clear()  # where in which file of this machine the tracer met it
            made.save(str(path), external_data=weights > _LARGEST)
    except OSError:
        raise
    except Exception as reason:  # whatever the tracer or a translator meets
        told = " ".join(str(reason.__cause__ or reason).split())[:300]
        raise CutError(
            f"torch cannot write {type(encoder.transformer).__name__} as an ONNX graph ({type(reason).__name__}: "
            f"{told}). Use target='sentence-transformers', or another release of torch."
        ) from reason
    finally:
        encoder.train(training)
    return names


def prepare(encoder: LayerEncoder, folder: Path) -> None:
    """Write what prepares inputs; ``tokenizer.json`` pads and truncates by itself, as the encoder does."""
    (encoder.processor or encoder.tokenizer).save_pretrained(str(folder))
    if "text" not in encoder.media:
        return
    from tokenizers import Tokenizer

    file, own = folder / "tokenizer.json", encoder.tokenizer
    if not file.is_file():
        raise CutError(
            f"{type(own).__name__} writes no tokenizer.json, which reads texts without torch. Use a fast tokenizer, or "
            "target='sentence-transformers'."
        )
    made = Tokenizer.from_file(str(file))
    if encoder.max_seq_length is not None:
        made.enable_truncation(encoder.max_seq_length)
    else:
        made.no_truncation()
    made.enable_padding(direction="right", pad_id=own.pad_token_id, pad_token=own.pad_token)
    made.save(str(file))


def fed(
    encoder: LayerEncoder, medium: str, folder: Path, names: list[str], inputs: list[Any]
) -> dict[str, NDArray[Any]]:
    """Return the arrays that a graph reads, texts read by the ``tokenizer.json`` that lies beside it."""
    if medium == "text":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        read = tokenizer.encode_batch([encoder.default_prompt + text for text in inputs])
        every = {"input_ids": [one.ids for one in read], "attention_mask": [one.attention_mask for one in read]}
        return {name: np.array(every[name], dtype=np.int64) for name in names}
    features = encoder.preprocess(inputs)
    return {name: features[name].cpu().numpy() for name in names}


def distance(encoder: LayerEncoder, medium: str, folder: Path, names: list[str], run: Run) -> float:
    """Return how far an engine's vectors are from the encoder's, in a batch and alone."""
    inputs = sample_inputs(encoder, medium)
    ours = encoder.encode(inputs, show_progress_bar=False)
    together = relative_error(ours, run(fed(encoder, medium, folder, names, inputs)))
    return max(together, relative_error(ours[:1], run(fed(encoder, medium, folder, names, inputs[:1]))))


def check_near(encoder: LayerEncoder, error: float, engine: str) -> None:
    """Raise where an engine's vectors are others."""
    if not error <= _MOST:
        raise CutError(
            f"The graph of {encoder.name} gives other vectors in {engine} than the encoder: relative error "
            f"{error:.1e}, more than {_MOST:.0e}. Nothing was written; use target='sentence-transformers'."
        )
