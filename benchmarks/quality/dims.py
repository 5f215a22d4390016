"""Score all-MiniLM-L6-v2 by layer, dimensions and precision on real tasks, and compare with mteb's own scores.

mteb scores ``SentenceTransformer`` vectors, truncated by sentence-transformers and quantized by its ``CompressionWrapper``.
Needs the tasks at ``MIDLAYER_DATA/tasks``; writes ``benchmarks/results/dims.{md,csv}``.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mteb
import polars as pl
import torch
from mteb.models import CompressionWrapper, SentenceTransformerEncoderWrapper
from mteb.types import OutputDType
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import truncate_embeddings

from benchmarks.data import RESULTS, data_root
from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.models.hub import BUILT_IN_MINILM
from midlayer_encoders.sweeping.compression import vector_bytes
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.task_data import task_label

DATA = data_root() / "tasks"
DIMS = [256, 128, 64, 32]
PRECISIONS = ["float32", "int8", "binary"]
COMPARED = (4, 6)  # layers that mteb scores, too


def write_retrieval(folder: Path) -> Path:
    """Write TrecQA as a search of all its passages, in BEIR's layout."""
    lines = [
        line for name in ("dev", "test") for line in (DATA / f"TrecQAReranking/{name}.jsonl").read_text().splitlines()
    ]
    rows = [json.loads(line) for line in lines]
    passages = {text: f"d{number}" for number, text in enumerate(dict.fromkeys(
        text for row in rows for text in (*row["positive"], *row["negative"])
    ))}  # fmt: skip
    (folder / "qrels").mkdir(parents=True)
    queries = {row["query"]: f"q{number}" for number, row in enumerate(rows)}
    for name, texts in {"corpus": passages, "queries": queries}.items():
        lines = [json.dumps({"_id": key, "text": text}) for text, key in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf8")
    qrels = [f"{queries[row['query']]}\t{passages[text]}\t1" for row in rows for text in row["positive"]]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *qrels]), encoding="utf8")
    return folder


class Reference(SentenceTransformer):
    """A plain folder that encodes each text once, and truncates copies of its vectors."""

    memory: dict[str, torch.Tensor]
    dims: int

    def encode(self, inputs: Any, *_: Any, **__: Any) -> Any:
        missing = list(dict.fromkeys(text for text in inputs if text not in self.memory))
        if missing:
            vectors = super().encode(missing, convert_to_tensor=True, show_progress_bar=False, batch_size=64)
            self.memory |= dict(zip(missing, vectors.cpu(), strict=True))
        return truncate_embeddings(torch.stack([self.memory[text] for text in inputs]), self.dims).numpy()


def mteb_scores(folder: Path, layer: int, tasks: list[Path], width: int) -> list[dict[str, Any]]:
    """Return mteb's score of each task, number of dimensions and precision at a layer."""
    LayerEncoder(BUILT_IN_MINILM, layer, device="cpu").save_pretrained(str(folder))
    model = Reference(str(folder), device="cpu")
    model.memory = {}
    rows = []
    for dims in (width, *DIMS):
        model.dims = dims
        for precision in PRECISIONS:
            wrapped: Any = SentenceTransformerEncoderWrapper(model)
            if precision != "float32":
                wrapped = CompressionWrapper(wrapped, OutputDType(precision))
            for task in tasks:
                with isolated_random():
                    source = task_sources(task)[0]
                    result = mteb.evaluate(wrapped, source.make(), cache=None, show_progress_bar=False)
                value = float(result[0].get_score())
                rows.append(
                    {"dataset": source.name, "layer": layer, "dims": dims, "precision": precision, "mteb": value}
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/dims"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as root:
        tasks = [DATA / "STSBenchmark", DATA / "TwitterURLCorpus", write_retrieval(Path(root) / "TrecQARetrieval")]
        encoder = LayerEncoder(BUILT_IN_MINILM, -1, device="cpu")
        result = sweep(encoder, tasks, dims=DIMS, precisions=["int8", "binary"], baselines=False, out=args.out)
        width = int(encoder.get_embedding_dimension() or 0)
        rows = [row for layer in COMPARED for row in mteb_scores(Path(root) / str(layer), layer, tasks, width)]
    schema = {"layer": pl.Int64, "dims": pl.Int64}
    keys = ["dataset", "layer", "dims", "precision"]
    frame = result.scores.select(*keys, "value").join(
        pl.DataFrame(rows, schema_overrides=schema), on=keys, how="left", maintain_order="left"
    )
    names = {name: task_label(name) for name in frame["dataset"].unique()}
    frame = frame.with_columns(pl.col("dataset").replace(names), pl.col("value", "mteb").mul(100).round(4))
    frame.write_csv(RESULTS / "dims.csv")
    (RESULTS / "dims.md").write_text(page(frame, width), encoding="utf8")
    print((RESULTS / "dims.md").read_text())


def page(frame: pl.DataFrame, width: int) -> str:
    """Return the tables of scores and of differences."""
    compared = frame.drop_nulls("mteb").with_columns(difference=(pl.col("value") - pl.col("mteb")).abs())
    most = {name: f"{value:.4f}" for name, value in compared.group_by("dataset").agg(pl.col("difference").max()).rows()}
    names = frame["dataset"].unique(maintain_order=True).to_list()
    means = frame.group_by("layer", "dims", "precision", maintain_order=True).agg(pl.col("value").mean())
    packages = ", ".join(f"{name} {version(name)}" for name in ("sentence-transformers", "mteb"))
    lines = [
        "# Layers, dimensions and precisions of all-MiniLM-L6-v2",
        "",
        f"How many points smaller vectors cost. `python benchmarks/quality/dims.py`, Python {platform.python_version()}, torch",
        f"{torch.__version__}, {packages}:",
        "one pass over the texts of three tasks, then every layer at every number of dimensions and precision from stored",
        "vectors. Main score x 100 at the last layer, 6; `best` is the layer with the highest mean, and that mean.",
        "TrecQARetrieval searches all passages of TrecQA's questions. The model was not trained for truncated vectors.",
        "`dims.csv` contains every layer.",
        "",
        "| dims | precision | bytes | " + " | ".join([*names, "mean", "best"]) + " |",
        "|---|---|---|" + "---|" * (len(names) + 2),
    ]
    for dims in (width, *DIMS):
        for precision in PRECISIONS:
            rows = frame.filter(layer=6, dims=dims, precision=precision)
            values = [rows.filter(dataset=name)["value"].item() for name in names]
            best = means.filter(dims=dims, precision=precision).sort("value", descending=True).row(0, named=True)
            cells = [*values, sum(values) / len(values)]
            head = f"| {dims} | {precision} | {vector_bytes(dims, precision)} | "
            lines.append(
                head + " | ".join(f"{value:.2f}" for value in cells) + f" | {best['layer']}: {best['value']:.2f} |"
            )
    lines += [
        "",
        f"The largest difference from mteb's own scores, in points, over {len(compared)} scores: those of layers "
        f"{' and '.join(map(str, COMPARED))} as",
        "plain folders, whose vectors sentence-transformers truncates and mteb's `CompressionWrapper` quantizes.",
        "",
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
        "| " + " | ".join(most[name] for name in names) + " |",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
