"""vLLM in a process of its own, texts in, vectors out, and what its loader reads in a folder where it is not installed.

``python _vllm.py FOLDER DTYPE`` reads a JSON list of texts and writes one of vectors. It imports nothing of this
package, so that an environment with vLLM alone can run it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["VLLM_SOURCE", "read_as_vllm", "vllm_vectors"]

VLLM_SOURCE = "vllm 0.32.0"

_SECONDS = 600
_POOLINGS = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}


def read_as_vllm(folder: Path) -> dict[str, Any]:
    """Return what vLLM takes from a folder of sentence-transformers.

    As its ``get_pooling_config``, ``get_sentence_transformer_tokenizer_config`` and ``try_get_dense_modules`` do in
    releases that know the older names alone (0.10.2 to 0.27), which later ones read as well.
    """
    modules = json.loads((folder / "modules.json").read_text(encoding="utf8"))
    by_name: dict[str, list[str]] = {}
    for module in modules:
        by_name.setdefault(module["type"], []).append(module["path"])
    found: dict[str, Any] = {"pooling": None}
    for path in by_name.get("sentence_transformers.models.Pooling", ())[:1]:
        for key, value in json.loads((folder / path / "config.json").read_text(encoding="utf8")).items():
            if value is True:
                name = key.replace("pooling_mode_", "").split("_", 1)[0].replace("lasttoken", "last").upper()
                found["pooling"] = _POOLINGS.get(name, found["pooling"])
    found["normalize"] = bool(by_name.get("sentence_transformers.models.Normalize"))
    found["dense"] = len(by_name.get("sentence_transformers.models.Dense", ()))
    settings = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf8"))
    found["max_length"] = settings.get("max_seq_length")
    return found


def vllm_vectors(folder: Path, texts: list[str], dtype: str, python: str = sys.executable) -> list[list[float]]:
    """Return the vectors that vLLM makes of texts, by the Python of an environment that has it.

    Raises:
        RuntimeError: vLLM does not serve the folder; the message ends with what it says.
    """
    made = subprocess.run(
        [python, __file__, str(folder), dtype], input=json.dumps(texts), capture_output=True, text=True,
        timeout=_SECONDS, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False,
    )  # fmt: skip
    lines = made.stdout.strip().splitlines()
    if made.returncode or not lines or not lines[-1].startswith("[["):
        told = [line for line in made.stderr.splitlines() if "Error" in line] or made.stderr.splitlines()
        raise RuntimeError(" ".join((told or ["nothing"])[-1].split())[-300:])
    vectors: list[list[float]] = json.loads(lines[-1])
    return vectors


def _main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the texts are few
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [place for place in sys.path if place != here]  # files beside this one have names of packages
    from vllm import LLM  # type: ignore[import-not-found]

    folder, dtype = sys.argv[1:3]
    model = LLM(folder, runner="pooling", convert="embed", dtype=dtype, enforce_eager=True, disable_log_stats=True)
    texts = json.load(sys.stdin)
    made = model.embed(texts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
    sys.stdout.write("\n" + json.dumps([one.outputs.embedding for one in made]) + "\n")
    sys.stdout.flush()
    os._exit(0)  # its threads may not end by themselves


if __name__ == "__main__":
    _main()
