"""Export an ONNX graph from tokens or pixels to vectors, and compare it in onnxruntime."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from midlayer_encoders.encoder.first_module import UncutTransformer
from midlayer_encoders.encoder.inputs import to_device
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import CutError
from midlayer_encoders.extras.export import _comparison
from midlayer_encoders.files import write_folder
from midlayer_encoders.models.anatomy import suffers_from_padding
from midlayer_encoders.reading.locks import turn

logger = logging.getLogger(__name__)

_OUTPUT = "embeddings"
_MAX_ERROR = 1e-5  # relative, in float32
_MAX_BYTES = 1_800_000_000  # weights beyond this go into a second file: protobuf is limited to 2 GiB
_MIN_INT8_COSINE = 0.99  # below this the 8-bit graph causes a warning
# Graphs of an earlier export in the same folder are removed.
_ONNX_FILES = tuple(
    f"{stem}{kind}.onnx{weights}"
    for stem in ("model", "text", "image")
    for kind in ("_int8", "_optimized", "")  # 0.2 could write optimized ones
    for weights in (".data", "")
)
_PACKAGES = ("onnxruntime", "onnx", "onnxscript")


def export_onnx(encoder: LayerEncoder, folder: Path, *, int8: bool = False) -> _comparison.Exported:
    """Write ``model.onnx`` (``text.onnx`` and ``image.onnx`` of a joint model), its preprocessing files and a card.

    Args:
        encoder: an encoder in float32.
        folder: output folder.
        int8: also write ``model_int8.onnx``, quantized dynamically by onnxruntime.
    """
    if (obstacle := _obstacle(encoder)) is not None:
        raise CutError(f"The graph of {encoder.name} cannot be exported: {obstacle}.")
    graphs: dict[str, dict[str, Any]] = {}
    versions = _comparison.versions("torch", "transformers", *_PACKAGES)

    def write(staging: Path) -> None:
        staging.mkdir()
        _write_preprocessing(encoder, staging)
        for medium in encoder.media:
            path = staging / f"{medium if isinstance(encoder.layers, Mapping) else 'model'}.onnx"
            graphs.update(_write_graphs(encoder, medium, path, int8=int8))
        _comparison.write_card(staging, encoder, "onnx", graphs=graphs, versions=versions)

    files = write_folder(folder, write, last=(*_ONNX_FILES, _comparison.CARD))
    engine = f"onnxruntime {versions['onnxruntime']}"
    error = max(graph["error"] for graph in graphs.values() if "error" in graph)
    int8_cosine = min((graph["cosine"] for graph in graphs.values() if "cosine" in graph), default=None)
    return _comparison.Exported("onnx", folder, engine, error, int8_cosine, files)


def _write_graphs(encoder: LayerEncoder, medium: str, path: Path, *, int8: bool) -> dict[str, dict[str, Any]]:
    """Write the graph of a medium, and with ``int8`` an 8-bit one; return a description of each file."""
    names = _write_graph(encoder, medium, path)
    shared = {"medium": medium, "output": _OUTPUT, "inputs": names}
    error = _engine_error(encoder, medium, names, path)
    if not error <= _MAX_ERROR:
        raise CutError(
            f"The graph of {encoder.name} computes other vectors in onnxruntime than the encoder: relative error "
            f"{error:.1e}, more than {_MAX_ERROR:.0e}. Nothing was written; use target='sentence-transformers'."
        )
    graphs: dict[str, dict[str, Any]] = {path.name: {**shared, "error": error}}
    if int8:
        from onnxruntime.quantization import quantize_dynamic

        quantized_path = path.with_stem(f"{path.stem}_int8")
        large = path.with_suffix(".onnx.data").exists()
        # With one scale per matrix instead of one per channel, MiniLM has a cosine of 0.914 instead of 0.983.
        quantize_dynamic(str(path), str(quantized_path), per_channel=True, use_external_data_format=large)
        inputs = _comparison.sample_inputs(encoder, medium)
        vectors = _run(_session(quantized_path), _graph_inputs(encoder, medium, path.parent, names, inputs))
        lowest = _comparison.cosine(encoder.encode(inputs, show_progress_bar=False), vectors)
        if lowest < _MIN_INT8_COSINE:
            logger.warning("%s has a cosine of %.3f with the encoder for a sample.", quantized_path.name, lowest)
        graphs[quantized_path.name] = {**shared, "cosine": lowest}
    return graphs


def _obstacle(encoder: LayerEncoder) -> str | None:
    """Return why a graph cannot be written or would compute other vectors, or None."""
    first: Any = encoder[0]
    model = encoder.transformer
    if encoder.dtype != torch.float32:
        return f"it must be in float32, but is in {encoder.dtype}: pass dtype='float32'"
    if encoder.in_memory:
        return "a module in memory has no preprocessing files: save it with transformers, and load that folder"
    if "audio" in encoder.media:
        return "the length of the audio is handled outside the model: use target='sentence-transformers'"
    if isinstance(first, UncutTransformer):
        return _comparison.UNCUT
    if any(isinstance(entry["method_output_name"], list) for entry in first.modality_config.values()):
        return "torch's tracer ignores the hook that reads states before the final norm: pass norm='final'"
    if encoder.leaves_out_prompts and any(encoder.prompts.values()):
        return "a graph pools the tokens of a prompt: pass prompts={}, or pool them"
    if suffers_from_padding(model):
        return f"the states of {type(model).__name__} depend on the padding, so its vectors would depend on the batch"
    return None


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
def _write_graph(encoder: LayerEncoder, medium: str, path: Path) -> list[str]:
    """Write the graph of a medium and return the names of its inputs."""
    inputs = _comparison.sample_inputs(encoder, medium)[:2]
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
                output_names=[_OUTPUT],
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


def _write_preprocessing(encoder: LayerEncoder, folder: Path) -> None:
    """Write the processor or tokenizer; ``tokenizer.json`` pads and truncates like the encoder."""
    (encoder.processor or encoder.tokenizer).save_pretrained(str(folder))
    if "text" not in encoder.media:
        return
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CutError(f"{type(encoder.tokenizer).__name__} has no tokenizer.json: use a fast tokenizer.")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    if encoder.max_seq_length is not None:
        tokenizer.enable_truncation(encoder.max_seq_length)
    pad_token = encoder.tokenizer.pad_token
    tokenizer.enable_padding(direction="right", pad_id=encoder.tokenizer.pad_token_id, pad_token=pad_token)
    tokenizer.save(str(file))


def _graph_inputs(
    encoder: LayerEncoder, medium: str, folder: Path, names: list[str], inputs: list[Any]
) -> dict[str, NDArray[Any]]:
    """Return the input arrays of a graph; texts are tokenized by the exported ``tokenizer.json``."""
    if medium == "text":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        encodings = tokenizer.encode_batch([encoder.default_prompt + text for text in inputs])
        rows = {"input_ids": [encoding.ids for encoding in encodings]}
        rows["attention_mask"] = [encoding.attention_mask for encoding in encodings]
        return {name: np.array(rows[name], dtype=np.int64) for name in names}
    features = encoder.preprocess(inputs)
    return {name: features[name].cpu().numpy() for name in names}


def _engine_error(encoder: LayerEncoder, medium: str, names: list[str], path: Path) -> float:
    """Return the largest relative error of vectors of onnxruntime for sample inputs, in a batch and alone."""
    session = _session(path)
    inputs = _comparison.sample_inputs(encoder, medium)
    expected = encoder.encode(inputs, show_progress_bar=False)
    errors = []
    for size in (len(inputs), 1):
        vectors = _run(session, _graph_inputs(encoder, medium, path.parent, names, inputs[:size]))
        errors.append(_comparison.relative_error(expected[:size], vectors))
    return max(errors)


def _run(session: Any, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    names = [node.name for node in session.get_inputs()]  # without an unused mask
    vectors: NDArray[Any] = session.run(None, {name: arrays[name] for name in names})[0]
    return vectors


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
