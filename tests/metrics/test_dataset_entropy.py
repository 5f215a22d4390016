from __future__ import annotations

import math

import pytest
import torch

from midlayer_encoders.metrics import Normalization, dataset_entropy
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import entropy_by_definition, random_rotation, random_rows


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("texts", "width"), [(4, 9), (13, 5)])
def test_function_and_class_match_the_definition(texts: int, width: int, alpha: float) -> None:
    sample = corpus(texts=texts, width=width)
    expected = torch.stack([entropy_by_definition(layer, alpha) for layer in sample.pooled])
    torch.testing.assert_close(torch.stack([dataset_entropy(layer, alpha) for layer in sample.pooled]), expected)
    torch.testing.assert_close(value("dataset_entropy", sample, torch.arange(texts).split(3), alpha=alpha), expected)


@pytest.mark.parametrize(("texts", "width"), [(4, 9), (13, 5)])
def test_unit_length_comes_before_centering(texts: int, width: int) -> None:
    sample = corpus(texts=texts, width=width)
    rows = torch.stack([row / row.norm() for row in sample.pooled[0]])
    torch.testing.assert_close(dataset_entropy(sample.pooled[0], unit=True), entropy_by_definition(rows))
    expected = entropy_by_definition(rows - rows.mean(dim=0))
    torch.testing.assert_close(dataset_entropy(sample.pooled[0], unit=True, center=True), expected)
    torch.testing.assert_close(value("dataset_entropy", sample, unit=True, center=True)[0], expected)


@pytest.mark.parametrize("normalization", ["maxEntropy", "logN", "logD", "logNlogD"])
def test_normalizations(normalization: Normalization) -> None:
    sample = corpus()
    n, d = math.log(13), math.log(5)
    divisor = {"maxEntropy": d, "logN": n, "logD": d, "logNlogD": n * d}[normalization]
    expected = entropy_by_definition(sample.pooled[0]) / divisor
    torch.testing.assert_close(dataset_entropy(sample.pooled[0], normalization=normalization), expected)
    torch.testing.assert_close(value("dataset_entropy", sample, normalization=normalization)[0], expected)


def test_known_values() -> None:
    torch.testing.assert_close(dataset_entropy(torch.eye(6)), torch.tensor(math.log(6)))
    assert dataset_entropy(torch.ones(6, 3)) == pytest.approx(0.0, abs=1e-6)
    assert dataset_entropy(random_rows(1, 4)) == pytest.approx(0.0, abs=1e-12)
    assert dataset_entropy(0.1 * torch.ones(6, 3), center=True) == 0.0


def test_scale_and_rotation_do_not_matter() -> None:
    rows = random_rows(9, 4)
    torch.testing.assert_close(dataset_entropy(5 * rows @ random_rotation(4)), dataset_entropy(rows))
