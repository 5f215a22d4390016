"""Several processes select what one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from midlayer_encoders import LayerEncoder, select_layer
from midlayer_encoders.errors import OptionError
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.selection import Selection, select
from tests.two_processes import in_two_processes

Folder = Callable[[str], str]
TEXTS = [f"{color} {number} " + "and more words " * (number % 5) for number in range(12) for color in ("red", "blue")]
LABELS = ["red", "blue"] * 12


@pytest.mark.long
def test_selection_of_two_processes_is_that_of_one(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [LayerEncoder(tiny_folder("Llama"), -1, device="cpu") for _ in range(2)]
    arguments: dict[str, Any] = {"token_budget": 128, "recipes": ["plain", "echo"]}
    expected = select(models[0], TEXTS, LABELS, **arguments)
    work: list[int] = []
    plain = LayerReader.embed

    def embed(self: Any, inputs: Any, batches: Any, **options: Any) -> Any:
        work.append(len(batches))
        return plain(self, inputs, batches, **options)

    monkeypatch.setattr(LayerReader, "embed", embed)
    results = in_two_processes(
        monkeypatch, lambda group: select(models[group.rank], TEXTS, LABELS, devices=2, **arguments)
    )
    for result in results:
        assert isinstance(result, Selection), result
        assert result.frame.equals(expected.frame)
        assert (result.layer, result.reason, result.labels) == (expected.layer, expected.reason, expected.labels)
        assert result.to_frame().equals(expected.to_frame())
    assert len(work) == 5, "half match in the first process, and the labeled texts under two recipes in each"
    assert min(work) >= 2


def test_arguments_are_checked_and_passed_on(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [LayerEncoder(tiny_folder("Llama"), -1, device="cpu") for _ in range(2)]
    with pytest.raises(OptionError, match="`devices` must be"):
        select_layer(models[0], TEXTS, devices=0)
    frame = select(models[0], TEXTS, rule="half-match").frame
    with pytest.raises(OptionError, match="`num_nodes` has no effect with a frame"):
        select_layer(frame, num_nodes=2)
    results = in_two_processes(monkeypatch, lambda group: select_layer(models[group.rank], TEXTS[:4], devices=2))
    assert [result.layer for result in results if isinstance(result, Selection)] == [select_layer(models[0]).layer] * 2
