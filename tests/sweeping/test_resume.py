"""A sweep called again in the same folder: what has not changed is not done again, what has is never taken for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.sweeping import mteb_jobs
from tests.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, mteb_score, near, scores, sweep
from tests.tasks.rows import ROWS, SENTENCES, write

Folder = Callable[[str], str]
pytestmark = MTEB

HERE: dict[str, Any] = {key: value for key, value in QUICK.items() if key != "device"} | {"layers": [1, 3]}


@contextmanager
def passed(encoder: LayerEncoder) -> Iterator[set[str]]:
    """Collect the beginnings of the texts that pass through the model."""
    seen: set[str] = set()

    def note(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        pad = encoder.tokenizer.pad_token_id  # a causal model passes without a mask
        texts = [ids[ids != pad] for ids in kwargs["input_ids"]]
        seen.update("".join(encoder.tokenizer.convert_ids_to_tokens(ids))[:12] for ids in texts)

    hook = encoder[0].model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    hook.remove()


HEADS = {text[:12] for text in SENTENCES}


def train(encoder: LayerEncoder) -> None:
    with torch.no_grad():
        encoder[0].model.layers[0].mlp.down_proj.weight.mul_(4)


def shorten(encoder: LayerEncoder) -> None:
    encoder.max_seq_length = 12


def truncate(encoder: LayerEncoder) -> None:
    encoder.truncate_dim = 8


def ask(encoder: LayerEncoder) -> None:
    encoder.prompts["STS"] = "are these two the same? "


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (train, {}),
        pytest.param(shorten, {}, marks=pytest.mark.slow),
        pytest.param(truncate, {}, marks=pytest.mark.slow),
        (ask, {}),
        (None, {"norm": "none"}),
        pytest.param(None, {"pooling": "last"}, marks=pytest.mark.slow),
    ],
    ids=["weights", "max_length", "truncate_dim", "prompt", "norm", "pooling"],
)
def test_one_changed_setting_reuses_neither_scores_nor_vectors(
    change: Callable[[LayerEncoder], None] | None, options: dict[str, Any], tiny_folder: Folder, tmp_path: Path
) -> None:
    task, out = near(tmp_path), tmp_path / "out"
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    before = scores(sweep(encoder, task, out=out, **HERE), task)
    other = encoder if change is not None else LayerEncoder(tiny_folder("Llama"), -1, device="cpu", **options)
    if change is not None:
        change(other)
    with passed(other) as seen:
        after = scores(sweep(other, task, out=out, **HERE), task)
    prompted = {"are these two the same? "[:12]} if change is ask else HEADS
    assert prompted <= seen
    cut = LayerEncoder(tiny_folder("Llama"), 3, device="cpu", **options)
    if change is not None:
        change(cut)
    assert after[3] == pytest.approx(mteb_score(cut, task), abs=1e-3)
    assert after[3] != pytest.approx(before[3], abs=1e-3)
    if change is None:  # back to what it was: everything is still there
        with passed(encoder) as seen:
            assert scores(sweep(encoder, task, out=out, **HERE), task) == before
        assert not HEADS & seen


def test_unchanged_it_passes_no_text_and_new_layers_or_rows_pass_only_what_they_need(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    task, out = near(tmp_path), tmp_path / "out"
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")

    def swept(path: Path, **changes: Any) -> tuple[dict[int, float], set[str]]:
        with passed(encoder) as seen:
            found = scores(sweep(encoder, path, **({"out": out} | HERE | changes)), path)
        return found, seen & HEADS

    first, seen = swept(task)
    assert seen == HEADS
    assert swept(task) == (first, set())
    assert swept(task, layers=[1]) == ({1: first[1]}, set())
    # Into another folder with the same store: scored anew, from the same vectors.
    assert swept(task, out=tmp_path / "other", store=out / "embeddings") == (first, set())
    # Another layer was not stored, so that every text passes once more.
    more, seen = swept(task, layers=[1, 2, 3])
    assert seen == HEADS
    assert {layer: more[layer] for layer in first} == pytest.approx(first, abs=1e-6)
    # Other grades of the same texts are another task, whose vectors are there already.
    graded = [{**row, "score": (row["score"] * 5) % 7} for row in ROWS["STS"]]
    again, seen = swept(write(task, graded), layers=[1, 2, 3])
    assert not seen
    cut = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    assert again[2] == pytest.approx(mteb_score(cut, task), abs=1e-3)
    assert again[2] != pytest.approx(more[2], abs=1e-3)


def test_what_no_worker_has_begun_when_a_sweep_is_stopped_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Future[mteb_jobs.Score]] = [Future() for _ in range(3)]
    begun[0].set_result(mteb_jobs.Score("task", 0))
    monkeypatch.setattr(mteb_jobs.Workers, "begin", lambda *_: begun)
    scores = mteb_jobs.Workers(2, 3).run([None] * 3)  # type: ignore[list-item]
    assert next(scores).task == "task"
    scores.close()  # type: ignore[attr-defined]  # as an error or Ctrl-C does
    assert [one.cancelled() for one in begun] == [False, True, True]
