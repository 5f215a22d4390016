"""Run vLLM in a subprocess, and read a folder the way its loader does.

``python _vllm.py FOLDER DTYPE`` reads a JSON list of texts and writes a list of vectors. It imports nothing from this
package, so that an environment with only vLLM can run it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

VLLM_SOURCE = "vllm 0.32.0"

_SECONDS = 600


def read_as_vllm(folder: Path) -> dict[str, Any]:
    """Return the settings that vLLM reads from a sentence-transformers folder.

    This follows ``get_pooling_config``, ``get_sentence_transformer_tokenizer_config`` and ``try_get_dense_modules`` of
    releases 0.10.2 to 0.27, which read only the older module names; later releases read them as well.
    """

    def read(*parts: str) -> Any:
        return json.loads(folder.joinpath(*parts).read_text(encoding="utf8"))

    modules = [
        (module["type"].removeprefix("sentence_transformers.models."), module["path"])
        for module in read("modules.json")
    ]
    names = [name for name, _ in modules]
    pooling = None
    if "Pooling" in names:
        for key, value in read(modules[names.index("Pooling")][1], "config.json").items():
            mode = key.removeprefix("pooling_mode_").split("_", 1)[0].replace("lasttoken", "last")
            if value is True and mode in ("cls", "last", "mean"):
                pooling = mode
    return {
        "pooling": pooling,
        "normalize": "Normalize" in names,
        "dense": names.count("Dense"),
        "max_length": read("sentence_bert_config.json").get("max_seq_length"),
    }


def vllm_vectors(folder: Path, texts: list[str], dtype: str, python: str = sys.executable) -> list[list[float]]:
    """Return vLLM's vectors of texts, computed by the Python of an environment that has vLLM.

    Raises:
        RuntimeError: if vLLM does not load the folder; the message is the last line of its error output.
    """
    process = subprocess.run(
        [python, __file__, str(folder), dtype],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines or not lines[-1].startswith("[["):
        output = process.stderr.splitlines()
        errors = [line for line in output if "Error" in line] or output or ["no output"]
        raise RuntimeError(" ".join(errors[-1].split())[-300:])
    vectors: list[list[float]] = json.loads(lines[-1])
    return vectors


def _main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [entry for entry in sys.path if entry != here]  # modules here share names with packages
    from vllm import LLM  # type: ignore[import-not-found]

    folder, dtype = sys.argv[1:3]
    model = LLM(folder, runner="pooling", convert="embed", dtype=dtype, enforce_eager=True, disable_log_stats=True)
    texts = json.load(sys.stdin)
    outputs = model.embed(texts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
    sys.stdout.write("\n" + json.dumps([output.outputs.embedding for output in outputs]) + "\n")
    sys.stdout.flush()
    os._exit(0)  # its threads may not end on their own


if __name__ == "__main__":
    _main()
