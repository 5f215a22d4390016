"""All layers into the store against sentence-transformers' one, on a GPU: time, memory, where the time goes, and scale.

Ratios within one run of alternating parts, the fastest of each. A random Llama of 24 blocks, 1024 wide, bfloat16, and
texts of 8 to 100 words. Writes ``benchmarks/results/sweep_gpu.md``; ``--parts`` limits it to some.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from timing import forget_cached, peak, timed

RESULTS = Path(__file__).parent / "results" / "sweep_gpu.md"
BATCHES = (32, 128, 256, 512, 1024)
PARTS = ("embedding", "profile", "encode", "whole", "million")
QUIET = {"show_progress_bar": False}


def write_model(folder: Path, *, blocks: int, width: int, dtype: str) -> None:
    """Write a random Llama and a byte-pair tokenizer of made-up words, about 1.8 tokens each."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=width, num_hidden_layers=blocks, num_attention_heads=max(width // 64, 1),
        intermediate_size=width * 43 // 16, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    LlamaModel(config).to(getattr(torch, dtype)).save_pretrained(folder)
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(
        texts(2000), trainers.BpeTrainer(vocab_size=4096, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def texts(count: int, shortest: int = 8, longest: int = 100) -> list[str]:
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlucmfw", k=draw.randint(2, 10))) for _ in range(4000)]
    return [" ".join(draw.choices(words, k=draw.randint(shortest, longest))) for _ in range(count)]


class Ours:
    """Embeds texts at all layers into a store of their own, each time anew."""

    def __init__(self, encoder: Any, root: Path, **options: Any) -> None:
        self.encoder, self.root, self.options, self.runs = encoder, root, options, 0

    def __call__(self, inputs: list[str]) -> Any:
        from midlayer_encoders.sweeping.embedder import Embedder
        from midlayer_encoders.sweeping.store import EmbeddingStore, text_key

        self.runs += 1
        width = self.encoder.get_embedding_dimension()
        layers = range(self.encoder.layer + 1)
        store = EmbeddingStore(self.root / f"run{self.runs}", key="bench", layers=layers, dim=width)
        embedder = Embedder(self.encoder, store, **self.options)
        embedder(inputs, [text_key(text) for text in inputs], "")
        return store


class Bench:
    """The model, loaded as sentence-transformers loads it and as an encoder of the whole."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        from sentence_transformers import SentenceTransformer

        from midlayer_encoders import LayerEncoder

        self.given, self.folder, self.root = given, folder, folder / "stores"
        write_model(folder / "model", blocks=given.blocks, width=given.width, dtype=given.dtype)
        self.inputs = texts(given.texts)
        self.options: dict[str, Any] = {"device": given.device, "dtype": given.dtype}
        self.whole = LayerEncoder(str(folder / "model"), -1, **self.options)
        self.whole.save_pretrained(str(folder / "plain"))
        self.plain = SentenceTransformer(
            str(folder / "plain"), device=given.device, model_kwargs={"dtype": self.whole.dtype}
        )
        self.best = 0

    def choose_batch(self) -> list[str]:
        """Return a table of sentence-transformers' seconds by batch size, on some of the texts, and keep the best."""
        some = self.inputs[:: max(len(self.inputs) // 2048, 1)]
        self.plain.encode(some[:64], **QUIET)
        found = {size: timed(lambda s=size: self.plain.encode(some, batch_size=s, **QUIET)) for size in BATCHES}
        self.best = min(found, key=lambda size: found[size])
        return [
            f"sentence-transformers by batch size, {len(some)} texts:",
            "",
            "| " + " | ".join(map(str, found)) + " |",
            "|---" * len(found) + "|",
            "| " + " | ".join(f"{seconds:.2f} s" for seconds in found.values()) + " |",
            "",
        ]

    def embedding(self) -> list[str]:
        lines = self.choose_batch()
        ours = Ours(self.whole, self.root)
        ours(self.inputs[:2048])
        runs = {
            "sentence-transformers, last layer": lambda: self.plain.encode(self.inputs, batch_size=self.best, **QUIET),
            "all layers into the store": lambda: ours(self.inputs),
        }
        for budget in self.given.budgets:
            sized = Ours(self.whole, self.root / str(budget), token_budget=budget)
            runs[f"the same, `token_budget={budget}`"] = lambda s=sized: s(self.inputs)
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(self.given.rounds):
            for name, run in runs.items():
                best[name] = min(best[name], timed(run))
        memory = {name: peak(run) for name, run in list(runs.items())[:2]}
        base = best["sentence-transformers, last layer"]
        base_memory = memory["sentence-transformers, last layer"]
        lines += [f"Batches of {self.best} in sentence-transformers, its best.", ""]
        lines += ["| | seconds | ratio | peak of device memory, GB | ratio |", "|---|---|---|---|---|"]
        for name, seconds in best.items():
            used = f"{memory[name]:.2f} | {memory[name] / base_memory:.2f}" if name in memory else " | "
            lines.append(f"| {name} | {seconds:.2f} | **{seconds / base:.3f}** | {used} |")
        return [*lines, "", self.agreement(ours)]

    def agreement(self, ours: Ours) -> str:
        """Return how far the stored vectors are from those that sentence-transformers gives for the last layer."""
        import numpy as np

        from midlayer_encoders.sweeping.store import text_key

        some = self.inputs[:512]
        keys = [text_key(text) for text in some]
        stored, again = (ours(some).read(self.whole.layer, keys) for _ in range(2))
        theirs = self.plain.encode(some, batch_size=64, **QUIET).astype(np.float32)
        same = "the same to the last bit" if np.array_equal(stored, again) else "NOT the same"
        off = np.linalg.norm(stored - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        return f"Two runs: {same}. Off from sentence-transformers' own vectors by {off.mean():.1e} of their length, at most {off.max():.1e}."

    def profile(self) -> list[str]:
        """Return where the device's time goes, by kernel, and how long it is busy."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiled

        ours, some = Ours(self.whole, self.root / "profiled"), self.inputs[: self.given.texts // 2]
        ours(some[:2048])
        activities = [ProfilerActivity.CPU] if self.given.device == "cpu" else [ProfilerActivity.CUDA]
        with profiled(activities=activities) as found:
            seconds = timed(lambda: ours(some))
        of = "self_cpu_time_total" if self.given.device == "cpu" else "self_device_time_total"
        events = sorted(found.key_averages(), key=lambda event: -getattr(event, of))
        busy = sum(getattr(event, of) for event in events) / 1e6
        waiting = sum(getattr(event, of) for event in events if "Memcpy" in event.key) / 1e6
        lines = [f"Copies between host and device: {waiting:.2f} s, overlapping with the passes.", ""]
        lines += [f"{len(some)} texts in {seconds:.2f} s, of which the device was busy {busy:.2f} s.", ""]
        lines += ["| kernel | calls | ms | share |", "|---|---|---|---|"]
        for event in events[:18]:
            took = getattr(event, of) / 1e3
            lines.append(
                f"| `{event.key[:90].replace('|', '/')}` | {event.count} | {took:.0f} | {took / busy / 10:.1f} % |"
            )
        return lines

    def encode(self) -> list[str]:
        from sentence_transformers import SentenceTransformer

        from midlayer_encoders import LayerEncoder

        lines = ["| layer | plain, s | ours, s | ratio |", "|---|---|---|---|"]
        some = self.inputs[: self.given.texts // 4]
        for layer in (0, self.given.blocks // 2, self.given.blocks):
            cut = LayerEncoder(str(self.folder / "model"), layer, **self.options)
            cut.save_pretrained(str(self.folder / f"cut{layer}"))
            plain = SentenceTransformer(
                str(self.folder / f"cut{layer}"), device=self.given.device, model_kwargs={"dtype": cut.dtype}
            )
            best = {"plain": float("inf"), "ours": float("inf")}
            for number in range(self.given.rounds + 2):
                for name, encoder in (("plain", plain), ("ours", cut)):
                    seconds = timed(lambda e=encoder: e.encode(some, batch_size=self.best or 256, **QUIET))
                    best[name] = min(best[name], seconds) if number else best[name]
            lines.append(
                f"| {layer} | {best['plain']:.2f} | {best['ours']:.2f} | **{best['ours'] / best['plain']:.3f}** |"
            )
        return lines

    def whole_sweep(self) -> list[str]:
        """Return what a sweep of real tasks takes, to the end, of one last-layer pass over their distinct texts."""
        from midlayer_encoders import sweep
        from midlayer_encoders.tasks.sources import task_sources
        from midlayer_encoders.tasks.tfidf import task_texts

        if self.given.tasks is None:
            raise ValueError("the part `whole` needs --tasks, a folder with a folder for each task")
        folders = sorted(path for path in self.given.tasks.iterdir() if path.is_dir())
        inputs = sorted({text for source in task_sources(folders) for text in task_texts(source.make())})
        stages: dict[str, list[float]] = {}

        def note(stage: str, *_: int) -> None:
            stages.setdefault(stage, []).append(time.perf_counter())

        def run(number: int, **options: Any) -> float:
            stages.clear()
            out = self.root / f"swept{number}"
            return timed(lambda: sweep(self.whole, folders, out=out, progress=note, **options))

        plain = [timed(lambda: self.plain.encode(inputs, batch_size=self.best or 512, **QUIET)) for _ in range(2)]
        seconds = [run(number) for number in range(self.given.rounds)]
        spans = ", ".join(f"{stage} {times[-1] - times[0]:.1f} s" for stage, times in stages.items())
        bare = run(-1, baselines=False)
        again = timed(lambda: sweep(self.whole, folders, out=self.root / "swept0"))
        rows = {
            "sentence-transformers, last layer, one pass": min(plain),
            "the sweep, first run (starts workers, compiles kernels)": seconds[0],
            "the sweep": min(seconds),
            "the sweep without baselines": bare,
            "the same sweep again, from stored results": again,
        }
        lines = [
            f"{len(folders)} tasks, {len(inputs):,} distinct texts. Time from start to end of each stage: {spans}.",
            "",
        ]
        lines += ["| | seconds | ratio |", "|---|---|---|"]
        return lines + [f"| {name} | {took:.2f} | **{took / min(plain):.2f}** |" for name, took in rows.items()]


def memory_now(name: str = "VmHWM") -> float:
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3


def short_texts(count: int) -> list[str]:
    few = texts(10000, 4, 10)
    return [f"{few[number % 10000]} {number}" for number in range(count)]


def small_encoder(folder: Path, device: str) -> Any:
    from midlayer_encoders import LayerEncoder

    return LayerEncoder(str(folder / "small"), -1, device=device, dtype="bfloat16" if device == "cuda" else None)


def grow(folder: Path, count: int, device: str) -> dict[str, Any]:
    """Embed so many short texts at all layers of a small model, read a layer, and return what it took."""
    import numpy as np

    from midlayer_encoders.sweeping.store import EmbeddingStore, text_key

    encoder, inputs = small_encoder(folder, device), short_texts(count)
    ours = Ours(encoder, folder / f"grown{count}")
    ours(inputs[:2000])
    before = memory_now()
    took = timed(lambda: ours(inputs))
    after = memory_now()
    store_folder = ours.root / f"run{ours.runs}"
    keys = [text_key(text) for text in inputs]
    forget_cached(store_folder)
    start = time.perf_counter()
    store = EmbeddingStore(
        store_folder, key="bench", layers=range(encoder.layer + 1), dim=encoder.get_embedding_dimension()
    )
    opened = time.perf_counter() - start
    cold = timed(lambda: store.read(2, keys))
    warm = timed(lambda: store.read(2, keys))
    read = store.read(1, keys)
    assert np.isfinite(read).all()
    # As many bytes as the layer has, read from the front of the shards, as fast as the disk gives them.
    forget_cached(store_folder)
    left, start = read.nbytes, time.perf_counter()
    for path in sorted(store.folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while left > 0 and (part := file.read(min(left, 1 << 24))):
                left -= len(part)
    disk = time.perf_counter() - start
    shards = len(list(store.folder.glob("*.safetensors")))
    return {
        "texts": count, "per 1000": 1000 * took / count, "before": before, "after": after, "open": opened,
        "cold": cold, "warm": warm, "disk": disk, "mb": read.nbytes / 1e6, "shards": shards,
    }  # fmt: skip


def score_pairs(home: Path, count: int, device: str) -> dict[str, Any]:
    """Sweep one task of pairs over so many texts, from the file to the confirmation by mteb; return what it took."""
    import numpy as np

    from midlayer_encoders import sweep

    encoder, inputs, folder = small_encoder(home, device), short_texts(count), home / f"scored{count}"
    folder.mkdir()
    scores = np.random.default_rng(0).uniform(0, 5, len(inputs) // 2)
    with (folder / "pairs.jsonl").open("w") as file:
        for first, second, score in zip(inputs[::2], inputs[1::2], scores, strict=True):
            file.write(json.dumps({"sentence1": first, "sentence2": second, "score": round(score, 3)}) + "\n")
    stages: dict[str, list[float]] = {}

    def note(stage: str, *_: int) -> None:
        stages.setdefault(stage, []).append(time.perf_counter())

    before = memory_now()
    took = timed(lambda: sweep(encoder, folder / "pairs.jsonl", out=folder / "sweep", baselines=False, progress=note))
    spans = {stage: times[-1] - times[0] for stage, times in stages.items()}
    return {"sweep": took, "before": before, "after": memory_now(), "spans": spans}


def in_process(part: str, count: int, folder: Path, device: str) -> Any:
    """Return what a part gives in a process of its own, whose memory is its alone."""
    command = [sys.executable, __file__, part, str(count), "--folder", str(folder), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def million(folder: Path, given: argparse.Namespace) -> list[str]:
    write_model(folder / "small", blocks=4, width=256, dtype="float32")
    lines = [
        '4 blocks of width 256, texts of about 13 tokens. "Read" is one layer in the requested order, with verified checksums;',
        '"disk" is the same number of bytes read sequentially. Both follow after the files are dropped from the cache.',
        "",
        "| texts | ms per 1000 | memory before, MB | peak, MB | open, s | layer, MB | read cold, s | disk, s | disk / read | read warm, s | shards |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    scored = [
        "",
        "The same texts as pairs in one file, in a complete sweep: read, embedded at all 5 layers, scored, confirmed by mteb.",
        "",
        "| texts | seconds | ms per 1000 | memory before, MB | peak, MB | time from start to end of each stage, s |",
        "|---|---|---|---|---|---|",
    ]
    for count in given.growth:
        one = in_process("--grow", count, folder, given.device)
        lines.append(
            f"| {one['texts']:,} | {1000 * one['per 1000']:.1f} | {one['before']:.0f} | {one['after']:.0f} | {one['open']:.2f} | "
            f"{one['mb']:.0f} | {one['cold']:.2f} | {one['disk']:.2f} | **{one['disk'] / one['cold']:.2f}** | {one['warm']:.2f} | "
            f"{one['shards']:.0f} |"
        )
        one = in_process("--score", count, folder, given.device)
        spans = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in one["spans"].items())
        scored.append(
            f"| {count:,} | {one['sweep']:.1f} | {1e6 * one['sweep'] / count:.1f} | {one['before']:.0f} | {one['after']:.0f} | {spans} |"
        )
    return lines + scored


TITLES = {
    "embedding": "All layers, relative to one pass of sentence-transformers to the last layer",
    "profile": "Device time",
    "encode": "`encode` of one layer, relative to plain sentence-transformers over the same cut model",
    "whole": "A complete sweep of real tasks: embedding, scoring, confirmation by mteb",
    "million": "Many short texts",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budgets", type=int, nargs="*", default=[32768])
    parser.add_argument("--growth", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--tasks", type=Path, help="folder with a folder for each task, for the part `whole`")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--grow", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--score", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.grow or given.score:
        part, count = (grow, given.grow) if given.grow else (score_pairs, given.score)
        print(json.dumps(part(given.folder, count, given.device)))
        return
    import torch

    name = torch.cuda.get_device_name() if given.device == "cuda" else f"{os.cpu_count()} CPU cores"
    lines = ["# All layers on a GPU", "", f"`python benchmarks/sweep_gpu.py {' '.join(sys.argv[1:])}`, {name},"]
    lines += [
        f"torch {torch.__version__}: {given.blocks} blocks of width {given.width}, {given.dtype}, {given.texts:,} texts of 8 to 100 words."
    ]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        bench = Bench(Path(name), given) if set(given.parts) - {"million"} else None
        for part in given.parts:
            start = time.perf_counter()
            try:
                made = (
                    million(Path(name), given)
                    if part == "million"
                    else getattr(bench, {"whole": "whole_sweep"}.get(part, part))()
                )
            except Exception:
                made = ["```", traceback.format_exc(), "```"]  # the other parts are still worth having
            lines += ["", f"## {TITLES[part]}", "", *made]
            print("\n".join(made), f"\n({part}: {time.perf_counter() - start:.0f} s)", flush=True)
            given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
