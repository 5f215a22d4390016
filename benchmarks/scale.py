"""What the paper's 32 tasks cost for models of 1B, 8B and 70B parameters on one GPU, one node of eight and eight nodes.

    python benchmarks/scale.py rates --tasks TASKS      # on a GPU: writes benchmarks/results/scale_rates.json
    python benchmarks/scale.py estimate                 # writes benchmarks/results/scale.md

Rates are measured: the time of all layers of random models with the shapes of Llama 3 (of 70B
eight of 80 blocks); what the store writes and reads; the scoring of all layers together; mteb's scoring of one layer.
The estimate takes the texts of each task from mteb's own statistics and simulates a sweep task by task.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
RATES = RESULTS / "scale_rates.json"
CHARACTERS_PER_TOKEN = 4.2  # English in Llama 3's tokenizer; the estimate is proportional to its inverse
CONFIRMED = 3
CORES = 16  # per GPU, as on the machine of the rates


@dataclass(frozen=True)
class Shape:
    """A model of the family of Llama 3; ``measured`` of its blocks are timed."""

    name: str
    blocks: int
    measured: int
    width: int
    heads: int
    mlp: int
    bytes: float  # of the weights in bfloat16

    @property
    def layers(self) -> int:
        return self.blocks + 1


SHAPES = (
    Shape("1B", 16, 16, 2048, 32, 8192, 2.5e9),
    Shape("8B", 32, 32, 4096, 32, 14336, 16e9),
    Shape("70B", 80, 8, 8192, 64, 28672, 141e9),
)


def write_shape(folder: Path, shape: Shape) -> None:
    """Write a random model with the tokenizer of ``sweep_gpu``; its vocabulary is small, as no head is computed."""
    import torch
    from sweep_gpu import write_model
    from transformers import LlamaConfig, LlamaModel

    write_model(folder, blocks=1, width=64, dtype="bfloat16")
    config = LlamaConfig(
        vocab_size=4096, hidden_size=shape.width, num_hidden_layers=shape.measured, num_attention_heads=shape.heads,
        num_key_value_heads=8, intermediate_size=shape.mlp, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaModel(config)
    torch.set_default_dtype(before)
    model.save_pretrained(folder)


def embedding_rate(shape: Shape, folder: Path) -> dict[str, float]:
    """Return the seconds of all layers of the blocks that are timed, in memory and into the store."""
    from sweep_gpu import Ours, texts
    from timing import timed

    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.reading.batches import batches_of, tokens_that_fit
    from midlayer_encoders.sweeping.embedder import max_batch_texts

    write_shape(folder / "model", shape)
    encoder = LayerEncoder(str(folder / "model"), -1, device="cuda", dtype="bfloat16")
    inputs = texts(4096, 4, 24)  # about 25 tokens, as in the paper's tasks
    tokens = sum(map(len, encoder.tokenizer(inputs)["input_ids"]))
    layers = range(shape.measured + 1)
    budget = tokens_that_fit(encoder)
    batches = batches_of(
        encoder, inputs, token_budget=budget, max_texts=max_batch_texts(budget, len(layers), shape.width)
    )

    def compute() -> None:
        reader = encoder.vector_reader(layers)
        with closing(reader.passes(inputs, batches)) as passes:
            for passed in passes:
                passed.vectors()

    compute()
    ours = Ours(encoder, folder / "stores")
    ours(inputs[:1024])
    return {
        "texts": len(inputs),
        "tokens": tokens,
        "computed, s": min(timed(compute) for _ in range(3)),
        "stored in float32, s": min(timed(lambda: ours(inputs)) for _ in range(2)),
    }


def store_rates(folder: Path) -> dict[str, float]:
    """Return the bytes per second of the store, written (flushed to the disk) and read, with checksums."""
    from store import forget_cached

    from midlayer_encoders.sweeping.store import EmbeddingStore, text_key

    layers, width, batch, batches = 33, 4096, 256, 24
    store = EmbeddingStore(folder, key="rates", layers=range(layers), dim=width, dtype="float16")
    vectors = np.random.default_rng(0).standard_normal((layers, batch, width), dtype=np.float32).astype(np.float16)
    keys = [[text_key(f"{number} {row}") for row in range(batch)] for number in range(batches)]
    start = time.perf_counter()
    for each in keys:
        store.write(each, vectors, finite=True)
    written = vectors.nbytes * batches / (time.perf_counter() - start)
    forget_cached(folder)
    fresh = EmbeddingStore(folder, key="rates", layers=range(layers), dim=width, dtype="float16")
    names = [key for each in keys for key in each]
    start = time.perf_counter()
    for layer in range(8):
        fresh.read(layer, names)
    read = len(names) * 8 * width * 2 / (time.perf_counter() - start)
    return {"written": written, "read": read}


def scoring_rates(tasks: Path, width: int) -> dict[str, dict[str, Any]]:
    """Return the seconds of one layer of each task: all layers together on the GPU, and mteb on one core."""
    import torch
    from threadpoolctl import threadpool_limits

    from benchmarks.zoo.run import recorded_tasks
    from midlayer_encoders._isolation import isolated_random
    from midlayer_encoders.sweeping.mteb_jobs import StoredLayer, quiet_mteb
    from midlayer_encoders.sweeping.scoring import resampled_scores
    from midlayer_encoders.tasks.sources import task_sources

    found: dict[str, dict[str, Any]] = {}
    folders = sorted(path for path in tasks.iterdir() if path.is_dir())
    recorded = recorded_tasks(folders)
    for folder, (name, evaluation) in zip(folders, recorded.items(), strict=True):
        rows = len(evaluation.keys)
        vectors = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
        layers, device = range(4), torch.device("cuda")

        def read(_: int, keys: Sequence[str], vectors: Any = vectors) -> Any:
            return np.resize(vectors, (len(keys), vectors.shape[1]))

        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            resampled_scores(evaluation.scorer, evaluation.keys, layers, read, device=device)
            seconds.append((time.perf_counter() - start) / len(layers))
        store: Any = SimpleNamespace(read=read, dim=width)
        prompts: Any = SimpleNamespace(choose=lambda *_: "")
        encoder = StoredLayer(store, 0, "made/vectors", "1", prompts)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with isolated_random(), quiet_mteb(), threadpool_limits(1):
            task = task_sources(folder)[0].make()
            task.load_data()
            start = time.perf_counter()
            for split in task.eval_splits:
                task.evaluate(encoder, split, encode_kwargs={"batch_size": 1024, "show_progress_bar": False})
            by_mteb = time.perf_counter() - start
        torch.set_num_threads(threads)
        candidates = getattr(evaluation.scorer, "candidates", None)
        found[name] = {
            "kind": task.metadata.type, "rows": rows, "together": min(seconds), "mteb": by_mteb,
            "candidates": sum(map(len, candidates)) if candidates is not None else None,
        }  # fmt: skip
    return found


def k_means_rate(width: int) -> float:
    """Return the seconds of scikit-learn on one core for 1,000 rows, with the settings of mteb's older clusterings."""
    from sklearn.cluster import MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    rows = 10_000
    vectors = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
    with threadpool_limits(1):
        start = time.perf_counter()
        MiniBatchKMeans(n_clusters=40, batch_size=500, n_init="auto", random_state=0).fit(vectors)
    return (time.perf_counter() - start) / rows * 1000


