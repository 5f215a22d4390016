"""llama.cpp in a process of its own, since it ends the process on files that it cannot read: texts in, vectors out.

``python -m midlayer_encoders.export._llama FILE`` reads a JSON list of texts and writes one of vectors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from midlayer_encoders.errors import CutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["llama_vectors"]

_SECONDS = 300


def llama_vectors(path: Path, texts: list[str]) -> NDArray[Any]:
    """Return the vectors that llama.cpp makes of texts by a GGUF file, with the pooling that the file names.

    Raises:
        CutError: llama.cpp does not read the file.
    """
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)  # noqa: PTH109
    made = subprocess.run(
        [sys.executable, "-m", __name__, str(path)], input=json.dumps(texts), capture_output=True, text=True,
        timeout=_SECONDS, env={**os.environ, "PYTHONPATH": places}, check=False,
    )  # fmt: skip
    lines = made.stdout.strip().splitlines()
    if made.returncode or not lines:
        told = " ".join(made.stderr.split())[-400:]
        raise CutError(f"llama.cpp does not read the file that was written ({told}). Nothing was written.")
    return np.array(json.loads(lines[-1]), dtype=np.float64)


def _main() -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.embedding = True
    params.n_parallel = 1
    params.n_ctx = params.n_batch = params.n_ubatch = 512  # the sample texts are short
    params.warmup = False
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    vectors = [server.handle_embeddings({"input": text})["data"][0]["embedding"] for text in json.load(sys.stdin)]
    sys.stdout.write("\n" + json.dumps(vectors) + "\n")
    sys.stdout.flush()
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    _main()
