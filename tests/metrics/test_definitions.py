"""Every metric: function and class match the definition for every option, known values, and what does not matter."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midlayer_encoders import metrics as of
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import METRICS, TooFewTextsError
from tests.metrics import oracles
from tests.metrics.feeding import OPTIONS, Corpus, corpus, make, value
from tests.metrics.oracles import random_rotation, random_rows
from tests.metrics.test_layer_metric import FIRST_IS_NAN, ROWS

ENTROPY = [{"alpha": alpha} for alpha in (0.5, 2.0, 3.0)]
ENTROPY += [{"normalization": name} for name in ("maxEntropy", "logN", "logD", "logNlogD")]
BOTH = {"center": True, "unit": True}
METHODS = [{"method": method} for method in ("auto", "exact", "fast")]
CASES: dict[str, list[dict[str, Any]]] = {
    "prompt_entropy": [*ENTROPY, {"center": False}, {"unit": False}, {"center": False, "unit": False}, *METHODS],
    "dataset_entropy": [*ENTROPY, {"center": True}, {"unit": True}, BOTH, BOTH | {"normalization": "logD"}, *METHODS],
    "effective_rank": [{"center": True}, {"unit": True}, BOTH, {"epsilon": 0.1}, *METHODS],
    "curvature": [{"step": 2}, {"step": 3}],
    "infonce": [{"temperature": 0.7}],
    "lidar": [{"delta": 0.1}, {"exponential": True}, *METHODS],
    "dime": [{"alpha": 2.0}, {"permutations": 3}, {"seed": 4}, {"unit": False}, *METHODS],
    "matrix_entropy": [*ENTROPY, *METHODS],
    "prompt_effective_rank": [{"center": True}, {"unit": True}, BOTH, *METHODS],
    "anisotropy": [],
    "intrinsic_dimension": [{"discard": 0.0}, {"discard": 0.5}],
    "alpha_req": [{"first": 2, "last": 4}, {"last": 4}, {"first": 3}, {"weighted": False}, {"center": False}, *METHODS],
    "logdet_entropy": [{"epsilon": 1.0}, {"center": True}, {"unit": False}, {"center": True, "unit": False}, *METHODS],
    "first_token_share": [],
    "cka": [{"unbiased": True}],
    "block_influence": [],
    "neighbor_overlap": [{"k": 1}, {"k": 5}],
    "half_match": [{"center": False}],
    "alignment": [{"center": False}],
    "uniformity": [{"t": 0.5}, {"center": False}],
}
"""Options of each metric, all different from its defaults but for the method."""


def halves(text: Tensor) -> tuple[Tensor, Tensor]:
    middle = len(text) // 2
    return text[:middle].mean(dim=0), text[middle:].mean(dim=0)


def of_one_layer(function: Callable[..., Tensor], name: str, texts: Corpus, row: int, **options: Any) -> Tensor:
    """Return a function's value for one layer: for each text without padding, all tokens, or all texts."""
    match name:
        case "prompt_entropy" | "curvature" | "prompt_effective_rank" | "first_token_share":
            return torch.stack([function(text, **options) for text in texts.texts[row]]).nanmean()
        case "matrix_entropy":
            return function(torch.cat(texts.texts[row]), **options)
        case "block_influence":
            pairs = zip(texts.texts[row - 1], texts.texts[row], strict=True)
            return torch.stack([function(*pair) for pair in pairs]).mean()
        case "half_match":
            first, second = zip(*[halves(text) for text in texts.texts[row] if len(text) >= 4], strict=True)
            return function(torch.stack(first), torch.stack(second), **options)
        case "cka" | "neighbor_overlap":
            return function(texts.pooled[row - 1], texts.pooled[row], **options)
        case "lidar":
            return function(texts.views[row, : options.pop("views")], **options)
        case "infonce" | "dime" | "alignment":
            return function(texts.views[row, 0], texts.views[row, 1], **options)
    return function(texts.pooled[row], **options)


