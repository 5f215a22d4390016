from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import Curvature, curvature
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import cosine, random_rotation, random_rows


def curvature_by_definition(path: Tensor, step: int = 1) -> Tensor:
    """Mean angle between a difference and the next one, in radians."""
    angles = []
    for k in range(len(path) - 2 * step):
        before, after = path[k + step] - path[k], path[k + 2 * step] - path[k + step]
        if before.norm() > 0 and after.norm() > 0:
            angles.append(math.acos(max(-1.0, min(1.0, cosine(before, after)))))
    return torch.tensor(sum(angles) / len(angles), dtype=torch.float64)


@pytest.mark.parametrize(("step", "tokens"), [(1, 7), (2, 11), (3, 11)])
def test_function_and_class_match_the_definition(step: int, tokens: int) -> None:
    texts = corpus(tokens=tokens)
    texts.mask[:, : 2 * step + 1] = True
    expected = torch.stack(
        [torch.stack([curvature_by_definition(text, step) for text in layer]) for layer in texts.texts]
    )
    torch.testing.assert_close(curvature(texts.states, texts.mask.expand(3, -1, -1), step=step), expected)
    torch.testing.assert_close(value("curvature", texts, step=step), expected.mean(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1, 2])
def test_known_values(dtype: torch.dtype, step: int) -> None:
    along, across = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([-1.0, 3.0, 0.0])
    line = torch.arange(9.0)[:, None] * along + 0.3
    assert curvature(line.to(dtype), step=step) == pytest.approx(0.0, abs=1e-6)
    back_and_forth = torch.tensor([0.0, 0.0, 1.0, 1.0] * 3)[:: 2 // step, None] * along
    assert curvature(back_and_forth.to(dtype), step=step) == pytest.approx(math.pi, abs=1e-6)
    zigzag = torch.cumsum(torch.stack([along, across / across.norm() * along.norm()] * 4), dim=0)
    assert curvature(zigzag.to(dtype)) == pytest.approx(math.pi / 2, abs=1e-6)


def test_zero_differences_are_skipped() -> None:
    path = random_rows(8, 4)
    path[3] = path[2]
    torch.testing.assert_close(curvature(path), curvature_by_definition(path))


def test_masked_token_is_excluded_from_the_path() -> None:
    path = random_rows(8, 4)
    mask = torch.tensor([True, True, False, True, True, False, True, True])
    torch.testing.assert_close(curvature(path, mask), curvature_by_definition(path[mask]))


def test_text_without_angles_is_nan_in_the_function_and_skipped_in_the_class() -> None:
    path = random_rows(6, 4)
    assert curvature(path[:2]).isnan()
    assert curvature(path[:1]).isnan()
    assert curvature(path[:4], step=2).isnan()
    assert curvature(torch.ones(5, 3)).isnan()
    metric = Curvature([0])
    metric.update(path.expand(4, 6, 4), torch.arange(6) < torch.tensor([[6], [2], [0], [5]]), layer=0)
    assert (metric.count.tolist(), metric.skipped.tolist()) == ([2], [2])
    expected = (curvature_by_definition(path) + curvature_by_definition(path[:5])) / 2
    torch.testing.assert_close(metric.compute()[0], expected)


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(3, 9), d=st.integers(1, 6), seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_scale_rotation_and_shift_do_not_matter(tokens: int, d: int, seed: int, scale: float) -> None:
    path = random_rows(tokens, d, seed)
    transformed = scale * path @ random_rotation(d, seed) + random_rows(1, d, seed + 1)
    torch.testing.assert_close(curvature(transformed), curvature(path), rtol=1e-6, atol=1e-6)
    assert 0 <= curvature(path) <= math.pi + 1e-9
    torch.testing.assert_close(curvature(path.flip(0)), curvature(path), rtol=1e-9, atol=1e-9)


def test_angles_computed_with_later_layers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = corpus()
    expected = value("curvature", texts)
    monkeypatch.setattr(Curvature, "_waits", lambda *_: True)
    for together in (1, 2000, 2**23):  # computed immediately, in the middle, and at the end
        monkeypatch.setattr(Curvature, "_max_waiting_bytes", together)
        torch.testing.assert_close(value("curvature", texts), expected)


def test_step_must_be_positive() -> None:
    with pytest.raises(OptionError, match="`step` must be a whole number, 1 or more, but got 0"):
        Curvature([0], step=0)
