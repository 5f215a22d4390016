"""What people wait for: one layer, all layers, whole sweeps, images, many texts, loading and commands, in new processes.

    python -m benchmarks.speed.waits encode store images growth sweep --tasks TASKS --device cuda --width 1024 --texts 8192
    python -m benchmarks.speed.waits encode store memory-last memory-all load-0 load-12 load-24 growth loading help import

Each row runs in a process of its own, with an empty cache of compiled kernels, and prints a line of JSON; the pages
``waits.md``, ``sweep.md``, ``sweep_gpu.md`` and ``encoder.md`` of ``benchmarks/results`` are made of such lines. Models
are random Llamas with a byte-pair tokenizer, texts are random words. On a CPU one thread runs, and its own seconds count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.timing import alternate, device_name, forget_cached, host_memory, peak, timed, usual_clock

QUIET: dict[str, Any] = {"show_progress_bar": False}
BATCHES = (32, 128, 256, 512)


def make_texts(count: int, shortest: int = 8, longest: int = 100) -> list[str]:
    """Return texts of random words, of about 1.8 tokens each."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlucmfw", k=draw.randint(2, 10))) for _ in range(4000)]
    return [" ".join(draw.choices(words, k=draw.randint(shortest, longest))) for _ in range(count)]


def write_llama(folder: Path, given: argparse.Namespace, *, blocks: int | None = None, width: int | None = None) -> str:
    """Write a random Llama and its tokenizer, and return the folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    width, blocks = width or given.width, blocks or given.blocks
    heads = max(width // (128 if width >= 4096 else 64), 1)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=width, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=min(given.key_heads or heads, heads), max_position_embeddings=512, pad_token_id=0,
        intermediate_size=14336 if width == 4096 else width * 43 // 16,
    )  # fmt: skip
    with torch.device(given.device):
        LlamaModel(config).to(getattr(torch, given.dtype)).save_pretrained(folder)
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    made.train_from_iterator(make_texts(2000), trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


def encoder_of(model: str, layer: int, given: argparse.Namespace) -> Any:
    from midlayer_encoders import LayerEncoder

    return LayerEncoder(model, layer, device=given.device, dtype=given.dtype)


def plain_of(encoder: Any, folder: Path) -> Any:
    """Return what sentence-transformers loads from the encoder's folder: the same model, cut at the same layer."""
    from sentence_transformers import SentenceTransformer

    encoder.save_pretrained(str(folder))
    return SentenceTransformer(str(folder), device=str(encoder.device), model_kwargs={"dtype": encoder.dtype})


