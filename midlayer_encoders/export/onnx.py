"""An ONNX graph, and what onnxruntime makes of it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.export._comparison import (
    Exported,
    cosine,
    needed,
    sample_inputs,
    seeing_a_full_disk,
    versions,
    write_card,
)
from midlayer_encoders.export._graph import OUTPUT, check_near, distance, fed, prepare, refuse, write_graph
from midlayer_encoders.files import write_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["export_onnx"]

logger = logging.getLogger(__name__)

# What a folder may hold of another export: an 8-bit graph of another layer is not taken for one of this.
_GRAPHS = tuple(
    f"{stem}{kind}.onnx{weights}"
    for stem in ("model", "text", "image")
    for kind in ("_int8", "_optimized", "")
    for weights in (".data", "")
)
_LOW = 0.99  # a cosine of the 8-bit graph that is worth a warning


def export_onnx(encoder: LayerEncoder, home: Path, *, int8: bool = False, optimize: bool = False) -> Exported:
    """Write ``model.onnx`` (``text.onnx`` and ``image.onnx`` of a joint model), what prepares its inputs, and a card.

    Args:
        encoder: in float32.
        home: folder to write.
        int8: whether to write ``model_int8.onnx`` too, quantized dynamically by onnxruntime.
        optimize: whether to write ``model_optimized.onnx`` too, as onnxruntime makes it when it loads the other.
    """
    needed("onnx", "onnx", "onnxscript", "onnxruntime")
    refuse(encoder)
    graphs: dict[str, dict[str, Any]] = {}

    def write(aside: Path) -> None:
        aside.mkdir()
        prepare(encoder, aside)
        for medium in encoder.media:
            path = aside / (f"{medium}.onnx" if encoder.tower_layers else "model.onnx")
            names = write_graph(encoder, medium, path)
            about = {"medium": medium, "inputs": names, "output": OUTPUT}
            for one in (path, *([_optimized(path)] if optimize else [])):
                error = distance(encoder, medium, aside, names, partial(_vectors, _session(one)))
                check_near(encoder, error, "onnxruntime")
                graphs[one.name] = about | {"error": error}
            if int8:
                graphs[_beside(path, "int8").name] = about | {"cosine": _quantize(encoder, medium, path, names)}
        used = versions("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
        write_card(aside, encoder, "onnx", graphs=graphs, versions=used)

    files = write_folder(home, write, last=(*_GRAPHS, "midlayer.json"))
    engine = f"onnxruntime {versions('onnxruntime')['onnxruntime']}"
    worst = max(graph["error"] for graph in graphs.values() if "error" in graph)
    low = min((one["cosine"] for one in graphs.values() if "cosine" in one), default=None)
    return Exported("onnx", home, engine, worst, low, files)


def _beside(path: Path, what: str) -> Path:
    return path.with_stem(f"{path.stem}_{what}")


def _large(path: Path) -> bool:
    """Return whether the weights of a graph lie beside it."""
    return path.with_suffix(".onnx.data").exists()


def _session(path: Path, written: Path | None = None) -> Any:
    """Return a graph ready to run, and write what onnxruntime has made of it where a path is named."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if written is not None:
        # The highest level arranges weights for the processor at hand; a file is for others too.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(written)
        if _large(path):
            name = "session.optimized_model_external_initializers_file_name"
            options.add_session_config_entry(name, f"{written.name}.data")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _vectors(session: Any, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    known = {one.name for one in session.get_inputs()}  # a mask that nothing reads is not in the graph
    made: NDArray[Any] = session.run(None, {name: value for name, value in arrays.items() if name in known})[0]
    return made


def _optimized(path: Path) -> Path:
    """Write the graph with onnxruntime's own operators in place of several others, and return where."""
    written = _beside(path, "optimized")
    with seeing_a_full_disk(path.parent):
        _session(path, written)
    return written


def _quantize(encoder: LayerEncoder, medium: str, path: Path, names: list[str]) -> float:
    """Write the graph with weights of 8 bits, and return its smallest cosine with the encoder."""
    from onnxruntime.quantization import quantize_dynamic

    written = _beside(path, "int8")
    # A scale for each output: with one for a whole matrix MiniLM has a cosine of 0.914, not 0.983.
    with seeing_a_full_disk(path.parent):
        quantize_dynamic(str(path), str(written), per_channel=True, use_external_data_format=_large(path))
    inputs = sample_inputs(encoder, medium)
    ours = encoder.encode(inputs, show_progress_bar=False)
    low = cosine(ours, _vectors(_session(written), fed(encoder, medium, path.parent, names, inputs)))
    if low < _LOW:
        logger.warning("%s has a cosine of %.3f with the encoder for a sample text.", written.name, low)
    return low
