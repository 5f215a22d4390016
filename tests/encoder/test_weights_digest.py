"""The digest of an encoder's weights: any change of any element is another encoder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.spec import weights_digest

Folder = Callable[[str], str]
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class Held(nn.Module):
    """A module that holds the tensors it is given, as buffers."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def random(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_last_bit_of_any_one_element_of_an_encoder_counts(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", center=[f"text {n}" for n in range(16)])
    seen = {encoder.spec.weights_digest}
    tensors = encoder.state_dict()
    assert len(tensors) == 22
    draw = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        bits = tensor.flatten().view(torch.int32)
        for place in {0, len(bits) - 1, int(torch.randint(len(bits), (), generator=draw))}:
            bits[place] ^= 1
            digest = encoder.spec.weights_digest
            assert digest not in seen
            seen.add(digest)
            bits[place] ^= 1
    assert encoder.spec.weights_digest in seen  # all is as it was


@pytest.mark.parametrize("dtype", BITS)
def test_every_bit_and_every_swap_counts_in_every_precision(dtype: torch.dtype) -> None:
    held = Held(weight=random(40, dtype))
    before, bits = weights_digest(held), held.weight.view(BITS[dtype])  # type: ignore[operator]
    for place in range(40):
        for bit in range(0, bits.element_size() * 8 - 1, 3):
            bits[place] ^= 1 << bit
            assert weights_digest(held) != before
            bits[place] ^= 1 << bit
        swapped = held.weight.clone()  # type: ignore[operator]
        swapped[[place, (place + 7) % 40]] = swapped[[(place + 7) % 40, place]]
        assert weights_digest(Held(weight=swapped)) != before
    assert weights_digest(held) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("one", "other"), [(1.0, 2.0), (0.0, 1.0), (1.0, -1.0), (0.0, -0.0)])
def test_round_numbers_that_swap_places_far_apart_count(one: float, other: float, dtype: torch.dtype) -> None:
    size = (1 << 20) + 8
    for distance in (1, 4096, 1 << 19, 1 << 20):
        first, second = torch.zeros(2, size, dtype=dtype)
        first[3], first[3 + distance] = one, other
        second[3], second[3 + distance] = other, one
        assert weights_digest(Held(weight=first)) != weights_digest(Held(weight=second)), distance


def test_round_numbers_anywhere_in_double_precision_count() -> None:
    plain = torch.zeros(20_000, dtype=torch.float64)
    before, same = weights_digest(Held(weight=plain)), 0
    for place in range(0, 20_000, 40):
        plain[place] = 2.0
        same += weights_digest(Held(weight=plain)) == before
        plain[place] = 0.0
    assert same == 0


def test_names_shapes_precisions_and_which_tensor_is_which_count() -> None:
    a, b = random(12, torch.float32, 1), random(12, torch.float32, 2)
    digests = [
        weights_digest(held)
        for held in (
            Held(a=a, b=b), Held(a=b, b=a), Held(a=a, c=b), Held(a=a), Held(a=a, b=b, c=b), Held(a=a, b=a),
            Held(a=a.reshape(3, 4), b=b), Held(a=a.reshape(4, 3), b=b), Held(a=a.view(torch.int32), b=b),
            Held(a=a.reshape(3, 4).T, b=b), Held(a=torch.cat([a, torch.zeros(1)]), b=b),
        )
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert weights_digest(Held(b=b, a=a)) == digests[0]  # the order in which they were made does not count
    strided = torch.stack([a, b], dim=1)[:, 0]
    assert weights_digest(Held(a=strided, b=b)) == digests[0]  # nor how they lie in memory