def rates(tasks: Path) -> None:
    """Measure everything and write it after each step."""
    import torch

    measured: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def save(name: str, value: Any) -> None:
        measured[name] = value
        RATES.write_text(json.dumps(measured, indent=1) + "\n")
        print(name, json.dumps(value)[:300], flush=True)

    with tempfile.TemporaryDirectory() as name:
        save("store", store_rates(Path(name)))
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as name:
            save(f"embedding {shape.name}", embedding_rate(shape, Path(name)))
        torch.cuda.empty_cache()
        save(f"k-means {shape.name}", k_means_rate(shape.width))
        save(f"scoring {shape.name}", scoring_rates(tasks, shape.width))


@dataclass(frozen=True)
class Task:
    """What a task of the paper needs."""

    name: str
    kind: str
    texts: int  # distinct
    tokens: float
    rows: int  # that are clustered, classified, ranked or compared
    candidates: int
    together: bool  # all layers at once, or one by one with mteb


def paper_tasks() -> list[Task]:
    """Return the paper's tasks, from mteb's statistics of their English test splits."""
    import mteb

    from midlayer_encoders.sweeping.scoring.recording import scores_together
    from midlayer_encoders.tasks.sources import task_sources

    folder = Path(mteb.__file__).parent / "descriptive_stats"
    files = {path.stem: path for path in folder.rglob("*.json")}
    tasks = []
    for source in task_sources("paper"):
        task = source.make()
        texts = rows = candidates = 0
        characters = 0.0
        for split in task.eval_splits:
            statistics = json.loads(files[task.metadata.name].read_text())[split]
            subsets = statistics.get("hf_subset_descriptive_stats") or {}
            for of in [subsets[name] for name in task.hf_subsets if name in subsets] or [statistics]:
                columns = [value for name, value in of.items() if name.endswith("text_statistics") or "text1" in name]
                columns += [value for name, value in of.items() if "text2" in name]
                for column in filter(None, columns):
                    texts += column["unique_texts"]
                    characters += column["unique_texts"] * column["average_text_length"]
                rows += of["num_samples"]
                candidates += (of.get("top_ranked_statistics") or {}).get("num_top_ranked", 0)
        together = scores_together(task) is None
        tokens = characters / CHARACTERS_PER_TOKEN
        tasks.append(Task(task.metadata.name, task.metadata.type, texts, tokens, rows, candidates, together))
    return tasks


@dataclass(frozen=True)
class Cluster:
    """Machines of a sweep; ``stores`` disks of the measured speed take its vectors."""

    name: str
    gpus: int
    stores: int


