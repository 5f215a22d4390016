"""Export an ONNX graph and compare it in onnxruntime."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.export._comparison import (
    CARD,
    Exported,
    cosine,
    full_disk_as_os_error,
    require_packages,
    sample_inputs,
    versions,
    write_card,
)
from midlayer_encoders.export._graph import (
    OUTPUT,
    engine_error,
    graph_inputs,
    verify_error,
    verify_traceable,
    write_graph,
    write_preprocessing,
)
from midlayer_encoders.files import write_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


logger = logging.getLogger(__name__)

# Graphs of an earlier export in the same folder are removed.
_GRAPHS = tuple(
    f"{stem}{kind}.onnx{weights}"
    for stem in ("model", "text", "image")
    for kind in ("_int8", "_optimized", "")
    for weights in (".data", "")
)
_MIN_INT8_COSINE = 0.99  # below this the 8-bit graph causes a warning


def export_onnx(encoder: LayerEncoder, folder: Path, *, int8: bool = False, optimize: bool = False) -> Exported:
    """Write ``model.onnx`` (``text.onnx`` and ``image.onnx`` of a joint model), its preprocessing files and a card.

    Args:
        encoder: an encoder in float32.
        folder: output folder.
        int8: also write ``model_int8.onnx``, quantized dynamically by onnxruntime.
        optimize: also write ``model_optimized.onnx``, after onnxruntime's optimizations.
    """
    require_packages("onnx", "onnx", "onnxscript", "onnxruntime")
    verify_traceable(encoder)
    graphs: dict[str, dict[str, Any]] = {}

    def write(staging: Path) -> None:
        staging.mkdir()
        write_preprocessing(encoder, staging)
        for medium in encoder.media:
            path = staging / (f"{medium}.onnx" if encoder.tower_layers else "model.onnx")
            names = write_graph(encoder, medium, path)
            description = {"medium": medium, "inputs": names, "output": OUTPUT}
            for graph_path in (path, *([_write_optimized(path)] if optimize else [])):
                error = engine_error(encoder, medium, staging, names, partial(_vectors, _session(graph_path)))
                verify_error(encoder, error, "onnxruntime")
                graphs[graph_path.name] = description | {"error": error}
            if int8:
                quantized, lowest = _write_quantized(encoder, medium, path, names)
                graphs[quantized.name] = description | {"cosine": lowest}
        packages = versions("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
        write_card(staging, encoder, "onnx", graphs=graphs, versions=packages)

    files = write_folder(folder, write, last=(*_GRAPHS, CARD))
    engine = f"onnxruntime {versions('onnxruntime')['onnxruntime']}"
    error = max(graph["error"] for graph in graphs.values() if "error" in graph)
    int8_cosine = min((graph["cosine"] for graph in graphs.values() if "cosine" in graph), default=None)
    return Exported("onnx", folder, engine, error, int8_cosine, files)


def _has_external_weights(path: Path) -> bool:
    return path.with_suffix(".onnx.data").exists()


def _session(path: Path, optimized_path: Path | None = None) -> Any:
    """Load a graph, and write onnxruntime's optimized version if a path is given."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if optimized_path is not None:
        # The highest level would arrange weights for this processor only.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(optimized_path)
        if _has_external_weights(path):
            name = "session.optimized_model_external_initializers_file_name"
            options.add_session_config_entry(name, f"{optimized_path.name}.data")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _vectors(session: Any, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    inputs = {node.name for node in session.get_inputs()}  # without an unused mask
    vectors: NDArray[Any] = session.run(None, {name: value for name, value in arrays.items() if name in inputs})[0]
    return vectors


def _write_optimized(path: Path) -> Path:
    """Write the graph with onnxruntime's fused operators and return its path."""
    optimized_path = path.with_stem(f"{path.stem}_optimized")
    with full_disk_as_os_error(path.parent):
        _session(path, optimized_path)
    return optimized_path


def _write_quantized(encoder: LayerEncoder, medium: str, path: Path, names: list[str]) -> tuple[Path, float]:
    """Write the graph with 8-bit weights and return its path and smallest cosine with the encoder."""
    from onnxruntime.quantization import quantize_dynamic

    written = path.with_stem(f"{path.stem}_int8")
    # With one scale per matrix instead of one per channel, MiniLM has a cosine of 0.914 instead of 0.983.
    with full_disk_as_os_error(path.parent):
        quantize_dynamic(
            str(path), str(written), per_channel=True, use_external_data_format=_has_external_weights(path)
        )
    inputs = sample_inputs(encoder, medium)
    expected = encoder.encode(inputs, show_progress_bar=False)
    lowest = cosine(expected, _vectors(_session(written), graph_inputs(encoder, medium, path.parent, names, inputs)))
    if lowest < _MIN_INT8_COSINE:
        logger.warning("%s has a cosine of %.3f with the encoder for a sample text.", written.name, lowest)
    return written, lowest