def best_batch(plain: Any, inputs: list[str]) -> int:
    """Return the batch size with which sentence-transformers is fastest on some of the inputs."""
    some = inputs[:: max(len(inputs) // 2048, 1)]
    plain.encode(some[:64], **QUIET)
    seconds = {size: timed(partial(plain.encode, some, batch_size=size, **QUIET)) for size in BATCHES}
    return min(seconds, key=seconds.__getitem__)


class Store:
    """Embeds texts at all layers into a store of their own, each time a new one."""

    def __init__(self, encoder: Any, root: Path) -> None:
        self.encoder, self.root, self.runs = encoder, root, 0

    def open(self, run: int) -> Any:
        from midlayer_encoders.sweeping.store import EmbeddingStore

        width, layers = self.encoder.get_embedding_dimension(), range(self.encoder.layer + 1)
        return EmbeddingStore(self.root / f"run{run}", key="bench", layers=layers, dim=width)

    def __call__(self, inputs: list[str]) -> Any:
        from midlayer_encoders.sweeping.embedder import Embedder
        from midlayer_encoders.sweeping.store import text_key

        self.runs += 1
        store = self.open(self.runs)
        Embedder(self.encoder, store)(inputs, [text_key(text) for text in inputs], "")
        return store


def encode(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """`encode` at layer 0, half and all of the depth: the first call, the next, and plain sentence-transformers' next."""
    model, inputs = write_llama(folder / "model", given), make_texts(given.texts)
    found: dict[str, Any] = {}
    for layer in (0, given.blocks // 2, given.blocks):
        encoder = encoder_of(model, layer, given)
        plain = plain_of(encoder, folder / f"cut{layer}")
        found[f"{layer} first"] = timed(lambda e=encoder: e.encode(inputs, **QUIET))
        for size in (32, 256):
            options = {"batch_size": size, **QUIET}
            runs = {
                "ours": partial(encoder.encode, inputs, **options),
                "plain": partial(plain.encode, inputs, **options),
            }
            alternate(runs, 1)
            best = alternate(runs, given.rounds, usual_clock)
            found |= {f"{layer} {name} {size}": seconds for name, seconds in best.items()}
            found[f"{layer} ratio {size}"] = best["ours"] / best["plain"]
    return found


def store(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All layers into the store, and the last layer by sentence-transformers in its best batches."""
    import numpy as np

    from midlayer_encoders.sweeping.store import text_key

    model, inputs = write_llama(folder / "model", given), make_texts(given.texts)
    encoder = encoder_of(model, -1, given)
    plain, ours = plain_of(encoder, folder / "plain"), Store(encoder, folder / "stores")
    first = timed(lambda: ours(inputs))
    size = best_batch(plain, inputs)
    runs = {"plain": lambda: plain.encode(inputs, batch_size=size, **QUIET), "ours": lambda: ours(inputs)}
    best = alternate(runs, given.rounds, usual_clock)
    memory = {name: peak(run) for name, run in runs.items()}
    some = inputs[:512]
    keys = [text_key(text) for text in some]
    stored, again = (ours(some).read(encoder.layer, keys) for _ in range(2))
    theirs = plain.encode(some, batch_size=64, **QUIET).astype(np.float32)
    apart = np.linalg.norm(stored - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    found = {
        "batch": size, **best, "ratio": best["ours"] / best["plain"], "first ratio": first / best["plain"],
        "memory ratio": memory["ours"] / memory["plain"], "equal": bool(np.array_equal(stored, again)),
        "apart": float(apart.mean()),
    }  # fmt: skip
    if given.device == "cpu":  # each layer by a cut model of its own
        found["one by one"] = sum(
            timed(partial(encoder_of(model, layer, given).encode, inputs, **QUIET), usual_clock)
            for layer in range(given.blocks + 1)
        )
    return found


def memory(folder: Path, given: argparse.Namespace, *, layers: str) -> dict[str, Any]:
    """Peak memory of a process that embeds the last layer by sentence-transformers, or all layers."""
    model, inputs = written_elsewhere(folder, given), make_texts(given.texts)
    if layers == "all":
        Store(encoder_of(model, -1, given), folder / "stores")(inputs)
    else:
        from sentence_transformers import SentenceTransformer

        SentenceTransformer(model, device=given.device).encode(inputs, batch_size=16, **QUIET)
    return {"peak MB": host_memory()}


def load(folder: Path, given: argparse.Namespace, *, layer: int) -> dict[str, Any]:
    """MB read from the disk to load a cut encoder, and the peak of its process's memory."""
    import sentence_transformers  # noqa: F401  (its own files are not the model's)

    model = written_elsewhere(folder, given)
    forget_cached(folder)

    def read_bytes() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

    before = read_bytes()
    encoder_of(model, layer, given).encode(make_texts(4), **QUIET)
    return {"read MB": (read_bytes() - before) / 1e6, "peak MB": host_memory()}


def written_elsewhere(folder: Path, given: argparse.Namespace) -> str:
    """Write the model in another process, so that this one neither holds nor maps it; return its folder."""
    words = [
        str(folder / "model"),
        "--width",
        str(given.width),
        "--blocks",
        str(given.blocks),
        "--device",
        given.device,
    ]
    subprocess.run([sys.executable, "-m", "benchmarks.speed.waits", "load-0", "--write", *words], check=True)
    return str(folder / "model")


def images(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All 25 layers of a ViT-L over 2,048 JPEG files of 640 x 480, compared with sentence-transformers' last layer."""
    import numpy as np
    import torch
    import transformers
    from PIL import Image

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, patch_size=16
    )
    with torch.device(given.device):
        transformers.ViTModel(config).to(getattr(torch, given.dtype)).save_pretrained(folder / "model")
    transformers.ViTImageProcessor(size={"height": 224, "width": 224}).save_pretrained(folder / "model")
    colors = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    picture = Image.fromarray(colors).resize((640, 480), Image.Resampling.BICUBIC)
    files = [str(folder / f"{number}.jpg") for number in range(2048)]
    for number, path in enumerate(files):
        picture.rotate(number % 360).save(path, quality=90)
    encoder = encoder_of(str(folder / "model"), -1, given)
    plain = plain_of(encoder, folder / "plain")
    first = timed(lambda: encoder.encode_layers(files))
    size = best_batch(plain, files)
    runs = {
        "plain": lambda: plain.encode(files, batch_size=size, **QUIET),
        "ours": lambda: encoder.encode_layers(files),
    }
    best = alternate(runs, given.rounds)
    return {"batch": size, **best, "ratio": best["ours"] / best["plain"], "first ratio": first / best["plain"]}


def growth(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """`--texts` short texts at all layers of a small model: seconds and memory, and one layer read from the disk."""
    from midlayer_encoders.sweeping.store import text_key

    few = make_texts(10_000, 4, 10)
    inputs = [f"{few[number % 10_000]} {number}" for number in range(given.texts)]
    ours = Store(encoder_of(write_llama(folder / "model", given, blocks=4, width=256), -1, given), folder / "stores")
    ours(inputs[:2000])
    before = host_memory()
    seconds = timed(lambda: ours(inputs))
    after, keys = host_memory(), [text_key(text) for text in inputs]
    forget_cached(ours.root)
    opening = timed(lambda: ours.open(ours.runs))
    opened = ours.open(ours.runs)
    cold, warm = (timed(lambda: opened.read(2, keys)) for _ in range(2))
    return {
        "texts": given.texts, "ms per 1000": 1e6 * seconds / given.texts, "before MB": before, "peak MB": after,
        "open": opening, "read cold": cold, "read warm": warm,
    }  # fmt: skip


def whole_sweep(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Whole sweeps of real tasks, compared with one pass of sentence-transformers over their texts."""
    import midlayer_encoders
    from midlayer_encoders.tasks.sources import task_sources
    from midlayer_encoders.tasks.tfidf import task_texts

    encoder = encoder_of(write_llama(folder / "model", given), -1, given)
    tasks = sorted(path for path in given.tasks.iterdir() if path.is_dir())

    def run(name: str, **options: Any) -> float:
        return timed(lambda: midlayer_encoders.sweep(encoder, tasks, out=folder / name, **options))

    seconds = {"first": run("first"), "whole": run("whole"), "bare": run("bare", baselines=False), "again": run("bare")}
    inputs = sorted({text for source in task_sources(tasks) for text in task_texts(source.make())})
    plain = plain_of(encoder, folder / "plain")
    best = alternate({"plain": lambda: plain.encode(inputs, batch_size=512, **QUIET)}, 2)["plain"]
    return {"plain": best, **seconds, **{f"{name} ratio": took / best for name, took in seconds.items()}}


def loading(_: Path, __: argparse.Namespace) -> dict[str, Any]:
    """Loading `built-in` after imports, once it is in the cache of converted models."""
    from midlayer_encoders import LayerEncoder

    LayerEncoder("built-in", 24)
    start, busy = time.perf_counter(), time.process_time()
    LayerEncoder("built-in", 24)
    return {"seconds": time.perf_counter() - start, "CPU seconds": time.process_time() - busy}


def command(*words: str) -> dict[str, Any]:
    """Return the seconds of a command, the fastest of five."""
    return {"seconds": min(timed(partial(subprocess.run, words, check=True, capture_output=True)) for _ in range(5))}


ROWS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "encode": encode, "store": store, "images": images, "growth": growth, "sweep": whole_sweep, "loading": loading,
    "memory-last": partial(memory, layers="last"), "memory-all": partial(memory, layers="all"),
    **{f"load-{layer}": partial(load, layer=layer) for layer in (0, 6, 12, 17, 24)},
    "help": lambda *_: command(str(Path(sys.executable).with_name("midlayer")), "--help"),
    "import": lambda *_: command(sys.executable, "-c", "import midlayer_encoders"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", choices=ROWS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", help="bfloat16 on a GPU and float32 on a CPU by default")
    for name, value in (("blocks", 24), ("width", 256), ("key-heads", 0), ("texts", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tasks", type=Path, help="folder with a folder for each task, for the row `sweep`")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # run one row in this process
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # only write the model
    given = parser.parse_args()
    given.dtype = given.dtype or ("bfloat16" if given.device == "cuda" else "float32")
    if "sweep" in given.rows and given.tasks is None:
        parser.error("the row `sweep` needs --tasks, a folder with a folder for each task")
    if given.write:
        write_llama(given.write, given)
    elif given.here:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            print(json.dumps(ROWS[given.rows[0]](Path(folder), given)))
    else:
        run_rows(given, [word for word in sys.argv[1:] if word not in given.rows])


def run_rows(given: argparse.Namespace, options: list[str]) -> None:
    """Run each row in a process of its own and print what it found."""
    print(json.dumps({"device": device_name(given.device), **{k: str(v) for k, v in vars(given).items() if v}}))
    for row in given.rows:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as kernels:
            environment = {**os.environ, "TRITON_CACHE_DIR": kernels}
            environment |= {} if given.device == "cuda" else {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            words = [sys.executable, "-m", "benchmarks.speed.waits", row, "--here", *options]
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"error": done.stderr[-2000:]}
        print(json.dumps({"row": row, **found}), flush=True)


if __name__ == "__main__":
    main()