def shifted(texts: int, width: int) -> Corpus:
    """Return a corpus whose vectors have a mean, so that the order of centering and scaling matters."""
    sample = corpus(texts=texts, width=width, tokens=9)
    sample.pooled.add_(0.5)
    sample.views.add_(torch.tensor([0.5, 0.9, 0.0], dtype=torch.float64)[:, None, None])  # another mean in each view
    return sample


@pytest.mark.parametrize(("name", "options"), [(name, o) for name in METRICS for o in ({}, *CASES[name])], ids=str)
def test_function_and_class_match_the_definition(name: str, options: dict[str, Any]) -> None:
    options = OPTIONS.get(name, {}) | options
    plain = {option: setting for option, setting in options.items() if option != "method"}
    for count, width in [(13, 5), (6, 9)]:
        texts = shifted(count, width)
        rows = range(name in FIRST_IS_NAN, 3)
        expected = torch.stack([of_one_layer(getattr(oracles, name), name, texts, row, **plain) for row in rows])
        by_function = torch.stack([of_one_layer(getattr(of, name), name, texts, row, **options) for row in rows])
        torch.testing.assert_close(by_function, expected, rtol=1e-6, atol=1e-9)
        by_class = value(name, texts, torch.arange(count).split(4), **options)
        assert by_class.isnan().tolist() == [row not in rows for row in range(3)]
        torch.testing.assert_close(by_class[rows.start :], by_function, rtol=1e-9, atol=1e-9)
        if plain != OPTIONS.get(name, {}):
            changes = (by_class - value(name, texts))[rows.start :].abs()
            assert count == 6 or (changes > 1e-4).any(), "the options change nothing"


@pytest.mark.parametrize(("name", "options"), [(name, o) for name in ROWS for o in ({}, *CASES[name])], ids=str)
def test_class_and_function_agree_on_many_rows_folded_into_a_matrix(name: str, options: dict[str, Any]) -> None:
    texts, options = shifted(1300, 5), OPTIONS.get(name, {}) | options
    expected = torch.stack([getattr(of, name)(rows, **options) for rows in texts.pooled])
    torch.testing.assert_close(value(name, texts, torch.arange(1300).split(300), **options), expected)


@pytest.mark.parametrize("name", ["prompt_entropy", "curvature", "prompt_effective_rank", "first_token_share"])
def test_functions_of_tokens_accept_padded_batches(name: str) -> None:
    texts = shifted(13, 5).padded(2, 1)
    expected = torch.stack([of_one_layer(getattr(of, name), name, texts, row) for row in range(3)])
    torch.testing.assert_close(getattr(of, name)(texts.states, texts.mask.expand(3, -1, -1)).nanmean(dim=1), expected)


@pytest.mark.parametrize("name", METRICS)
def test_every_option_is_covered_here(name: str) -> None:
    """A new option must be added above, or its class could ignore it unnoticed."""
    parameters = inspect.signature(getattr(of, name)).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.default is not parameter.empty} - {"mask"}
    assert known == {option for options in CASES[name] for option in options}


@pytest.mark.parametrize("option", ["center", "unit", "epsilon", "alpha", "step"])
@pytest.mark.parametrize("name", METRICS)
def test_option_that_the_function_lacks_is_refused(name: str, option: str) -> None:
    if any(option in options for options in CASES[name]):
        assert make(name, [0, 1], **{option: 1})
        return
    with pytest.raises((TypeError, ValueError), match=option):
        make(name, [0, 1], **{option: 1})


