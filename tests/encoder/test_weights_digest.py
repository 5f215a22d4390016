"""The digest of an encoder's weights changes with any element."""

import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.digests import weights_digest
from tests.support.tiny_folders import Folder

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class Held(nn.Module):
    """A module that registers the given tensors as buffers."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def random_tensor(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_last_bit_of_any_element_changes_the_digest(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", center=[f"text {n}" for n in range(16)])
    digests = {encoder.spec.weights_digest}
    tensors = encoder.state_dict()
    assert len(tensors) == 22
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        bits = tensor.flatten().view(torch.int32)
        for position in {0, len(bits) - 1, int(torch.randint(len(bits), (), generator=generator))}:
            bits[position] ^= 1
            digest = encoder.spec.weights_digest
            assert digest not in digests
            digests.add(digest)
            bits[position] ^= 1
    assert encoder.spec.weights_digest in digests  # unchanged again


@pytest.mark.parametrize("dtype", BITS)
def test_every_bit_and_swap_changes_the_digest_in_every_precision(dtype: torch.dtype) -> None:
    module = Held(weight=random_tensor(40, dtype))
    digest, bits = weights_digest(module), module.weight.view(BITS[dtype])  # type: ignore[operator]
    for position in range(40):
        for bit in range(0, bits.element_size() * 8 - 1, 3):
            bits[position] ^= 1 << bit
            assert weights_digest(module) != digest
            bits[position] ^= 1 << bit
        swapped = module.weight.clone()  # type: ignore[operator]
        swapped[[position, (position + 7) % 40]] = swapped[[(position + 7) % 40, position]]
        assert weights_digest(Held(weight=swapped)) != digest
    assert weights_digest(module) == digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("value", "other_value"), [(1.0, 2.0), (0.0, 1.0), (1.0, -1.0), (0.0, -0.0)])
def test_swapping_distant_round_numbers_changes_the_digest(
    value: float, other_value: float, dtype: torch.dtype
) -> None:
    size = (1 << 20) + 8
    for distance in (1, 4096, 1 << 19, 1 << 20):
        first, second = torch.zeros(2, size, dtype=dtype)
        first[3], first[3 + distance] = value, other_value
        second[3], second[3 + distance] = other_value, value
        assert weights_digest(Held(weight=first)) != weights_digest(Held(weight=second)), distance


def test_round_numbers_in_double_precision_change_the_digest() -> None:
    plain = torch.zeros(20_000, dtype=torch.float64)
    digest, collisions = weights_digest(Held(weight=plain)), 0
    for position in range(0, 20_000, 40):
        plain[position] = 2.0
        collisions += weights_digest(Held(weight=plain)) == digest
        plain[position] = 0.0
    assert collisions == 0


def test_names_shapes_and_precisions_change_the_digest() -> None:
    a, b = random_tensor(12, torch.float32, 1), random_tensor(12, torch.float32, 2)
    digests = [
        weights_digest(module)
        for module in (
            Held(a=a, b=b), Held(a=b, b=a), Held(a=a, c=b), Held(a=a), Held(a=a, b=b, c=b), Held(a=a, b=a),
            Held(a=a.reshape(3, 4), b=b), Held(a=a.reshape(4, 3), b=b), Held(a=a.view(torch.int32), b=b),
            Held(a=a.reshape(3, 4).T, b=b), Held(a=torch.cat([a, torch.zeros(1)]), b=b),
        )
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert weights_digest(Held(b=b, a=a)) == digests[0]  # creation order does not matter
    strided = torch.stack([a, b], dim=1)[:, 0]
    assert weights_digest(Held(a=strided, b=b)) == digests[0]  # neither does the memory layout
