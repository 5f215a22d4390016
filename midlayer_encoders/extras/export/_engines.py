"""Run llama.cpp or vLLM in a subprocess, because they exit the process on files that they cannot read.

``python -P _engines.py llama FILE`` or ``vllm FOLDER DTYPE`` reads a JSON list of texts and writes a list of vectors.
The script imports nothing from this package, so that it starts at once, and in an environment that has only the engine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

_SECONDS = 600


def engine_vectors(
    engine: str, path: Path, texts: list[str], *arguments: str, python: str = sys.executable
) -> list[list[float]]:
    """Return an engine's vectors of texts.

    Args:
        engine: ``"llama"`` or ``"vllm"``.
        path: a GGUF file, or a folder.
        texts: the texts.
        arguments: the dtype, for vLLM.
        python: the Python of an environment that has the engine.

    Raises:
        RuntimeError: if the engine cannot read the file or does not finish; the message ends its error output.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
    try:
        process = subprocess.run(
            [python, "-P", __file__, engine, str(path), *arguments],
            input=json.dumps(texts),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as reason:
        message = f"it did not embed {len(texts)} short texts within {_SECONDS} seconds; is the machine busy?"
        raise RuntimeError(message) from reason
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines or not lines[-1].startswith("[["):
        output = process.stderr.strip().splitlines()
        errors = [line for line in output if "error" in line.lower()] or output or ["no output"]
        raise RuntimeError(" ".join(errors[-1].split())[-400:])
    vectors: list[list[float]] = json.loads(lines[-1])
    return vectors


def _run_llama(path: str, texts: list[str]) -> list[list[float]]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.embedding = True
    params.n_parallel = 1
    params.n_ctx = params.n_batch = params.n_ubatch = 512  # the sample texts are short
    params.warmup = False
    params.n_gpu_layers = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it computes in float16
    # The threads spin while they wait for each other, so one per core stalls on a busy machine.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, (os.cpu_count() or 1) // 2)
    server = xllamacpp.Server(params)
    responses = [server.handle_embeddings({"input": text}) for text in texts]
    if errors := [response for response in responses if "data" not in response]:
        raise RuntimeError(str(errors[0]))
    return [response["data"][0]["embedding"] for response in responses]


def _run_vllm(folder: str, texts: list[str], dtype: str) -> list[list[float]]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM

    model = LLM(folder, runner="pooling", convert="embed", dtype=dtype, enforce_eager=True, disable_log_stats=True)
    outputs = model.embed(texts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
    return [output.outputs.embedding for output in outputs]


def _main() -> None:
    engine, path, *arguments = sys.argv[1:]
    code = 0
    try:
        run = _run_llama if engine == "llama" else _run_vllm
        sys.stdout.write("\n" + json.dumps(run(path, json.load(sys.stdin), *arguments)) + "\n")
    except Exception as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the engine's threads do not end on their own


if __name__ == "__main__":
    _main()
