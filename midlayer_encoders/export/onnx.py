"""An ONNX graph from tokens, or pixels, to vectors: norm, pooling and what follows it are inside."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from midlayer_encoders.encoder.inputs import moved
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.export._comparison import (
    Exported,
    cosine,
    needed,
    relative_error,
    sample_inputs,
    versions,
    write_card,
)
from midlayer_encoders.files import write_folder
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.reading.turns import turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["export_onnx"]

logger = logging.getLogger(__name__)

_MOST = 1e-5  # relative error in float32
_LARGEST = 1_800_000_000  # bytes of weights in one file: protobuf ends at 2 GiB, and the rest lies beside it then
_LOW = 0.99  # a cosine of the 8-bit graph that is worth a warning
_OUTPUT = "embeddings"


def export_onnx(encoder: LayerEncoder, home: Path, *, int8: bool = False) -> Exported:
    """Write ``model.onnx`` (``text.onnx`` and ``image.onnx`` of a joint model), what prepares its inputs, and a card.

    Args:
        encoder: in float32.
        home: folder to write.
        int8: whether to write ``model_int8.onnx`` too, quantized dynamically by onnxruntime.
    """
    needed("onnx", "onnx", "onnxscript", "onnxruntime")
    _refuse(encoder)
    found: list[tuple[float, float | None]] = []

    def write(aside: Path) -> None:
        aside.mkdir()
        (encoder.processor or encoder.tokenizer).save_pretrained(str(aside))
        graphs: dict[str, Any] = {}
        for medium in encoder.media:
            if medium == "text":
                _finish_tokenizer(encoder, aside)
            path = aside / (f"{medium}.onnx" if encoder.layers else "model.onnx")
            names = _write_graph(encoder, medium, path)
            error = _compare(encoder, medium, path, names)
            quantized = _quantize(encoder, medium, path, names) if int8 else None
            found.append((error, quantized))
            graphs[path.name] = {"medium": medium, "inputs": names, "output": _OUTPUT, "error": error}
            if quantized is not None:
                graphs[_int8(path).name] = graphs[path.name] | {"error": None, "cosine": quantized}
        used = versions("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
        write_card(aside, encoder, "onnx", graphs=graphs, versions=used)

    write_folder(home, write, last=("midlayer.json",))
    cosines = [low for _, low in found if low is not None]
    engine = f"onnxruntime {versions('onnxruntime')['onnxruntime']}"
    return Exported("onnx", home, engine, max(error for error, _ in found), min(cosines) if cosines else None)


def _refuse(encoder: LayerEncoder) -> None:
    """Raise where a graph would give other vectors."""
    name = type(encoder.transformer).__name__
    if encoder.dtype != torch.float32:
        raise OptionError(f"`encoder` must be in float32 for ONNX, but is in {encoder.dtype}: pass dtype='float32'.")
    if isinstance(encoder[0], MemoryModule):
        raise CutError(
            "A module in memory has no files of a tokenizer or processor to put beside its graph. Save it with "
            "transformers, and make the encoder of that folder."
        )
    if "audio" in encoder.media:
        raise CutError(
            f"The length of audio decides which states of {name} are pooled, and that is counted outside of the model: "
            "it is not exported to ONNX. Use this encoder itself, or target='sentence-transformers'."
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
def _write_graph(encoder: LayerEncoder, medium: str, path: Path) -> list[str]:
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
            torch.onnx.export(
                _Graph(encoder, names, rest).eval(),
                tuple(features[name] for name in names),
                str(path),
                input_names=names,
                output_names=[_OUTPUT],
                dynamic_shapes=(shapes,),
                dynamo=True,
                external_data=weights > _LARGEST,
                verbose=False,
            )
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


def _finish_tokenizer(encoder: LayerEncoder, folder: Path) -> None:
    """Have ``tokenizer.json`` pad and truncate by itself, as the encoder does."""
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


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _vectors(encoder: LayerEncoder, medium: str, path: Path, names: list[str], inputs: list[Any]) -> NDArray[Any]:
    """Return what onnxruntime makes of inputs, texts read by the file that lies beside the graph."""
    if medium == "text":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path.parent / "tokenizer.json"))
        read = tokenizer.encode_batch([encoder.default_prompt + text for text in inputs])
        every = {"input_ids": [one.ids for one in read], "attention_mask": [one.attention_mask for one in read]}
        fed = {name: np.array(every[name], dtype=np.int64) for name in names}
    else:
        features = encoder.preprocess(inputs)
        fed = {name: features[name].cpu().numpy() for name in names}
    session = _session(path)
    known = {one.name for one in session.get_inputs()}  # a mask that nothing reads is not in the graph
    made: NDArray[Any] = session.run(None, {name: value for name, value in fed.items() if name in known})[0]
    return made


def _compare(encoder: LayerEncoder, medium: str, path: Path, names: list[str]) -> float:
    """Return how far onnxruntime's vectors are from the encoder's, in a batch and alone; raise where too far."""
    inputs = sample_inputs(encoder, medium)
    ours = encoder.encode(inputs, show_progress_bar=False)
    together = relative_error(ours, _vectors(encoder, medium, path, names, inputs))
    alone = relative_error(ours[:1], _vectors(encoder, medium, path, names, inputs[:1]))
    error = max(together, alone)
    if not error <= _MOST:
        raise CutError(
            f"The ONNX graph of {encoder.name} gives other vectors in onnxruntime than the encoder: relative error "
            f"{error:.1e}, more than {_MOST:.0e}. Nothing was written; use target='sentence-transformers'."
        )
    return error


def _int8(path: Path) -> Path:
    return path.with_stem(f"{path.stem}_int8")


def _quantize(encoder: LayerEncoder, medium: str, path: Path, names: list[str]) -> float:
    """Write the graph with weights of 8 bits, and return its smallest cosine with the encoder."""
    from onnxruntime.quantization import quantize_dynamic

    # A scale for each output: with one for a whole matrix MiniLM has a cosine of 0.914, not 0.983.
    quantize_dynamic(
        str(path), str(_int8(path)), per_channel=True, use_external_data_format=path.with_suffix(".onnx.data").exists()
    )
    inputs = sample_inputs(encoder, medium)
    ours = encoder.encode(inputs, show_progress_bar=False)
    low = cosine(ours, _vectors(encoder, medium, _int8(path), names, inputs))
    if low < _LOW:
        logger.warning("%s has a cosine of %.3f with the encoder for a sample text.", _int8(path).name, low)
    return low
