"""Time the scoring of all layers together at the size of a large model: six real tasks, 25 layers of 1024 dimensions.

``python -m benchmarks.scoring_made TASKS [--device cuda] [--check 2]``. The vectors are made, one random projection of the words of a
text for each layer with a common offset, so that no model is needed; they are read from memory, so that no disk is timed.
``--check`` also scores some layers on the CPU, ``--mteb`` by mteb's own evaluators, and the largest differences are printed. On a CPU that
others use, ``OMP_NUM_THREADS=1 … --workers 1`` gives seconds of the processor, which load changes least.
"""

from __future__ import annotations

import argparse
import time
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.sweeping.scoring import resampled_scores
from midlayer_encoders.tasks.sources import task_sources

WORDS = 1 << 15


def made(texts: Sequence[str], layers: int, dim: int, device: torch.device) -> np.ndarray[Any, Any]:
    """Return vectors ``(L, N, D)`` that are alike where texts share words."""
    rows, columns = [], []
    for row, text in enumerate(texts):
        words = {zlib.crc32(word.encode()) % WORDS for word in text.lower().split()}
        rows += [row] * len(words)
        columns += sorted(words)
    index = torch.tensor([rows, columns])
    bag = torch.sparse_coo_tensor(index, torch.ones(len(rows)), (len(texts), WORDS)).to(device).coalesce()
    found = np.empty((layers, len(texts), dim), dtype=np.float32)
    for layer in range(layers):
        generator = torch.Generator().manual_seed(layer)
        words = torch.randn(WORDS, dim, generator=generator).to(device)
        offset = 4 * torch.randn(dim, generator=generator).to(device)
        vectors = torch.sparse.mm(bag, words)
        noise = torch.randn(vectors.shape, device=device, generator=torch.Generator(device).manual_seed(layer))
        found[layer] = (vectors + offset + layer / layers * noise).cpu().numpy()
    return found


def by_mteb(source: Any, places: dict[str, int], rows: Any) -> float:
    """Return the main score of one layer by mteb."""
    warnings.simplefilter("ignore")
    import mteb
    from mteb.models.model_meta import ModelMeta, ScoringFunction
    from sentence_transformers.util import SimilarityFunction

    class Layer:
        similarity = staticmethod(SimilarityFunction.to_similarity_fn("cosine"))
        similarity_pairwise = staticmethod(SimilarityFunction.to_similarity_pairwise_fn("cosine"))
        mteb_model_meta = ModelMeta.create_empty(
            overwrites={"name": "made/made", "revision": "1", "modalities": ["text"], "framework": ["PyTorch"],
                        "similarity_fn_name": ScoringFunction.COSINE}
        )  # fmt: skip

        def encode(self, inputs: Any, **_: Any) -> Any:
            return np.asarray(rows[[places[text] for batch in inputs for text in batch["text"]]])

    result = mteb.evaluate(Layer(), source.make(), cache=None, show_progress_bar=False, co2_tracker=False)
    return float(result[0].get_score())


def print_against_mteb(sources: Any, kept: Any, layers: list[int], workers: int) -> None:
    start, processor = time.perf_counter(), time.process_time()
    jobs = [(source, source.name.rpartition("-")[0], layer) for source in sources for layer in layers]
    with joblib.parallel_config(backend="loky", n_jobs=min(workers, len(jobs)), inner_max_num_threads=1):
        scores = joblib.Parallel(n_jobs=1 if workers == 1 else None)(
            joblib.delayed(by_mteb)(source, kept[name][0], kept[name][1][layer]) for source, name, layer in jobs
        )
    took = f"{time.perf_counter() - start:.1f} s, {time.process_time() - processor:.1f} s of this process's processor"
    print(f"\nmteb, {len(layers)} layers in {workers} processes: {took}\n")
    print("| task | largest difference to mteb, points | mean of its size | mteb's scores |\n|---|---|---|---|")
    for source in sources:
        name = source.name.rpartition("-")[0]
        pairs = [
            (kept[name][2][layer], score) for (_, task, layer), score in zip(jobs, scores, strict=True) if task == name
        ]
        apart = [100 * (ours - theirs) for ours, theirs in pairs]
        shown = ", ".join(f"{100 * theirs:.1f}" for _, theirs in pairs)
        largest = max(apart, key=abs)
        print(f"| {name} | {largest:+.5f} | {np.abs(apart).mean():.5f} | {shown} |", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", help="a folder of folders, or builtin")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--mteb", type=int, default=0)
    parser.add_argument("--workers", type=int, default=joblib.cpu_count())
    given = parser.parse_args()
    device, total, processor = torch.device(given.device), 0.0, 0.0
    builtin = given.tasks == "builtin"
    sources = task_sources("builtin" if builtin else sorted(x for x in Path(given.tasks).iterdir() if x.is_dir()))
    from midlayer_encoders.sweeping.scoring.recording import record

    def keys(inputs: Any, **_: Any) -> list[str]:
        return [text for batch in inputs for text in batch["text"]]

    kept: dict[str, tuple[dict[str, int], Any, dict[int, float]]] = {}
    print("| task | rows | recording, s | scoring, s | largest difference to the CPU, points |\n|---|---|---|---|---|")
    for source in sources:
        start, before = time.perf_counter(), time.process_time()
        with isolated_random():
            asked = record(source.make(), keys)[0]
        recording = time.perf_counter() - start
        processor += time.process_time() - before
        vectors = made(asked.keys, given.layers, given.dim, device)
        layers = list(range(given.layers))
        if device.type == "cuda":
            torch.cuda.synchronize()
        start, before = time.perf_counter(), time.process_time()
        values = resampled_scores(
            asked.scorer, asked.keys, layers, lambda layer, _, of=vectors: of[layer], device=device
        )
        found = {layer: score for layer, (score, *_) in values.items()}
        seconds = time.perf_counter() - start
        total += seconds + recording
        processor += time.process_time() - before
        cpu = resampled_scores(
            asked.scorer, asked.keys, layers[:: max(given.layers // given.check, 1)][: given.check],
            lambda layer, _, of=vectors: of[layer], device=torch.device("cpu"),
        ) if given.check else {}  # fmt: skip
        apart = max((100 * abs(found[layer] - value) for layer, (value, *_) in cpu.items()), default=float("nan"))
        name = source.name.rpartition("-")[0]
        kept[name] = {key: row for row, key in enumerate(asked.keys)}, vectors, found
        print(f"| {name} | {len(asked.keys)} | {recording:.2f} | {seconds:.2f} | {apart:.5f} |", flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0
    print(f"\nIn all {total:.1f} s, {processor:.1f} s of the processor; peak device memory {peak:.1f} GiB.", flush=True)
    if given.mteb:
        print_against_mteb(sources, kept, list(range(0, given.layers, -(-given.layers // given.mteb))), given.workers)


if __name__ == "__main__":
    main()
