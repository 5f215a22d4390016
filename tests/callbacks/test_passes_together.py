import torch
from midlayer_encoders.callbacks._sharded import _call_inside
from torch import nn


def test_call_inside_modules_gives_each_an_argument() -> None:
    """FSDP2 moves the arguments of a pass to its GPU, and fails if there are none; there is no GPU here."""
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    arguments: list[int] = []
    for module in modules:
        module.register_forward_pre_hook(lambda _, args: arguments.append(len(args)))
    result = _call_inside(modules, lambda: torch.ones(1))
    assert arguments == [1, 1]
    assert result == torch.ones(1)
