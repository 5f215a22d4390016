"""Parallel logistic regressions match scikit-learn's one by one."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from midlayer_encoders.sweeping.scoring.classification import ClassifierData, Classifiers, logistic_regressions


def examples(count: int, size: int, dim: int, classes: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return rows ``(P, S, D)`` around a center for each class, far from the origin, and their labels."""
    generator = torch.Generator().manual_seed(size)
    labels = (torch.arange(size) % classes).repeat(count, 1)
    centers = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, size, dim, generator=generator, dtype=torch.float64)
    return scale * (centers[labels] / 2 + noise + 2), labels


def of_sklearn(rows: Tensor, labels: Tensor, **options: float) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it did not converge
        model = LogisticRegression(**options).fit(rows.numpy(), labels.numpy())
    return torch.from_numpy(model.coef_).mT, torch.from_numpy(model.intercept_)


@pytest.mark.parametrize(("size", "dim", "classes"), [(48, 20, 6), (40, 128, 5), (30, 64, 2), (24, 10, 2), (9, 9, 3)])
def test_solution_matches_scikit_learn_with_default_settings(size: int, dim: int, classes: int) -> None:
    rows, labels = examples(4, size, dim, classes)
    weights, bias = logistic_regressions(rows, labels, classes=classes, max_iterations=30, tolerance=1e-4)
    for problem in range(4):
        expected = of_sklearn(rows[problem], labels[problem], max_iter=30, tol=1e-4)
        torch.testing.assert_close((weights[problem], bias[problem]), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("size", "dim", "classes"), [(24, 8, 3), (16, 32, 2), (12, 40, 3)])
@pytest.mark.parametrize("strength", [1.0, 0.1])
def test_converged_solution_matches_scikit_learn(size: int, dim: int, classes: int, strength: float) -> None:
    rows, labels = examples(2, size, dim, classes)
    options = {"max_iterations": 2000, "tolerance": 1e-8, "strength": strength}
    weights, _ = logistic_regressions(rows, labels, classes=classes, **options)  # type: ignore[arg-type]
    for problem in range(2):
        expected, _ = of_sklearn(rows[problem], labels[problem], max_iter=2000, tol=1e-8, C=strength)
        torch.testing.assert_close(weights[problem], expected, rtol=1e-3, atol=1e-4)


def test_identical_zero_and_repeated_rows_are_handled() -> None:
    rows, labels = examples(3, 12, 40, 3)
    rows[0], rows[1] = 1.5, 0
    rows[2, 6:] = rows[2, :6]
    weights, bias = logistic_regressions(rows, labels, classes=3, max_iterations=100, tolerance=1e-4)
    for problem in range(3):
        expected = of_sklearn(rows[problem], labels[problem])
        torch.testing.assert_close((weights[problem], bias[problem]), expected, rtol=0, atol=1e-5)


def test_experiments_of_other_classes_are_trained_separately() -> None:
    rows, labels = examples(1, 48, 6, 3)
    labels = labels[0]
    test = torch.arange(24, 48)
    experiments = []
    for left_out in (2, 0):  # as many examples of as many classes, but others
        train = torch.arange(24)[labels[:24] != left_out]
        experiments.append(ClassifierData(train, labels[train], test, labels[test]))
    both = Classifiers(tuple(experiments)).bootstrap(rows)[0]
    alone = [Classifiers((experiment,)).bootstrap(rows)[0] for experiment in experiments]
    torch.testing.assert_close(both, torch.stack(alone).mean(dim=0))


@pytest.mark.slow
def test_experiments_of_different_sizes_and_classes_match_single_ones() -> None:
    rows, labels = examples(1, 60, 16, 4)
    vectors, labels = torch.cat([rows, rows.sin()]).float(), labels[0]
    half = torch.arange(30)
    three = half[labels[half] != 3]
    test = torch.arange(30, 60)
    experiments = [
        ClassifierData(chosen, labels[chosen], test, labels[test]) for chosen in (half, three, half.flip(0), half[:20])
    ]
    actual = Classifiers(tuple(experiments)).bootstrap(vectors)[0]
    expected = []
    for layer in vectors:
        right = []
        for experiment in experiments:
            weights, bias = of_sklearn(layer[experiment.train].double(), experiment.train_labels)
            chosen = experiment.train_labels.unique()[(layer[experiment.test].double() @ weights + bias).argmax(dim=1)]
            right.append((chosen == experiment.test_labels).double().mean().item())
        expected.append(np.mean(right))
    assert actual.tolist() == pytest.approx(expected, abs=1e-9)
    assert len({round(value, 6) for value in expected}) == 2
    # Measures other than accuracy are computed from labels and predictions.
    share = Classifiers(tuple(experiments), measure=lambda required, actual: float((required == actual).mean()))
    assert share.bootstrap(vectors)[0].tolist() == pytest.approx(expected, abs=1e-9)
