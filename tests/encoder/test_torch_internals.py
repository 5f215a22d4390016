"""Private parts of torch that the package uses: each test fails when a release renames or changes one."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from midlayer_encoders.encoder.description import _TORCH_ATTRIBUTES


@pytest.fixture
def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def test_copy_with_modules_of_its_own_leaves_the_original(blocks: nn.Sequential) -> None:
    other = copy.copy(blocks)
    other._modules = dict(other._modules)
    other.append(nn.Identity())
    other[0] = nn.Identity()
    assert (len(blocks), len(other)) == (3, 4)
    assert isinstance(blocks[0], nn.Linear)
    assert other[1] is blocks[1]
    states = torch.ones(1, 2)
    torch.testing.assert_close(other(states), blocks[2](blocks[1](states)))


def test_deleted_blocks_return_with_the_modules() -> None:
    blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    before = list(blocks)
    with mock.patch.object(blocks, "_modules", dict(blocks._modules)):
        del blocks[1:]
        assert list(blocks) == before[:1]
    assert list(blocks) == before


@pytest.mark.long
def test_compilation_sets_only_known_attributes(blocks: nn.Sequential) -> None:
    compiled = torch.compile(blocks, backend="eager")
    assert compiled._orig_mod is blocks
    assert [name for name, module in compiled.named_modules() if module is blocks] == ["_orig_mod"]
    assert blocks._compiled_call_impl is None
    blocks.compile(backend="eager")
    assert blocks._compiled_call_impl is not None
    assert vars(blocks).keys() <= _TORCH_ATTRIBUTES


def test_version_of_a_weight_counts_changes_in_place(blocks: nn.Sequential) -> None:
    weight = blocks[0].weight
    before = weight._version
    blocks(torch.ones(1, 2))
    assert weight._version == before
    with torch.no_grad():
        weight.add_(1)
    assert weight._version > before


def test_names_of_buffers_that_are_not_saved() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("unsaved", torch.ones(1), persistent=False)
    assert module._non_persistent_buffers_set == {"unsaved"}


def test_hooks_of_a_module_are_found_and_can_be_deleted(blocks: nn.Sequential) -> None:
    calls = []
    blocks.register_forward_pre_hook(lambda *_: calls.append("pre"))
    blocks.register_forward_hook(lambda *_: calls.append("hook"))
    blocks(torch.ones(1, 2))
    assert calls == ["pre", "hook"]
    for hooks in (blocks._forward_pre_hooks, blocks._forward_hooks):
        (key,) = hooks
        del hooks[key]
    blocks(torch.ones(1, 2))
    assert calls == ["pre", "hook"]


@pytest.mark.parametrize("kind", ["forward_hooks", "forward_pre_hooks"])
def test_hooks_of_all_modules_are_found(kind: str) -> None:
    register = getattr(nn.modules.module, f"register_module_{kind.removesuffix('s')}")
    hooks = getattr(nn.modules.module, f"_global_{kind}")
    handle = register(print)
    try:
        assert print in hooks.values()
    finally:
        handle.remove()
    assert print not in hooks.values()
