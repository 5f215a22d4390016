import pytest
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics.label_accuracy import _PENALTIES, all_alike, label_folds, resampled_means, ridge_correct


def clusters(n: int, d: int, *, spread: float, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, d, generator=generator, dtype=torch.float64)
    return centres[labels] + spread * torch.randn(n, d, generator=generator, dtype=torch.float64), labels


def solved(rows: Tensor, targets: Tensor, penalty: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean row, the mean target and the weights from the normal equations."""
    centre, level = rows.mean(dim=0), targets.mean(dim=0)
    rows, targets = rows - centre, targets - level
    eye = torch.eye(rows.shape[1], dtype=rows.dtype)
    return centre, level, torch.linalg.solve(rows.T @ rows + penalty * eye, rows.T @ targets)


def ridge_by_definition(rows: Tensor, labels: Tensor, folds: int, seed: int) -> Tensor:
    """Leave out each fold once; choose each penalty by leave-one-out on the rest."""
    rows = rows / rows.norm(dim=1, keepdim=True)
    targets = torch.eye(int(labels.max()) + 1, dtype=rows.dtype)[labels]
    right = torch.zeros(len(rows), dtype=torch.bool)
    fold = label_folds(labels, folds=folds, seed=seed)
    for left_out in range(folds):
        known_values = (fold != left_out).nonzero().flatten()
        scale = (rows[known_values] - rows[known_values].mean(dim=0)).square().sum() / len(known_values)
        errors = []
        for penalty in _PENALTIES:
            error = 0.0
            for item in known_values:
                remaining = known_values[known_values != item]
                centre, level, weights = solved(rows[remaining], targets[remaining], penalty * float(scale))
                error += float(((rows[item] - centre) @ weights + level - targets[item]).square().sum())
            errors.append(error)
        penalty = _PENALTIES[errors.index(min(errors))]
        centre, level, weights = solved(rows[known_values], targets[known_values], penalty * float(scale))
        for item in (fold == left_out).nonzero().flatten():
            right[item] = ((rows[item] - centre) @ weights + level).argmax() == labels[item]
    return right


@pytest.mark.parametrize(("n", "d"), [(24, 5), (24, 40)])
def test_every_layer_matches_the_definition(n: int, d: int) -> None:
    result = [clusters(n, d, spread=spread) for spread in (0.5, 2.0)]
    labels = result[0][1]
    expected = torch.stack([ridge_by_definition(rows, labels, 3, 1) for rows, _ in result])
    actual = ridge_correct(torch.stack([rows for rows, _ in result]), labels, folds=3, seed=1)
    assert torch.equal(actual, expected)
    assert not expected[1].all(), "the hard layer is hard"


def test_separable_labels_are_predicted_and_noise_is_at_chance() -> None:
    easy, labels = clusters(200, 20, spread=0.1)
    noise = torch.randn(200, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    accuracy = ridge_correct(torch.stack([easy, noise]), labels).double().mean(dim=1)
    assert accuracy[0] == 1
    assert 0.1 < accuracy[1] < 0.4, "a quarter by chance"


def test_scale_rotation_and_label_names_do_not_matter() -> None:
    rows, labels = clusters(40, 8, spread=1.0)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0]
    names = torch.tensor([7, -3, 100, 5])
    expected = ridge_correct(rows[None], labels)
    assert torch.equal(ridge_correct(1000 * rows[None] @ rotation, labels), expected)
    assert torch.equal(ridge_correct(rows[None].float(), labels), expected)
    fold = label_folds(labels)
    assert torch.equal(label_folds(labels + 50), fold), "the order of the classes deals the folds, not their names"
    assert torch.equal(ridge_correct(rows[None], names.sort().values[labels]), expected)


def test_constant_vectors_do_not_fail() -> None:
    labels = torch.arange(20) % 2
    assert ridge_correct(torch.ones(1, 20, 3), labels).shape == (1, 20)
    assert ridge_correct(torch.zeros(1, 20, 3), labels).shape == (1, 20)


def test_folds_are_balanced_in_each_class_and_follow_the_seed() -> None:
    labels = torch.tensor([0] * 10 + [1] * 7 + [2] * 3)
    fold = label_folds(labels, folds=5, seed=3)
    for name, size in ((0, 10), (1, 7), (2, 3)):
        counts = torch.bincount(fold[labels == name], minlength=5)
        assert counts.sum() == size
        assert counts.max() - counts.min() <= 1
    assert torch.equal(fold, label_folds(labels, folds=5, seed=3))
    assert not torch.equal(fold, label_folds(labels, folds=5, seed=4))


def test_resampled_means_are_the_bootstrap_of_a_mean() -> None:
    right = torch.arange(400).reshape(1, 400) % 4 == 0
    means = resampled_means(torch.cat([right, ~right]), resamples=4000)
    assert means.shape == (4000, 2)
    torch.testing.assert_close(means.sum(dim=1), torch.ones(4000, dtype=torch.float64))  # the same texts for both
    assert float(means[:, 0].mean()) == pytest.approx(0.25, abs=0.002)
    assert float(means[:, 0].std()) == pytest.approx((0.25 * 0.75 / 400) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            torch.zeros(20, dtype=torch.int64),
            "2 classes or more with at least 2 texts each, but 20 labels have 1 such class:",
        ),
        (torch.tensor([0] * 19 + [1]), "but 20 labels have 1 such class: label more"),
        (torch.arange(8) % 2, "at least 10 for 5 folds, but there are 8"),
        (torch.rand(20), "one integer per text"),
    ],
)
def test_labels_that_cannot_be_cross_validated_are_refused(labels: Tensor, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ridge_correct(torch.ones(1, len(labels), 3), labels)


def test_invalid_shapes_and_folds_are_refused() -> None:
    labels = torch.arange(20) % 2
    with pytest.raises(OptionError, match=r"`vectors` must be \(L, N, D\)"):
        ridge_correct(torch.ones(20, 3), labels)
    with pytest.raises(OptionError, match="`folds` must be a whole number, 2 or more, but got 1"):
        ridge_correct(torch.ones(1, 20, 3), labels, folds=1)


def test_all_alike_of_zeros_is_true_and_of_one_other_row_false() -> None:
    vectors = torch.zeros(2, 3, 4)
    vectors[1, 2, 0] = 1e-3
    assert all_alike(vectors, ["a", "b", "c"]).tolist() == [True, False]