INF = math.inf
INVARIANT: dict[str, tuple[int, str, Callable[[int, int], tuple[float, float]]]] = {
    "dataset_entropy": (1, "scale, order", lambda n, d: (0, math.log(min(n, d)))),
    "matrix_entropy": (1, "scale, order, transposed", lambda n, d: (0, math.log(min(n, d)))),
    "effective_rank": (1, "scale, order, transposed", lambda n, d: (1, min(n, d))),
    "anisotropy": (1, "scales, order", lambda n, d: (-1 / (n - 1), 1)),
    "logdet_entropy": (1, "scales, order", lambda n, d: (0, INF)),
    "uniformity": (1, "scale, shift, order", lambda n, d: (-8, 0)),
    "curvature": (1, "scale, shift, flip", lambda n, d: (0, math.pi)),
    "first_token_share": (1, "scale", lambda n, d: (0, 1)),
    "prompt_entropy": (1, "scale, shift, order, padding", lambda n, d: (0, math.log(max(1, min(n - 1, d))))),
    "block_influence": (2, "scales, order, symmetric", lambda n, d: (0, 2)),
    "cka": (2, "scale, shift, order, symmetric", lambda n, d: (0, 1)),
    "neighbor_overlap": (2, "scales, order, symmetric", lambda n, d: (0, 1)),
    "half_match": (2, "scale, order, symmetric", lambda n, d: (1 / n, 1)),
    "alignment": (2, "scale, shift, order", lambda n, d: (-1, 1)),
    "infonce": (2, "scales, order, symmetric", lambda n, d: (0, INF)),
    "dime": (2, "scales", lambda n, d: (-INF, math.log(n))),
    "lidar": (3, "shift, order, symmetric", lambda n, d: (0, math.log(max(1, min(n - 1, d))))),
}
"""The number of sets of rows, what does not matter besides a rotation, and the range for ``(n, d)`` rows."""


@settings(max_examples=25, deadline=None)
@given(n=st.integers(3, 9), d=st.integers(1, 9), seed=st.integers(0, 10_000), scale=st.floats(1e-2, 1e2))
@pytest.mark.parametrize("name", INVARIANT)
def test_rotation_and_other_changes_do_not_matter(name: str, n: int, d: int, seed: int, scale: float) -> None:
    count, changes, bounds = INVARIANT[name]
    d = max(d, 2) if count > 1 else d
    options = {"k": 2} if name == "neighbor_overlap" else {}

    def call(sets: list[Tensor], **more: Any) -> Tensor:
        return getattr(of, name)(*([torch.stack(sets)] if name == "lidar" else sets), **options, **more)  # type: ignore[no-any-return]

    sets = [random_rows(n, d, seed + number) for number in range(count)]
    expected = call(sets)
    low, high = bounds(n, d)
    assert low - 1e-9 <= expected <= high + 1e-6
    order = torch.arange(n).flip(0) if "flip" in changes else torch.randperm(n) if "order" in changes else slice(None)
    factors = torch.full((n, 1), scale if "scale" in changes else 1.0, dtype=torch.float64)
    if "scales" in changes and name != "dime":  # of each row
        factors = factors * torch.arange(1, n + 1)[:, None]
    shift = 3.0 if "shift" in changes else 0.0
    changed = [(factors * rows)[order] @ random_rotation(d, seed) + shift for rows in sets]
    torch.testing.assert_close(call(changed), expected, rtol=1e-6, atol=1e-6)
    if "symmetric" in changes:
        torch.testing.assert_close(call(sets[::-1]), expected, rtol=1e-6, atol=1e-6)
    if "transposed" in changes:
        torch.testing.assert_close(call([sets[0].mT]), expected, rtol=1e-6, atol=1e-6)
    if "padding" in changes:
        padded = torch.cat([torch.full((2, d), 9.0), sets[0], torch.full((1, d), -9.0)])
        mask = torch.tensor([False] * 2 + [True] * n + [False])
        torch.testing.assert_close(call([padded], mask=mask), expected, rtol=1e-6, atol=1e-6)


