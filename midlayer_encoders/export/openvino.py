"""The graph as OpenVINO reads it."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.export._comparison import Exported, needed, seeing_a_full_disk, versions, write_card
from midlayer_encoders.export._graph import OUTPUT, check_near, distance, prepare, refuse, write_graph
from midlayer_encoders.files import write_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["export_openvino"]

# OpenVINO computes in float16 or bfloat16 where the processor can, whatever the graph is in: MiniLM's vectors are off
# by 1e-2 then. What a file says of it is not read, so whoever compiles the model says it.
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}


def export_openvino(encoder: LayerEncoder, home: Path) -> Exported:
    """Write ``model.xml`` and ``model.bin`` (``text`` and ``image`` of a joint model), what prepares inputs, a card."""
    needed("openvino", "openvino", "onnx", "onnxscript")
    refuse(encoder)
    graphs: dict[str, Any] = {}

    def write(aside: Path) -> None:
        aside.mkdir()
        prepare(encoder, aside)
        for medium in encoder.media:
            path = aside / (f"{medium}.xml" if encoder.tower_layers else "model.xml")
            names = _write(encoder, medium, path)
            error, rounded = (
                distance(encoder, medium, aside, names, partial(_vectors, _compiled(path, options)))
                for options in (EXACT, {})
            )
            check_near(encoder, error, "OpenVINO")
            graphs[path.name] = {"medium": medium, "inputs": names, "output": OUTPUT}
            # Half precision ends at 65504: a model with larger states has no finite vectors by default.
            graphs[path.name] |= {"error": error, "error_by_default": rounded if math.isfinite(rounded) else None}
        used = versions("torch", "transformers", "onnx", "onnxscript", "openvino")
        write_card(aside, encoder, "openvino", graphs=graphs, compile=EXACT, versions=used)

    files = write_folder(home, write, last=("midlayer.json",))
    engine = f"OpenVINO {versions('openvino')['openvino']}"
    return Exported("openvino", home, engine, max(graph["error"] for graph in graphs.values()), files=files)


def _write(encoder: LayerEncoder, medium: str, path: Path) -> list[str]:
    """Write the graph of a medium by way of ONNX, and return the names of its inputs."""
    import openvino

    between = path.with_suffix(".onnx")
    names = write_graph(encoder, medium, between)
    # `read_model`, as `convert_model` reports its use to OpenVINO's makers; `save_model` rounds weights by default.
    with seeing_a_full_disk(path.parent):
        openvino.save_model(openvino.Core().read_model(between), path, compress_to_fp16=False)
    for left in path.parent.glob(f"{between.name}*"):
        left.unlink()
    return names


def _compiled(path: Path, options: dict[str, str]) -> Any:
    import openvino

    return openvino.Core().compile_model(path, "CPU", options)


def _vectors(model: Any, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    known = {one.get_any_name() for one in model.inputs}  # a mask that nothing reads is not in the graph
    made: NDArray[Any] = model({name: value for name, value in arrays.items() if name in known})[0]
    return made
