"""What people wait for, in new processes: first calls, all layers of several shapes, images, loading, commands.

    python benchmarks/waits.py first half store-1024 store-2048 store-4096 images sweep --tasks TASKS   # on a GPU
    python benchmarks/waits.py loading help                                                             # on a CPU

Each row runs in a process of its own, with an empty cache of compiled kernels, and prints a line of JSON. Texts are
random words, about 100 tokens each; models are random Llamas in bfloat16 with a byte-pair tokenizer.
``benchmarks/results/waits.md`` has the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

QUIET: dict[str, Any] = {"show_progress_bar": False}
SHAPES = {  # width: blocks, key heads, texts
    1024: (24, 16, 8192),
    2048: (16, 32, 4096),
    4096: (32, 8, 4096),
}


def write_llama(folder: Path, width: int, blocks: int, key_heads: int) -> None:
    import torch
    from sweep_gpu import write_model
    from transformers import LlamaConfig, LlamaModel

    write_model(folder, blocks=1, width=64, dtype="bfloat16")  # for its tokenizer
    torch.manual_seed(0)
    head = 128 if width >= 4096 else 64
    config = LlamaConfig(
        vocab_size=4096, hidden_size=width, num_hidden_layers=blocks, num_attention_heads=width // head,
        num_key_value_heads=key_heads, intermediate_size=14336 if width == 4096 else width * 43 // 16,
        max_position_embeddings=512, pad_token_id=0, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("cuda"):
        LlamaModel(config).to(torch.bfloat16).save_pretrained(folder)


def encoder_of(folder: Path, layer: int) -> Any:
    from midlayer_encoders import LayerEncoder

    return LayerEncoder(str(folder), layer, device="cuda", dtype="bfloat16")


def plain_of(encoder: Any, folder: Path) -> Any:
    """Return what sentence-transformers loads from the encoder's folder: the same model, cut at the same layer."""
    import torch
    from sentence_transformers import SentenceTransformer

    encoder.save_pretrained(str(folder))
    return SentenceTransformer(str(folder), device="cuda", model_kwargs={"dtype": torch.bfloat16})


def alternating(runs: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, float]:
    """Return the seconds of the fastest of some alternating rounds."""
    from timing import timed

    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            best[name] = min(best[name], timed(run))
    return best