SAME = 0.3 * torch.arange(1.0, 6.0, dtype=torch.float64).expand(9, 5)
EYE = torch.eye(6, dtype=torch.float64)
SQUARE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
FAR = 1e4 * torch.ones(6, dtype=torch.float64)
KNOWN: dict[str, list[tuple[Callable[[], Any], float]]] = {
    "anisotropy": [
        (lambda: of.anisotropy(random_rows(1, 4).expand(6, 4)), 1.0),
        (lambda: of.anisotropy(EYE), 0.0),
        (lambda: of.anisotropy(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])), -1.0),
    ],
    "dataset_entropy": [
        (lambda: of.dataset_entropy(EYE), math.log(6)),
        (lambda: of.dataset_entropy(torch.ones(6, 3)), 0.0),
        (lambda: of.dataset_entropy(random_rows(1, 4)), 0.0),
        (lambda: of.dataset_entropy(0.1 * torch.ones(6, 3), center=True), 0),
    ],
    "effective_rank": [
        (lambda: of.effective_rank(EYE), 6.0),
        (lambda: of.effective_rank(torch.zeros(3, 4)), 0),
        (lambda: of.effective_rank(torch.ones(1, 4)), 1),
        # Singular values 3 and 1, not their squares: shares 3/4 and 1/4.
        (lambda: of.effective_rank(torch.diag(torch.tensor([3.0, 1.0]))), math.exp(math.log(4) - 0.75 * math.log(3))),
        (lambda: of.effective_rank(random_rows(40, 1) @ random_rows(1, 30, 1)) - 1, 0.0),
    ],
    "logdet_entropy": [
        (lambda: of.logdet_entropy(torch.zeros(4, 3)), 0),
        (lambda: of.logdet_entropy(EYE), 3 * math.log(1 + 6 / (6 * 0.25))),
        (lambda: of.logdet_entropy(random_rows(1, 6).expand(6, 6)), 0.5 * math.log(1 + 6 / 0.25)),
        (lambda: of.logdet_entropy(3 * EYE, unit=False, epsilon=1.5) - of.logdet_entropy(EYE, unit=False), 0.0),
    ],
    "matrix_entropy": [
        (lambda: of.matrix_entropy(EYE), math.log(6)),
        (lambda: of.matrix_entropy(torch.ones(5, 3)), 0.0),
        (lambda: of.matrix_entropy(torch.zeros(5, 3)), 0),
        (lambda: of.matrix_entropy(torch.ones(1, 3), normalization="logN"), 0),
        *((lambda alpha=alpha: of.matrix_entropy(3 * EYE[:2], alpha), math.log(2)) for alpha in (0.3, 1.0, 2.0, 5.0)),
    ],
    "alpha_req": [
        (lambda exponent=exponent: of.alpha_req(power_law(exponent), center=False), exponent)
        for exponent in (0.0, 0.5, 1.0, 2.0)
    ],
    "block_influence": [
        (lambda: of.block_influence(SAME, 3 * SAME), 0.0),
        (lambda: of.block_influence(SAME, -SAME), 2.0),
        (lambda: of.block_influence(EYE, EYE.roll(1, 0)), 1.0),
    ],
    "first_token_share": [
        (lambda: of.first_token_share(torch.ones(8, 3)), 1 / 8),
        (lambda: of.first_token_share(torch.cat([torch.full((1, 3), 1e18), torch.ones(7, 3)])), 1),
        (lambda: of.first_token_share(torch.ones(1, 3)), 1),
        (lambda: of.first_token_share(torch.tensor([[0.0], [2.0]])), 0),
    ],
    "prompt_entropy": [
        (lambda: of.prompt_entropy(torch.eye(5)), math.log(4)),  # five corners span four dimensions evenly
        (lambda: of.prompt_entropy(torch.arange(6.0)[:, None] * torch.tensor([1.0, 2.0, 3.0])), 0.0),
        (lambda: of.prompt_entropy((0.1 * random_rows(1, 8)).float().expand(11, 8)), 0),
        (lambda: of.prompt_entropy((0.1 * random_rows(1, 8)).expand(11, 8)), 0),
    ],
    "cka": [
        (lambda: of.cka(0.1 * torch.ones(5, 3), random_rows(5, 3)), 0),
        (lambda: of.cka(random_rows(9, 4), 5 * random_rows(9, 4) @ random_rotation(4) + 1), 1.0),
        (lambda: of.cka(random_rows(20, 200), random_rows(20, 200, 1)) > 0.8, 1),
        (lambda: of.cka(random_rows(20, 200), random_rows(20, 200, 1), unbiased=True).abs() < 0.1, 1),
    ],
    "neighbor_overlap": [
        (lambda: of.neighbor_overlap(random_rows(12, 4), random_rows(12, 4)), 1),
        (lambda: of.neighbor_overlap(random_rows(12, 4), random_rows(12, 7, 1), k=11), 1),
        (lambda: of.neighbor_overlap(torch.ones(8, 3), torch.ones(8, 3), k=2), 1),  # equidistant texts come in order
        (lambda: of.neighbor_overlap(CLUSTERS, CLUSTERS[[0, 2, 1, 3]], k=1), 0),
        (lambda: (of.neighbor_overlap(random_rows(400, 10), random_rows(400, 10, 1)) - 10 / 399).abs() < 0.01, 1),
    ],
    "half_match": [
        # A common component of all texts is removed, such as a massive first token in the first half of each.
        (lambda: of.half_match(random_rows(20, 6) + FAR, random_rows(20, 6)), 1),
        (lambda: of.half_match(random_rows(20, 6) + FAR, random_rows(20, 6), center=False) < 0.5, 1),
        (lambda: of.half_match(random_rows(20, 6), random_rows(20, 6).roll(1, 0)) < 0.6, 1),
        (lambda: of.half_match(SAME, SAME), 1 / 5),  # ranks 1 to 9, 5 on average
        (lambda: of.half_match(SAME, SAME, center=False), 1 / 5),
        (lambda: of.half_match(TWICE, TWICE, center=False), (4 + 2 / 1.5) / 6),
    ],
    "alignment": [
        (lambda: of.alignment(random_rows(9, 4), random_rows(9, 4)), 1.0),
        (lambda: of.alignment(random_rows(9, 4), 2 * random_rows(9, 4).mean(dim=0) - random_rows(9, 4)), -1.0),
        (lambda: of.alignment(random_rows(9, 6) + FAR, random_rows(9, 6, 1) + FAR, center=False) > 0.999, 1),
        (lambda: of.alignment(SAME, SAME), 0),  # differences from the mean are rounding
        (lambda: of.alignment(SAME, SAME, center=False), 1.0),
        (lambda: of.alignment(torch.zeros(4, 3), torch.zeros(4, 3), center=False), 0),
        (lambda: of.alignment(torch.zeros(4, 3), torch.ones(4, 3)), 0),
        # Wang and Isola's loss of unit vectors with alpha = 2, up to its sign.
        (lambda: of.alignment(EYE, EYE.roll(1, 0), center=False), 1 - 2 / 2),
    ],
    "uniformity": [
        (lambda: of.uniformity(torch.tensor([[3.0, 1.0], [2.0, 5.0]])), -8.0),  # centered, two texts are opposite
        (lambda: of.uniformity(SQUARE), math.log((4 * math.exp(-4) + 2 * math.exp(-8)) / 6)),
        (lambda: of.uniformity(SQUARE + 100), math.log((4 * math.exp(-4) + 2 * math.exp(-8)) / 6)),
        (lambda: of.uniformity(SQUARE + 100, center=False) > -0.01, 1),
        (lambda: of.uniformity(SQUARE, t=500.0), -1000 + math.log(4 / 6)),  # no underflow
        (lambda: (of.uniformity(random_rows(60, 2000)) + 4).abs() < 0.1, 1),  # independent directions
        (lambda: of.uniformity(SAME), 0),
        (lambda: of.uniformity(SAME, center=False), 0),
        (lambda: of.uniformity(torch.zeros(4, 3)), 0),
        (lambda: of.uniformity(torch.tensor([[1.0], [-1.0], [0.0]])), math.log((2 * math.exp(-2) + math.exp(-8)) / 3)),
    ],
    "infonce": [
        (lambda: of.infonce(SAME, SAME), math.log(2 * 9 - 1)),
        (lambda: of.infonce(torch.zeros(9, 4), torch.zeros(9, 4)), math.log(2 * 9 - 1)),
        (lambda: of.infonce(EYE, EYE), math.log(1 + 10 * math.exp(-10))),
        (lambda: of.infonce(EYE, -EYE) > 10, 1),
    ],
    "dime": [
        (lambda: of.dime(torch.ones(6, 2), random_rows(6, 4)), 0.0),  # a constant view has no information
        (lambda: of.dime(random_rows(20, 3), random_rows(20, 3) + 0.05 * random_rows(20, 3, 1)) > 0.2, 1),
        (lambda: min(of.dime(random_rows(5, 2, seed), random_rows(5, 2, seed + 50)) for seed in range(20)) < 0, 1),
    ],
    "lidar": [
        (lambda: of.lidar(EYE.expand(3, 6, 6)), math.log(5)),  # orthogonal texts span one dimension less
        (lambda: of.lidar(EYE.expand(3, 6, 6), exponential=True), 5.0),
        (lambda: of.lidar(SQUARE.expand(2, 4, 2)), math.log(2)),
        (lambda: of.lidar(SQUARE + torch.tensor([[[0.0, 5.0]], [[0.0, -5.0]]])) < 0.01, 1),  # noise hides its direction
        (lambda: of.lidar(random_rows(3, 4)[:, None].expand(3, 5, 4).contiguous()), 0.0),  # identical texts
        (lambda: of.lidar(10 * VIEWS, delta=1e-2) - of.lidar(VIEWS, delta=1e-4), 0.0),
    ],
    "intrinsic_dimension": [
        (lambda: of.intrinsic_dimension(SPREAD[[*range(30), *range(7)]]) - of.intrinsic_dimension(SPREAD), 0.0),
        *(
            (lambda d=d: (of.intrinsic_dimension(uniform(d) @ random_rotation(12)[:d] + 100) / d - 1).abs() < 0.15, 1)
            for d in (1, 2, 5)
        ),
    ],
}  # fmt: skip
"""Calls and their values, exact if the value is an integer."""
CLUSTERS = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
TWICE = random_rows(5, 8)[[0, 1, 2, 3, 4, 4]]
VIEWS = random_rows(30, 4).reshape(3, 10, 4)
SPREAD = random_rows(30, 4)


