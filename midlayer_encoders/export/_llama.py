"""llama.cpp in a process of its own, since it ends the process on files that it cannot read: texts in, vectors out.

``python -P _llama.py FILE`` reads a JSON list of texts and writes one of vectors. Run as a file, not as a module,
it starts in a second, not in ten: the rest of the package is not imported.
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
    try:
        made = subprocess.run(
            [sys.executable, "-P", __file__, str(path)], input=json.dumps(texts), capture_output=True, text=True,
            timeout=_SECONDS, env={**os.environ, "PYTHONPATH": places}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as reason:
        raise CutError(
            f"llama.cpp did not embed {len(texts)} short texts within {_SECONDS} seconds: the file was not compared. "
            "Nothing was written; try again when the machine is less busy."
        ) from reason
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
    # Its threads wait for one another in loops: one for each core stands still where other programs run.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, (os.cpu_count() or 1) // 2)
    server = xllamacpp.Server(params)
    answers = [server.handle_embeddings({"input": text}) for text in json.load(sys.stdin)]
    if wrong := [answer for answer in answers if "data" not in answer]:
        sys.stderr.write(f"\n{wrong[0]}\n")
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.write("\n" + json.dumps([answer["data"][0]["embedding"] for answer in answers]) + "\n")
    sys.stdout.flush()
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    _main()
