from __future__ import annotations

import pytest
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import NeighborOverlap, neighbor_overlap
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import cosine, random_rotation, random_rows


def overlap_by_definition(first: Tensor, second: Tensor, k: int) -> Tensor:
    """The mean share of each text's k nearest neighbors that both sets have in common."""

    def nearest(rows: Tensor, i: int) -> set[int]:
        def far(j: int) -> float:
            return -cosine(rows[i], rows[j])

        return set(sorted((j for j in range(len(rows)) if j != i), key=far)[:k])

    shares = [len(nearest(first, i) & nearest(second, i)) / k for i in range(len(first))]
    return torch.tensor(sum(shares) / len(shares), dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_function_and_class_match_the_definition(k: int) -> None:
    texts = corpus(texts=20)
    pairs = [(texts.pooled[0], texts.pooled[1]), (texts.pooled[1], texts.pooled[2])]
    expected = torch.stack([overlap_by_definition(*pair, k) for pair in pairs])
    values = torch.stack([neighbor_overlap(*pair, k=k) for pair in pairs])
    torch.testing.assert_close(values, expected)
    by_class = value("neighbor_overlap", texts, torch.arange(20).split(7), k=k)
    assert by_class[0].isnan()
    torch.testing.assert_close(by_class[1:], expected)


def test_known_values() -> None:
    rows = random_rows(12, 4)
    assert neighbor_overlap(rows, rows) == 1.0
    assert neighbor_overlap(rows, random_rows(12, 7, 1), k=11) == 1.0
    clusters = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    assert neighbor_overlap(clusters, clusters[[0, 2, 1, 3]], k=1) == 0.0


def test_unrelated_vectors_overlap_at_chance() -> None:
    overlap = neighbor_overlap(random_rows(400, 10), random_rows(400, 10, 1), k=10)
    assert float(overlap) == pytest.approx(10 / 399, abs=0.01)


def test_scale_and_rotation_do_not_matter() -> None:
    first, second = random_rows(15, 4), random_rows(15, 4) + random_rows(15, 4, 1)
    stretched = first * torch.arange(1.0, 16.0)[:, None]
    transformed = 3 * first @ random_rotation(4)
    assert neighbor_overlap(transformed, second, k=3) == neighbor_overlap(first, second, k=3)
    assert neighbor_overlap(stretched, first, k=3) == 1.0


def test_equidistant_texts_are_taken_in_order() -> None:
    same = torch.ones(8, 3)
    assert neighbor_overlap(same, same, k=2) == 1.0


def test_invalid_input_is_refused() -> None:
    with pytest.raises(OptionError, match="N of 11 or more"):
        neighbor_overlap(torch.ones(10, 3), torch.ones(10, 3))
    with pytest.raises(OptionError, match="`k` must be a whole number, 1 or more"):
        NeighborOverlap([0], k=0)