def power_law(exponent: float) -> Tensor:
    ranks = torch.arange(1, 41, dtype=torch.float64)
    return random_rotation(40) @ torch.diag(ranks ** (-exponent / 2)) @ random_rotation(40, 1)


def uniform(dimension: int) -> Tensor:
    return torch.rand(1500, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("name", "number"), [(name, k) for name, calls in KNOWN.items() for k in range(len(calls))])
def test_known_values(name: str, number: int) -> None:
    call, expected = KNOWN[name][number]
    assert float(call()) == (expected if isinstance(expected, int) else pytest.approx(expected, rel=1e-6, abs=1e-6))


def rows(*shape: int) -> Tensor:
    return torch.ones(shape)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: of.alpha_req(random_rows(4, 9)), "Eigenvalues above rounding from rank 3 to 100 must be at least 2"),
    (lambda: of.alpha_req(rows(9, 9)), "must be at least 2, but there are 0"),
    (lambda: of.AlphaReQ([0], first=5, last=5), "1 <= first < last, but got 5 and 5"),
    (lambda: of.anisotropy(rows(1, 3)), "two or more rows"),
    (lambda: of.alignment(rows(1, 3), rows(1, 3)), "N of 2 or more"),
    (lambda: of.alignment(rows(2, 3), rows(2, 4)), r"but got \(2, 3\) and \(2, 4\)"),
    (lambda: of.cka(rows(1, 3), rows(1, 3)), "N of 2 or more"),
    (lambda: of.cka(rows(3, 3), rows(3, 3), unbiased=True), "N of 4 or more"),
    (lambda: of.cka(rows(3, 3), rows(4, 3)), r"but got \(3, 3\) and \(4, 3\)"),
    (lambda: of.Curvature([0], step=0), "`step` must be a whole number, 1 or more, but got 0"),
    (lambda: of.dime(rows(1, 3), rows(1, 3)), "N of 2 or more"),
    (lambda: of.DiME([0], permutations=0), "`permutations` must be a whole number, 1 or more"),
    (lambda: of.DiME([0], alpha=-1.0), "`alpha` must be greater than 0"),
    (lambda: of.EffectiveRank([0], epsilon=-1.0), "1e-7 for RankMe"),
    (lambda: of.half_match(rows(1, 3), rows(1, 3)), "N of 2 or more"),
    (lambda: of.infonce(rows(1, 3), rows(1, 3)), "N of 2 or more"),
    (lambda: of.infonce(rows(2, 3), rows(2, 4)), r"but got \(2, 3\) and \(2, 4\)"),
    (lambda: of.InfoNCE([0], temperature=0.0), "`temperature` must be greater than 0"),
    (lambda: of.intrinsic_dimension(torch.tensor([[1.0], [1.0], [2.0]])), "Different rows .* at least 3, but there are 2"),
    (lambda: of.intrinsic_dimension(EYE), "two nearest neighbors differ"),
    (lambda: of.IntrinsicDimension([0], discard=1.0), r"`discard` must be in \[0, 1\)"),
    *((lambda shape=shape: of.lidar(rows(*shape)), r"\(V, N, D\) with two or more views and texts") for shape in ((1, 5, 3), (4, 1, 3), (5, 3))),
    (lambda: of.LiDAR([0], delta=0.0), "`delta` must be greater than 0"),
    (lambda: of.LiDAR([0], views=1), "`views` must be a whole number, 2 or more"),
    (lambda: of.LogdetEntropy([0], epsilon=0.0), "`epsilon` must be greater than 0"),
    (lambda: of.matrix_entropy(torch.eye(2), 0.0), "`alpha` must be greater than 0"),
    (lambda: of.MatrixEntropy([0], normalization="logn"), "`normalization` must be one of .* Did you mean 'logN'"),  # type: ignore[arg-type]
    (lambda: of.neighbor_overlap(rows(10, 3), rows(10, 3)), "N of 11 or more"),
    (lambda: of.NeighborOverlap([0], k=0), "`k` must be a whole number, 1 or more"),
    (lambda: of.uniformity(rows(1, 3)), "Rows of `embeddings` must be at least 2, but there are 1"),
    *((lambda t=t: of.uniformity(rows(2, 3), t=t), "`t` must be greater than 0") for t in (0.0, -2.0, math.nan)),
    *((lambda t=t: of.Uniformity([0], t=t), "`t` must be greater than 0") for t in (0.0, -2.0, math.nan)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_invalid_inputs_and_options_are_refused(number: int) -> None:
    call, message = REFUSED[number]
    with pytest.raises((OptionError, TooFewTextsError), match=message):
        call()


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_vectors_that_are_not_finite_give_nan(bad: float) -> None:
    invalid = torch.tensor([[1.0, bad], [2.0, 3.0], [0.0, 1.0]])
    assert of.alignment(invalid, rows(3, 2)).isnan()
    assert of.alignment(torch.eye(3, 2), invalid).isnan()
    assert of.uniformity(invalid).isnan()
    for name in ("effective_rank", "matrix_entropy"):  # one invalid set does not affect the others
        sets = torch.stack([random_rows(4, 5), random_rows(4, 5, 1)])
        sets[0, 2, 2] = bad
        values = getattr(of, name)(sets)
        assert values[0].isnan()
        torch.testing.assert_close(values[1], getattr(oracles, name)(sets[1]))


@pytest.mark.parametrize("name", ["alignment", "uniformity"])
def test_half_precision_is_computed_in_double_precision_on_a_cpu(name: str) -> None:
    sets = [random_rows(20, 8, seed).to(torch.bfloat16) for seed in range(INVARIANT[name][0])]
    actual = getattr(of, name)(*sets)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), getattr(oracles, name)(*(rows.double() for rows in sets)))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 9), d=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_entropy_falls_with_its_order_and_is_below_the_effective_rank(n: int, d: int, seed: int) -> None:
    """The paper's Theorem 1 states EffRank <= exp(S_1), but the opposite holds.

    Squaring singular values makes their shares more uneven, so the entropy of the squares is smaller.
    """
    states = random_rows(n, d, seed) * torch.arange(1, d + 1) ** -0.5
    values = torch.stack([of.matrix_entropy(states, alpha) for alpha in (0.3, 0.9, 1.0, 1.1, 2.0, 4.0)])
    assert (values.diff() <= 1e-9).all()
    assert values[2].exp() <= of.effective_rank(states) + 1e-9
    assert 1 - 1e-9 <= of.effective_rank(states) <= min(n, d) + 1e-9


