from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from midlayer_encoders._types import NORMS, Norm
from midlayer_encoders.anatomy import find_anatomy
from midlayer_encoders.cut import load_cut
from tests.families import DEPTH, FAMILIES, inputs, tiny


def expected_states(name: str, norm: Norm) -> list[Tensor]:
    """Return every layer of the uncut model, read by hooks on its blocks, and normed by its own final norm if asked."""
    model = tiny(name)
    anatomy = find_anatomy(model)
    states: list[Tensor] = []

    def keep(value: object) -> None:
        states.append((value[0] if isinstance(value, tuple) else value).reshape(2, -1, 32))  # type: ignore[attr-defined]

    blocks = {id(block): block for block in (anatomy.block(model, k) for k in range(1, DEPTH + 1))}
    # What enters the first block, then what enters each next one (a convolution may stand between), then the last output.
    handles = [
        block.register_forward_pre_hook(
            lambda _m, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        for block in blocks.values()
    ]
    outputs: list[object] = []
    last = anatomy.block(model, DEPTH)
    handles.append(last.register_forward_hook(lambda _m, _a, out: outputs.append(out)))
    with torch.no_grad():
        model(**inputs(name))
        keep(outputs[-1])
        for handle in handles:
            handle.remove()
        if norm == "final":
            for path in anatomy.final:
                states = [model.get_submodule(path)(value) for value in states]
    assert len(states) == DEPTH + 1
    return states


def read(model: torch.nn.Module, output: str | tuple[str, int], name: str) -> Tensor:
    with torch.no_grad():
        given = model(**inputs(name), output_hidden_states=True)
    value = given[output] if isinstance(output, str) else given[output[0]][output[1]]
    return value.reshape(2, -1, value.shape[-1])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_of_every_family_is_exact_before_and_after_save_and_reload(
    name: str, norm: Norm, tmp_path: Path
) -> None:
    tiny(name).save_pretrained(tmp_path / "whole")  # type: ignore[operator]
    for layer, expected in enumerate(expected_states(name, norm)):
        model, cut = load_cut(str(tmp_path / "whole"), layer, norm=norm)
        assert cut.layer == layer
        torch.testing.assert_close(read(model, cut.output, name), expected, msg=lambda m: f"layer {layer}: {m}")
        model.save_pretrained(tmp_path / "cut")  # type: ignore[operator]
        again = type(model).from_pretrained(tmp_path / "cut").eval()  # type: ignore[attr-defined]
        torch.testing.assert_close(read(again, cut.output, name), expected, msg=lambda m: f"reloaded {layer}: {m}")
