"""Memory and time of a sweep by the number of passages of a retrieval task, each size in its own process.

    python benchmarks/corpus.py [--passages 10000 100000 1000000]

A random Llama of 24 blocks; the store is filled with made-up vectors first, so the model does not run and only scoring
is measured: the evaluation is recorded, all 25 layers are scored, and mteb confirms up to three of them. Writes
``benchmarks/results/corpus_cpu.md`` or ``corpus_cuda.md``.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

sys.path.insert(0, str(Path(__file__).parent))

from sweep_gpu import write_model

from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders.sweeping import SweepSettings
from midlayer_encoders.sweeping.embedder import open_store
from midlayer_encoders.sweeping.store import text_key

RESULTS = Path(__file__).parent / "results"
BLOCKS, CHUNK = 24, 4096


def passage(number: int) -> str:
    return f"passage {number} of the corpus"


def query(number: int) -> str:
    return f"query {number}"


class Corpus(AbsTaskRetrieval):
    """Queries with one relevant passage each, among a given number of passages."""

    metadata = TaskMetadata(
        name="Corpus", description="made", type="Retrieval", dataset={"path": "made/corpus", "revision": "1"},
        category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"], main_score="ndcg_at_10",
    )  # fmt: skip
    passages, queries = 0, 0

    def load_data(self, num_proc: int | None = None, **_: Any) -> None:  # noqa: ARG002
        if self.data_loaded:
            return
        corpus = {"id": [f"d{n}" for n in range(self.passages)], "title": [""] * self.passages}
        corpus["text"] = [passage(n) for n in range(self.passages)]
        asked = range(self.queries)
        data = {
            "queries": Dataset.from_dict({"id": [f"q{n}" for n in asked], "text": [query(n) for n in asked]}),
            "corpus": Dataset.from_dict(corpus),
            "relevant_docs": {f"q{n}": {f"d{n}": 1} for n in asked},
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": data}}
        self.data_loaded = True


def fill(folder: Path, given: argparse.Namespace, passages: int) -> None:
    """Store made-up vectors; a query is near its passage, nearer at some layers than at others."""
    encoder = LayerEncoder(str(folder / "model"), -1, device="cpu")
    store = open_store(folder / str(passages) / "store", encoder.spec, range(BLOCKS + 1), encoder, "float16")
    generator = np.random.default_rng(0)
    noise = np.linspace(4, 2, BLOCKS + 1, dtype=np.float32)[:, None, None]
    normal = generator.standard_normal((BLOCKS + 1, CHUNK, given.width), dtype=np.float32).astype(np.float16)
    for start in range(0, passages, CHUNK):
        numbers = range(start, min(start + CHUNK, passages))
        signs = generator.choice(np.array([-1, 1], dtype=np.float16), given.width)  # cheaper than new normal numbers
        vectors = normal[:, : len(numbers)] * signs
        store.write([text_key(passage(n)) for n in numbers], vectors, finite=True)
        if start == 0:
            near = vectors[:, : given.queries]
            near = near + noise * generator.standard_normal(near.shape, dtype=np.float32)
            store.write([text_key(query(n)) for n in range(given.queries)], near, finite=True)


def memory(name: str) -> float:
    """Return a number of this process's memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def one(folder: Path, given: argparse.Namespace, passages: int) -> dict[str, float]:
    """Sweep one size, and return what it took."""
    Corpus.passages, Corpus.queries = passages, given.queries
    encoder = LayerEncoder(str(folder / "model"), -1, device=given.device)
    encoder.encode(["warm"])
    embedded: list[int] = []
    seconds: dict[str, float] = {}
    found = {"before": memory("VmRSS")}
    start = time.perf_counter()

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "embedding":
            embedded.append(total)
        if total and done == total and stage not in seconds:
            seconds[stage] = time.perf_counter() - start
            found[f"peak after {stage}"] = memory("VmHWM")

    settings = SweepSettings(store_dtype="float16", workers=1)
    result = sweep(
        encoder, Corpus(), out=folder / str(passages) / "out", store=folder / str(passages) / "store",
        baselines=False, progress=progress, settings=settings,
    )  # fmt: skip
    assert not any(embedded), "the model ran"
    assert result.frame.filter(kind="score").height == BLOCKS + 1
    return {
        "before": found["before"],
        "scored": found["peak after scoring"],
        "whole": memory("VmHWM"),
        "recording": seconds["planning"],
        "scoring": seconds["scoring"] - seconds["planning"],
        "confirming": time.perf_counter() - start - seconds["scoring"],
    }


def main() -> None:
    """Measure every size and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, nargs="+", default=[10_000, 30_000, 100_000])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--part", choices=["fill", "one"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "fill":
        fill(given.folder, given, given.passages[0])
        return
    if given.part == "one":
        print(json.dumps(one(given.folder, given, given.passages[0])))
        return
    device = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()}, CPU"
    where = "on a GPU" if given.device == "cuda" else "on a CPU"
    lines = [
        f"# A retrieval task by the number of passages, {where}",
        "",
        "`python benchmarks/corpus.py`: the store is filled before; the sweep records the evaluation, scores all "
        "layers and lets mteb confirm three.",
        "",
        f"{device}; {BLOCKS + 1} layers of {given.width} dimensions in float16, {given.queries} queries, one process.",
        "",
        "| passages | store, GB | recording, s | scoring a layer, s | confirming, s | memory before, MB "
        "| peak of scoring, MB | peak with mteb's confirmation, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        write_model(folder / "model", blocks=BLOCKS, width=given.width, dtype="float32")
        for passages in given.passages:
            command = [sys.executable, __file__, "--folder", name, "--passages", str(passages)]
            command += ["--queries", str(given.queries), "--width", str(given.width), "--device", given.device]
            subprocess.run([*command, "--part", "fill"], check=True)
            output = subprocess.run([*command, "--part", "one"], check=True, stdout=subprocess.PIPE, text=True).stdout
            row = json.loads(output.splitlines()[-1])
            size = sum(path.stat().st_size for path in (folder / str(passages) / "store").rglob("*.safetensors")) / 1e9
            lines.append(
                f"| {passages:,} | {size:.1f} | {row['recording']:.1f} | {row['scoring'] / (BLOCKS + 1):.2f} "
                f"| {row['confirming']:.1f} | {row['before']:.0f} | {row['scored']:.0f} | {row['whole']:.0f} |"
            )
            print(lines[-1], flush=True)
            subprocess.run(["rm", "-rf", str(folder / str(passages))], check=True)
            kind = "cuda" if given.device == "cuda" else "cpu"
            (RESULTS / f"corpus_{kind}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
