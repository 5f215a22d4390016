"""The trunk and masks of ``benchmarks/vision``: what the record claims to have trained."""

from __future__ import annotations

import pytest
import torch

from benchmarks.vision.images import augmented, normalised
from benchmarks.vision.model import PatchTransformer, prefix_mask, to_patches
from benchmarks.vision.objectives import OBJECTIVES, targets
from midlayer_encoders.models.anatomy import find_anatomy


def trunk() -> PatchTransformer:
    torch.manual_seed(0)
    return PatchTransformer(size=16, width=16, blocks=2, heads=2)


def images(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_patches_are_in_raster_order() -> None:
    pixels = torch.arange(3 * 8 * 8).view(1, 3, 8, 8)
    patches = to_patches(pixels, 4)
    for place, (top, left) in enumerate(((0, 0), (0, 4), (4, 0), (4, 4))):
        expected = pixels[0, :, top : top + 4, left : left + 4].flatten()
        assert patches[0, place].tolist() == expected.tolist()


def test_the_prefix_is_seen_by_all_and_the_rest_by_what_follows() -> None:
    mask = prefix_mask(torch.tensor([1, 3]), 5)[:, 0]
    for row, prefix in enumerate((1, 3)):
        for query in range(5):
            for key in range(5):
                assert bool(mask[row, query, key]) == (key <= query or key < prefix)


@pytest.mark.parametrize("prefix", [1, 6])
def test_states_after_the_prefix_do_not_depend_on_later_patches(prefix: int) -> None:
    model, inputs = trunk(), normalised(images())
    changed = inputs.clone()
    changed[:, :, 12:, 12:] += 1.0  # the last patch
    mask = prefix_mask(torch.full((3,), prefix), 16)
    before, after = model(inputs, mask=mask), model(changed, mask=mask)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])
    torch.testing.assert_close(model(inputs, causal=True), model(inputs, mask=prefix_mask(torch.ones(3).long(), 16)))
    assert not torch.allclose(model(inputs)[:, 0], model(changed)[:, 0])


def test_kept_patches_are_encoded_as_if_the_others_were_not_there() -> None:
    model, inputs = trunk(), normalised(images())
    saved = torch.tensor([[5, 2, 9]]).expand(3, -1)
    changed = inputs.clone()
    changed[:, :, 12:, 12:] += 1.0
    torch.testing.assert_close(model(inputs, kept=saved), model(changed, kept=saved))


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_every_objective_trains_every_block_of_the_same_trunk(name: str) -> None:
    module = OBJECTIVES[name](trunk(), classes=3, learning_rate=1e-3, compiled=False)
    with torch.no_grad():
        views = module.views(images(4), torch.tensor([0, 1, 2, 0]))
    loss = module.loss(*views)
    loss.backward()
    assert loss.isfinite()
    for name, parameter in module.trunk.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0), name
    assert find_anatomy(module.trunk, blocks="blocks").final == ("norm",)


def test_targets_are_normalised_within_each_patch() -> None:
    expected = targets(normalised(images()), 4)
    torch.testing.assert_close(expected.mean(dim=-1), torch.zeros(3, 16), atol=1e-5, rtol=0)
    torch.testing.assert_close(expected.var(dim=-1), torch.ones(3, 16), atol=1e-3, rtol=0)


def test_whole_crops_are_the_images_or_their_mirror() -> None:
    inputs = images(16)
    for result, plain in zip(augmented(inputs, smallest=1.0), normalised(inputs), strict=True):
        flipped = plain.flip(-1)
        assert torch.allclose(result, plain, atol=1e-4) or torch.allclose(result, flipped, atol=1e-4)
