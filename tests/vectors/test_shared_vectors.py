"""Several processes write the file of one process, each from its share of the inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.vectors import embed
from midlayer_encoders.processes.group import Group, OtherProcessError
from midlayer_encoders.reading.reader import LayerReader
from tests.two_processes import in_two_processes

Folder = Callable[[str], str]
TEXTS = [f"text {number} " + "and more words " * (number % 7) for number in range(40)]


def encoders(folder: str) -> list[LayerEncoder]:
    return [LayerEncoder(folder, -1, device="cpu") for _ in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["v.npy", "v.parquet"])
def test_file_of_two_processes_is_that_of_one(
    name: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, *_ = models = encoders(tiny_folder("Llama"))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    embed(encoder, TEXTS, tmp_path / "one" / name, token_budget=60)
    work: Counter[int] = Counter()
    by_model = {id(model.transformer): rank for rank, model in enumerate(models)}
    plain = LayerReader.passes

    def passes(self: Any, inputs: Sequence[Any], batches: Any, **options: Any) -> Any:
        work[by_model[id(self.model)]] += sum(map(len, batches))
        return plain(self, inputs, batches, **options)

    monkeypatch.setattr(LayerReader, "passes", passes)
    reports: list[tuple[str, int, int]] = []

    def run(group: Group) -> Path:
        report = lambda *steps: reports.append(steps) if group.is_first else pytest.fail("two report")  # noqa: E731
        out = tmp_path / "two" / name
        return embed(models[group.rank], TEXTS, out, token_budget=60, devices=2, progress=report)

    assert in_two_processes(monkeypatch, run) == [tmp_path / "two" / name] * 2
    files = [{p.relative_to(tmp_path / who): p.read_bytes() for p in (tmp_path / who).rglob("*") if p.is_file()}
             for who in ("one", "two")]  # fmt: skip
    assert files[0] == files[1]
    assert sum(work.values()) == len(TEXTS)
    assert min(work.values()) > len(TEXTS) // 4
    steps = [done for stage, done, _ in reports if stage == "embedding"]
    assert steps == sorted(steps)
    assert steps[-1] == len(TEXTS)


@pytest.mark.long
def test_error_of_one_process_ends_both(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = encoders(tiny_folder("Llama"))

    def fail(*_: Any) -> None:
        raise KeyError("a broken model")

    models[1].transformer.register_forward_pre_hook(fail)
    first, second = in_two_processes(
        monkeypatch, lambda group: embed(models[group.rank], TEXTS, tmp_path / "v.npy", token_budget=60, devices=2)
    )
    assert isinstance(first, OtherProcessError)
    assert "In process 1" in str(first)
    assert isinstance(second, KeyError)
    assert not (tmp_path / "v.npy").exists()


def test_invalid_number_of_machines_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with pytest.raises(OptionError, match="`num_nodes` must be"):
        embed(encoder, TEXTS, tmp_path / "v.npy", num_nodes=0)
