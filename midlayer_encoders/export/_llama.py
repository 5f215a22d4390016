"""Run llama.cpp in a subprocess, because it exits the process on files that it cannot read.

``python -P _llama.py FILE`` reads a JSON list of texts and writes a list of vectors. As a script it starts in one
second instead of ten, because it does not import the rest of the package.
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


_SECONDS = 300


def llama_vectors(path: Path, texts: list[str]) -> NDArray[Any]:
    """Return llama.cpp's vectors of texts, with the pooling that the GGUF file specifies.

    Raises:
        CutError: if llama.cpp cannot read the file.
    """
    import_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
    try:
        process = subprocess.run(
            [sys.executable, "-P", __file__, str(path)],
            input=json.dumps(texts),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={**os.environ, "PYTHONPATH": import_path},
            check=False,
        )
    except subprocess.TimeoutExpired as reason:
        raise CutError(
            f"llama.cpp did not embed {len(texts)} short texts within {_SECONDS} seconds, so the file was not "
            "compared. Nothing was written; try again when the machine is less busy."
        ) from reason
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        output = " ".join(process.stderr.split())[-400:]
        raise CutError(f"llama.cpp does not read the exported file ({output}). Nothing was written.")
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
    # The threads spin while they wait for each other, so one per core stalls on a busy machine.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, (os.cpu_count() or 1) // 2)
    server = xllamacpp.Server(params)
    responses = [server.handle_embeddings({"input": text}) for text in json.load(sys.stdin)]
    if errors := [response for response in responses if "data" not in response]:
        sys.stderr.write(f"\n{errors[0]}\n")
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.write("\n" + json.dumps([response["data"][0]["embedding"] for response in responses]) + "\n")
    sys.stdout.flush()
    os._exit(0)  # its threads do not end on their own


if __name__ == "__main__":
    _main()