CLUSTERS = (Cluster("one GPU", 1, 1), Cluster("one node of 8", 8, 1), Cluster("eight nodes", 64, 8))


def simulate(shape: Shape, cluster: Cluster, tasks: Sequence[Task], measured: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each stage of a sweep, task by task, as its processes share it.

    Texts are embedded while earlier batches are written; then every layer is read and scored; mteb's scores of single
    layers, which confirm others or replace them, run on the cores.
    """
    speed = measured[f"embedding {shape.name}"]
    per_token = speed["computed, s"] / speed["tokens"] * shape.blocks / shape.measured
    # The weights of 70B take a whole node: its GPUs hold consecutive blocks and take turns.
    processes = cluster.gpus if shape.bytes < 100e9 else max(cluster.gpus // 8, 1)
    rates = measured[f"scoring {shape.name}"].values()
    cores = CORES * cluster.gpus
    seconds = dict.fromkeys(("GPU", "store, written", "store, read", "scoring", "mteb"), 0.0)
    elapsed = 0.0
    for task in tasks:
        size = task.texts * shape.layers * shape.width * 2
        compute = task.tokens * per_token / processes
        write = size / (measured["store"]["written"] * cluster.stores)
        read = size / (measured["store"]["read"] * cluster.stores)
        alike = [rate for rate in rates if rate["kind"] == task.kind]
        together = np.mean([rate["together"] / rate["rows"] for rate in alike]) * task.texts if alike else 0
        if task.kind == "Clustering":
            by_mteb = measured[f"k-means {shape.name}"] * task.rows / 1000
        elif task.candidates:
            by_mteb = np.mean([rate["mteb"] / rate["candidates"] for rate in alike]) * task.candidates
        else:
            by_mteb = np.mean([rate["mteb"] / rate["rows"] for rate in alike]) * task.texts
        jobs = CONFIRMED if task.together else shape.layers
        scoring = together * math.ceil(shape.layers / processes) if task.together else 0.0
        mteb = by_mteb * math.ceil(jobs / cores)
        for name, value in zip(seconds, (compute, write, read, scoring, mteb), strict=True):
            seconds[name] += float(value)
        elapsed += max(compute, write) + max(read, scoring) + mteb
    return {**seconds, "elapsed": elapsed}


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def estimate() -> None:
    """Write the table."""
    measured = json.loads(RATES.read_text())
    tasks = paper_tasks()
    left_out = next(task for task in tasks if task.name == "MindSmallReranking")  # mteb ranks its candidates in Python
    rest = [task for task in tasks if task is not left_out]
    ranked = [rate for rate in measured["scoring 1B"].values() if rate["candidates"]]
    alone_for = np.mean([rate["mteb"] / rate["candidates"] for rate in ranked]) * left_out.candidates
    texts, tokens = sum(task.texts for task in rest), sum(task.tokens for task in rest)
    alone = [task for task in rest if not task.together]
    lines = [
        "# Larger runs, estimated",
        "",
        f"`python benchmarks/scale.py estimate`, from rates measured on one {measured['device']} with {CORES} cores "
        "([scale_rates.json](scale_rates.json)): no run of this size was made. The paper's tasks without "
        f"{left_out.name} (mteb ranks its {left_out.candidates / 1e6:.0f} million candidates: "
        f"{duration(float(alone_for))} for each layer at the rate of a small task): "
        f"{texts / 1e6:.2f} million distinct texts, "
        f"{tokens / 1e6:.1f} million tokens at {CHARACTERS_PER_TOKEN} characters each. "
        f"{len(alone)} clustering tasks of mteb's older kind are scored by mteb, layer by layer.",
        "",
        "| model | machines | whole sweep | GPU | store, written | store, read | scoring | mteb | slowest stage "
        "| store in float16 | written to keep the GPUs busy |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        for cluster in CLUSTERS:
            size = texts * shape.layers * shape.width * 2
            if shape.bytes > 100e9 and cluster.gpus == 1:
                lines.append(
                    f"| {shape.name} | {cluster.name} | weights do not fit ({shape.bytes / 1e9:.0f} GB) "
                    f"| | | | | | | {size / 1e9:,.0f} GB | |"
                )
                continue
            found = simulate(shape, cluster, rest, measured)
            elapsed = found.pop("elapsed")
            slowest = max(found, key=lambda name: found[name])
            cells = " | ".join(duration(value) for value in found.values())
            busy = size / found["GPU"] / 1e9
            lines.append(
                f"| {shape.name} | {cluster.name} | {duration(elapsed)} | {cells} | {slowest} | {size / 1e9:,.0f} GB "
                f"| {busy:.1f} GB/s |"
            )
    (RESULTS / "scale.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    """Measure rates, or estimate from them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["rates", "estimate"])
    parser.add_argument("--tasks", type=Path, help="folder with a folder for each task, for the rates")
    given = parser.parse_args()
    if given.part == "rates":
        rates(given.tasks)
    else:
        estimate()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    main()