@pytest.mark.parametrize("width", [6, 40])
def test_intrinsic_dimension_matches_scikit_dimension(width: int) -> None:
    skdim = pytest.importorskip("skdim", reason="scikit-dimension is a test-only dependency")
    sample = random_rows(200, width)
    reference = skdim.id.TwoNN(discard_fraction=0.1, method="linear").fit(sample.numpy()).dimension_
    assert float(of.intrinsic_dimension(sample)) == pytest.approx(reference, rel=1e-6)
    torch.testing.assert_close(
        of.intrinsic_dimension(1e-3 * sample[:50] + 1e4), of.intrinsic_dimension(sample[:50]), rtol=1e-4, atol=1e-4
    )


def test_alpha_req_ignores_scale_shift_and_rotation() -> None:
    sample = random_rows(12, 6)
    torch.testing.assert_close(of.alpha_req(3 * sample @ random_rotation(6) + 5), of.alpha_req(sample))


def test_dime_draws_from_its_seed_alone() -> None:
    before = torch.get_rng_state()
    assert of.dime(random_rows(12, 4), random_rows(12, 4, 1), seed=1) != of.dime(
        random_rows(12, 4), random_rows(12, 4, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", sorted(set(ROWS) - {"alpha_req", "anisotropy"}))  # a spectrum of zeros has no slope
def test_identical_rows_have_no_spread_once_folded(name: str) -> None:
    same = SAME[:1].expand(1300, 5)
    metric = make(name, [0], center=True)
    for batch in same.split(300):
        metric.update(batch, layer=0)
    assert metric.compute().tolist() == [float(getattr(of, name)(same, center=True))] == [0.0]


def test_masked_sets_match_single_sets() -> None:
    states, mask = torch.stack([random_rows(6, 9), random_rows(6, 9, 1)]), torch.ones(2, 6, dtype=torch.bool)
    mask[0, :3], mask[1, 4:] = False, False
    expected = torch.stack([oracles.matrix_entropy(states[0, 3:]), oracles.matrix_entropy(states[1, :4])])
    torch.testing.assert_close(of.matrix_entropy(states, mask=mask), expected)
    logn = [oracles.matrix_entropy(states[0, 3:], normalization="logN")]
    torch.testing.assert_close(of.matrix_entropy(states[:1], mask=mask[:1], normalization="logN"), torch.stack(logn))
