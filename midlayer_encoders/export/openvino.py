"""Export an OpenVINO graph and compare it in OpenVINO."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.export._comparison import (
    CARD,
    Exported,
    full_disk_as_os_error,
    require_packages,
    versions,
    write_card,
)
from midlayer_encoders.export._graph import (
    OUTPUT,
    engine_error,
    verify_error,
    verify_traceable,
    write_graph,
    write_preprocessing,
)
from midlayer_encoders.files import write_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

# By default OpenVINO computes in float16 or bfloat16 if the processor supports it, with an error of 1e-2 for MiniLM.
# It ignores a precision stored in the file, so it must be passed to `compile_model`.
_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}


def export_openvino(encoder: LayerEncoder, folder: Path) -> Exported:
    """Write ``model.xml`` and ``model.bin`` (``text`` and ``image`` of a joint model), preprocessing, a card."""
    require_packages("openvino", "openvino", "onnx", "onnxscript")
    verify_traceable(encoder)
    graphs: dict[str, Any] = {}

    def write(staging: Path) -> None:
        staging.mkdir()
        write_preprocessing(encoder, staging)
        for medium in encoder.media:
            path = staging / (f"{medium}.xml" if encoder.tower_layers else "model.xml")
            names = _write(encoder, medium, path)
            error, default_error = (
                engine_error(encoder, medium, staging, names, partial(_vectors, _compile(path, options)))
                for options in (_FLOAT32, {})
            )
            verify_error(encoder, error, "OpenVINO")
            graphs[path.name] = {
                "medium": medium,
                "inputs": names,
                "output": OUTPUT,
                "error": error,
                # Infinite if states exceed 65504, the largest float16.
                "error_by_default": default_error if math.isfinite(default_error) else None,
            }
        packages = versions("torch", "transformers", "onnx", "onnxscript", "openvino")
        write_card(staging, encoder, "openvino", graphs=graphs, compile=_FLOAT32, versions=packages)

    files = write_folder(folder, write, last=(CARD,))
    engine = f"OpenVINO {versions('openvino')['openvino']}"
    return Exported("openvino", folder, engine, max(graph["error"] for graph in graphs.values()), files=files)


def _write(encoder: LayerEncoder, medium: str, path: Path) -> list[str]:
    """Write the graph of a medium by way of ONNX and return the names of its inputs."""
    import openvino

    onnx_path = path.with_suffix(".onnx")
    names = write_graph(encoder, medium, onnx_path)
    # `convert_model` would send telemetry; `save_model` would round weights to float16.
    with full_disk_as_os_error(path.parent):
        openvino.save_model(openvino.Core().read_model(onnx_path), path, compress_to_fp16=False)
    for file in path.parent.glob(f"{onnx_path.name}*"):
        file.unlink()
    return names


def _compile(path: Path, options: dict[str, str]) -> Any:
    import openvino

    return openvino.Core().compile_model(path, "CPU", options)


def _vectors(model: Any, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    inputs = {node.get_any_name() for node in model.inputs}  # without an unused mask
    vectors: NDArray[Any] = model({name: value for name, value in arrays.items() if name in inputs})[0]
    return vectors