def first(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """The first `encode` of 4,096 texts at 8 of 16 blocks, 2,048 wide, and the next ones."""
    from sweep_gpu import texts
    from timing import timed

    write_llama(folder / "model", 2048, 16, 32)
    encoder, inputs = encoder_of(folder / "model", 8), texts(4096)
    seconds = [timed(lambda: encoder.encode(inputs, **QUIET)) for _ in range(4)]
    return {"first": seconds[0], "next": min(seconds[1:]), "ratio": seconds[0] / min(seconds[1:])}


def half(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """`encode` at 12 of 24 blocks, compared with plain sentence-transformers over the same cut model."""
    from sweep_gpu import texts

    write_llama(folder / "model", 1024, 24, 16)
    encoder, inputs = encoder_of(folder / "model", 12), texts(4096)
    plain = plain_of(encoder, folder / "plain")
    found: dict[str, Any] = {}
    for size in (32, 256):
        runs = {
            "plain": lambda s=size: plain.encode(inputs, batch_size=s, **QUIET),
            "ours": lambda s=size: encoder.encode(inputs, batch_size=s, **QUIET),
        }
        alternating(runs, 1)
        best = alternating(runs, 2)
        found |= {f"ratio {size}": best["ours"] / best["plain"], f"plain {size}": best["plain"]}
    return found


def store(width: int) -> Callable[[Path, argparse.Namespace], dict[str, Any]]:
    """All layers into the store, compared with the last layer by sentence-transformers in its best batches."""

    def row(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
        import torch
        from sentence_transformers import SentenceTransformer
        from sweep_gpu import Ours, texts
        from timing import peak, timed

        blocks, key_heads, count = SHAPES[width]
        write_llama(folder / "model", width, blocks, key_heads)
        encoder, inputs = encoder_of(folder / "model", -1), texts(count)
        options: dict[str, Any] = {"dtype": torch.bfloat16}
        plain = SentenceTransformer(str(folder / "model"), device="cuda", model_kwargs=options)  # pools the mean
        ours = Ours(encoder, folder / "store")
        first_seconds = timed(lambda: ours(inputs))
        some = inputs[::8]
        plain.encode(some[:64], **QUIET)
        by_size = {size: timed(lambda s=size: plain.encode(some, batch_size=s, **QUIET)) for size in (128, 256, 512)}
        size = min(by_size, key=lambda size: by_size[size])
        runs = {"plain": lambda: plain.encode(inputs, batch_size=size, **QUIET), "ours": lambda: ours(inputs)}
        memory: dict[str, float] = {}

        def measured(name: str, run: Callable[[], Any]) -> Callable[[], None]:
            return lambda: memory.update({name: peak(run)})

        best = alternating({name: measured(name, run) for name, run in runs.items()}, 1 if width == 4096 else 2)
        return {
            "batch": size, **best, "ratio": best["ours"] / best["plain"], "first ratio": first_seconds / best["plain"],
            "memory ratio": memory["ours"] / memory["plain"], **agreement(encoder, plain, ours, inputs[:512]),
        }  # fmt: skip

    return row


def agreement(encoder: Any, plain: Any, ours: Any, some: list[str]) -> dict[str, Any]:
    """Return whether two runs are bitwise equal, and how far they are from sentence-transformers."""
    import numpy as np

    from midlayer_encoders.sweeping.store import text_key

    keys = [text_key(text) for text in some]
    stored, again = (ours(some).read(encoder.layer, keys) for _ in range(2))
    theirs = plain.encode(some, batch_size=64, **QUIET).astype(np.float32)
    apart = np.linalg.norm(stored - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    return {"equal": bool(np.array_equal(stored, again)), "apart": float(apart.mean())}


def images(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """All 25 layers of a ViT-L over 2,048 JPEG files of 640 x 480, compared with sentence-transformers' last layer."""
    import numpy as np
    import torch
    import transformers
    from PIL import Image
    from timing import timed

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, image_size=224,
        patch_size=16,
    )  # fmt: skip
    with torch.device("cuda"):
        transformers.ViTModel(config).to(torch.bfloat16).save_pretrained(folder / "model")
    transformers.ViTImageProcessor(size={"height": 224, "width": 224}).save_pretrained(folder / "model")
    colors = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    picture = Image.fromarray(colors).resize((640, 480), Image.Resampling.BICUBIC)
    files = [str(folder / f"{number}.jpg") for number in range(2048)]
    for number, path in enumerate(files):
        picture.rotate(number % 360).save(path, quality=90)
    encoder = encoder_of(folder / "model", -1)
    plain = plain_of(encoder, folder / "plain")
    first_seconds = timed(lambda: encoder.encode_layers(files))
    some = files[::8]
    by_size = {size: timed(lambda s=size: plain.encode(some, batch_size=s, **QUIET)) for size in (32, 64, 256)}
    size = min(by_size, key=lambda size: by_size[size])
    best = alternating(
        {"plain": lambda: plain.encode(files, batch_size=size, **QUIET), "ours": lambda: encoder.encode_layers(files)},
        2,
    )
    return {"batch": size, **best, "ratio": best["ours"] / best["plain"], "first ratio": first_seconds / best["plain"]}


def sweep(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Whole sweeps of real tasks, compared with one pass of sentence-transformers over their texts."""
    from timing import timed

    import midlayer_encoders
    from midlayer_encoders.tasks.sources import task_sources
    from midlayer_encoders.tasks.tfidf import task_texts

    write_llama(folder / "model", 1024, 24, 16)
    encoder = encoder_of(folder / "model", -1)
    tasks = sorted(path for path in given.tasks.iterdir() if path.is_dir())

    def run(name: str, **options: Any) -> float:
        return timed(lambda: midlayer_encoders.sweep(encoder, tasks, out=folder / name, **options))

    seconds = {"first": run("first"), "whole": run("whole"), "bare": run("bare", baselines=False)}
    inputs = sorted({text for source in task_sources(tasks) for text in task_texts(source.make())})
    plain = plain_of(encoder, folder / "plain")
    best = alternating({"plain": lambda: plain.encode(inputs, batch_size=512, **QUIET)}, 2)["plain"]
    return {"plain": best, **seconds, **{f"{name} ratio": took / best for name, took in seconds.items()}}


def loading(_: Path, __: argparse.Namespace) -> dict[str, Any]:
    """Loading `built-in` after imports, once it is in the cache of converted models."""
    from midlayer_encoders import LayerEncoder

    LayerEncoder("built-in", 24)
    start, busy = time.perf_counter(), time.process_time()
    LayerEncoder("built-in", 24)
    return {"seconds": time.perf_counter() - start, "CPU seconds": time.process_time() - busy}


def help_text(_: Path, __: argparse.Namespace) -> dict[str, Any]:
    """`midlayer --help`, the fastest of five."""
    command = [str(Path(sys.executable).with_name("midlayer")), "--help"]

    def run() -> float:
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start

    return {"seconds": min(run() for _ in range(5))}


ROWS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "first": first,
    "half": half,
    **{f"store-{width}": store(width) for width in SHAPES},
    "images": images,
    "sweep": sweep,
    "loading": loading,
    "help": help_text,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=ROWS, default=["loading", "help"])
    parser.add_argument("--tasks", type=Path, help="folder with a folder for each task, for the row `sweep`")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # run one row in this process
    given = parser.parse_args()
    if given.here:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            print(json.dumps(ROWS[given.rows[0]](Path(folder), given)))
        return
    for row in given.rows:
        command = [sys.executable, __file__, row, "--here", *(["--tasks", str(given.tasks)] if given.tasks else [])]
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as kernels:
            environment = {**os.environ, "TRITON_CACHE_DIR": kernels}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"error": done.stderr[-2000:]}
        print(json.dumps({"row": row, **found}), flush=True)


if __name__ == "__main__":
    main()
