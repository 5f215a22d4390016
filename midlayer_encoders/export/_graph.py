"""Trace an encoder as an ONNX graph from tokens or pixels to vectors, including pooling and later modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from midlayer_encoders.encoder.inputs import to_device
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.export._comparison import relative_error, sample_inputs
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.reading.locks import turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


OUTPUT = "embeddings"
_MAX_ERROR = 1e-5  # relative, in float32
_MAX_BYTES = 1_800_000_000  # weights beyond this go into a second file: protobuf is limited to 2 GiB

Engine: TypeAlias = "Callable[[dict[str, NDArray[Any]]], NDArray[Any]]"
"""Computes vectors from the input arrays of a graph."""


def verify_traceable(encoder: LayerEncoder) -> None:
    """Raise an error if a graph would compute other vectors."""
    name = type(encoder.transformer).__name__
    if encoder.dtype != torch.float32:
        raise OptionError(f"`encoder` must be in float32, but is in {encoder.dtype}: pass dtype='float32'.")
    if isinstance(encoder[0], MemoryModule):
        raise CutError(
            "A module in memory has no tokenizer or processor files to write next to its graph. Save it with "
            "transformers, and create the encoder from that folder."
        )
    if "audio" in encoder.media:
        raise CutError(
            f"The states of {name} to pool depend on the length of the audio, which is computed outside the model, so "
            "no graph can be exported. Use this encoder itself, or target='sentence-transformers'."
        )
    first: Any = encoder[0]
    outputs = [entry["method_output_name"] for entry in first.modality_config.values()]
    if encoder.mixture or any(isinstance(output, list) for output in outputs):
        feature = "several layers" if encoder.mixture else "norm='none'"
        cure = "Pass one layer." if encoder.mixture else "Pass norm='final'."
        raise CutError(
            f"An encoder with {feature} reads states through hooks on the blocks of {name}, which torch's tracer "
            f"ignores: its graph would compute other vectors. {cure}"
        )
    if suffers_from_padding(encoder.transformer) or wants_padding(encoder.transformer):
        raise CutError(
            f"The states of {name} depend on the padding, so the vectors of a graph would depend on the batch. Use "
            "this encoder itself."
        )


class _Graph(nn.Module):
    """The encoder as a function of tensors."""

    def __init__(self, encoder: LayerEncoder, names: list[str], constants: dict[str, Any]):
        super().__init__()
        self.encoder = encoder
        self.names = names
        self.constants = constants

    def forward(self, *tensors: Tensor) -> Tensor:
        features = {**self.constants, **dict(zip(self.names, tensors, strict=True))}
        embeddings: Tensor = self.encoder.forward(features)["sentence_embedding"]
        return embeddings[:, : self.encoder.truncate_dim]


@torch.no_grad()
def write_graph(encoder: LayerEncoder, medium: str, path: Path) -> list[str]:
    """Write the graph of a medium and return the names of its inputs."""
    inputs = sample_inputs(encoder, medium)[:2]
    features = to_device(encoder.preprocess(inputs), encoder.device)
    features.pop("token_type_ids", None)  # all zeros for single texts, the model's own default
    names = [name for name, value in features.items() if isinstance(value, Tensor)]
    shapes = tuple({0: "batch", 1: "length"} if features[name].ndim == 2 else {0: "batch"} for name in names)
    constants = {name: value for name, value in features.items() if name not in names}
    weights = sum(weight.numel() * weight.element_size() for weight in encoder.parameters())
    training = encoder.training
    try:
        with turn(encoder.transformer), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from torch's tracer, about its internals
            program: Any = torch.onnx.export(
                _Graph(encoder, names, constants).eval(),
                tuple(features[name] for name in names),
                input_names=names,
                output_names=[OUTPUT],
                dynamic_shapes=(shapes,),
                dynamo=True,
                verbose=False,
            )
            for node in program.model.graph.all_nodes():
                node.metadata_props.clear()  # file paths on this machine
            program.save(str(path), external_data=weights > _MAX_BYTES)
    except OSError:
        raise
    except Exception as reason:  # the tracer raises many types
        details = " ".join(str(reason.__cause__ or reason).split())[:300]
        raise CutError(
            f"torch cannot write {type(encoder.transformer).__name__} as an ONNX graph ({type(reason).__name__}: "
            f"{details}). Use target='sentence-transformers', or another release of torch."
        ) from reason
    finally:
        encoder.train(training)
    return names


def write_preprocessing(encoder: LayerEncoder, folder: Path) -> None:
    """Write the processor or tokenizer; ``tokenizer.json`` pads and truncates like the encoder."""
    (encoder.processor or encoder.tokenizer).save_pretrained(str(folder))
    if "text" not in encoder.media:
        return
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CutError(
            f"{type(encoder.tokenizer).__name__} has no tokenizer.json. Use a fast tokenizer, or "
            "target='sentence-transformers'."
        )
    tokenizer = Tokenizer.from_file(str(file))
    if encoder.max_seq_length is not None:
        tokenizer.enable_truncation(encoder.max_seq_length)
    else:
        tokenizer.no_truncation()
    pad_token = encoder.tokenizer.pad_token
    tokenizer.enable_padding(direction="right", pad_id=encoder.tokenizer.pad_token_id, pad_token=pad_token)
    tokenizer.save(str(file))


def graph_inputs(
    encoder: LayerEncoder, medium: str, folder: Path, names: list[str], inputs: list[Any]
) -> dict[str, NDArray[Any]]:
    """Return the input arrays of a graph; texts are tokenized by the exported ``tokenizer.json``."""
    if medium == "text":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        encodings = tokenizer.encode_batch([encoder.default_prompt + text for text in inputs])
        attributes = {"input_ids": "ids", "attention_mask": "attention_mask"}
        return {
            name: np.array([getattr(encoding, attributes[name]) for encoding in encodings], dtype=np.int64)
            for name in names
        }
    features = encoder.preprocess(inputs)
    return {name: features[name].cpu().numpy() for name in names}


def engine_error(encoder: LayerEncoder, medium: str, folder: Path, names: list[str], engine: Engine) -> float:
    """Return the relative error of an engine's vectors, over a batch and a single input."""
    inputs = sample_inputs(encoder, medium)
    expected = encoder.encode(inputs, show_progress_bar=False)
    errors = []
    for size in (len(inputs), 1):
        vectors = engine(graph_inputs(encoder, medium, folder, names, inputs[:size]))
        errors.append(relative_error(expected[:size], vectors))
    return max(errors)


def verify_error(encoder: LayerEncoder, error: float, engine: str) -> None:
    """Raise an error if an engine computes other vectors."""
    if not error <= _MAX_ERROR:
        raise CutError(
            f"The graph of {encoder.name} computes other vectors in {engine} than the encoder: relative error "
            f"{error:.1e}, more than {_MAX_ERROR:.0e}. Nothing was written; use target='sentence-transformers'."
        )
