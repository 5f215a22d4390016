"""What pages say of models that were cut, tuned, exported or measured, and the frames that say it."""

from tests.docs.frames import Curve, metric, onnx, table


def onnx_row(layer: int) -> list[float]:
    row = onnx()[f"layer {layer}"]
    names = ("torch_ms", "model_ms", "model_int8_ms", "openvino_ms", "openvino_default_ms", "model_mb", "model_int8_mb")
    return [*(row[name] for name in names), row["int8_cosine"]]


def wikitext(name: str) -> Curve:
    return metric(table("results/smollm2_wikitext.csv"), name)
