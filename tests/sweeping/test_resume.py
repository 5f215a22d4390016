"""A repeated sweep in the same folder reuses unchanged results and never changed ones."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import DiskFullError
from midlayer_encoders.sweeping import mteb_jobs
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder, save_tiny
from tests.sweeping.scoring import QUICK, layer_scores_of, mteb_score, sweep, write_sts_task
from tests.tasks.rows import ROWS, SENTENCES, write

pytestmark = MTEB

IN_MEMORY: dict[str, Any] = {key: value for key, value in QUICK.items() if key != "device"} | {"layers": [1, 3]}


@contextmanager
def record_texts(encoder: LayerEncoder) -> Iterator[set[str]]:
    """Collect the first characters of the texts that pass through the model."""
    texts_seen: set[str] = set()

    def record(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        pad = encoder.tokenizer.pad_token_id  # a causal model gets no mask
        texts = [ids[ids != pad] for ids in kwargs["input_ids"]]
        texts_seen.update("".join(encoder.tokenizer.convert_ids_to_tokens(ids))[:12] for ids in texts)

    hook = encoder[0].model.register_forward_pre_hook(record, with_kwargs=True)
    yield texts_seen
    hook.remove()


HEADS = {text[:12] for text in SENTENCES}


def train(encoder: LayerEncoder) -> None:
    with torch.no_grad():
        encoder[0].model.layers[0].mlp.down_proj.weight.mul_(4)


def shorten(encoder: LayerEncoder) -> None:
    encoder.max_seq_length = 12


def truncate(encoder: LayerEncoder) -> None:
    encoder.truncate_dim = 8


def add_prompt(encoder: LayerEncoder) -> None:
    encoder.prompts["STS"] = "are these two the same? "


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (train, {}),
        pytest.param(shorten, {}, marks=pytest.mark.slow),
        pytest.param(truncate, {}, marks=pytest.mark.slow),
        (add_prompt, {}),
        (None, {"norm": "none"}),
        pytest.param(None, {"pooling": "last"}, marks=pytest.mark.slow),
    ],
    ids=["weights", "max_length", "truncate_dim", "prompt", "norm", "pooling"],
)
def test_changed_setting_reuses_neither_scores_nor_vectors(
    change: Callable[[LayerEncoder], None] | None, options: dict[str, Any], tiny_folder: Folder, tmp_path: Path
) -> None:
    task, out = write_sts_task(tmp_path), tmp_path / "out"
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with record_texts(encoder):  # a hook is part of the key
        before = layer_scores_of(sweep(encoder, task, out=out, **IN_MEMORY), task)
    changed_encoder = encoder if change is not None else LayerEncoder(tiny_folder("Llama"), -1, device="cpu", **options)
    if change is not None:
        change(changed_encoder)
    with record_texts(changed_encoder) as texts_seen:
        after = layer_scores_of(sweep(changed_encoder, task, out=out, **IN_MEMORY), task)
    prompted = {"are these two the same? "[:12]} if change is add_prompt else HEADS
    assert prompted <= texts_seen
    cut = LayerEncoder(tiny_folder("Llama"), 3, device="cpu", **options)
    if change is not None:
        change(cut)
    assert after[3] == pytest.approx(mteb_score(cut, task), abs=1e-3)
    assert after[3] != pytest.approx(before[3], abs=1e-3)
    if change is None:  # the original setting is still stored
        with record_texts(encoder) as texts_seen:
            assert layer_scores_of(sweep(encoder, task, out=out, **IN_MEMORY), task) == before
        assert not HEADS & texts_seen


def test_repeated_sweep_passes_no_text_and_new_layers_pass_only_what_they_need(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    task, out = write_sts_task(tmp_path), tmp_path / "out"
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")

    def run_sweep(path: Path, **changes: Any) -> tuple[dict[int, float], set[str]]:
        with record_texts(encoder) as texts_seen:
            layer_scores = layer_scores_of(sweep(encoder, path, **({"out": out} | IN_MEMORY | changes)), path)
        return layer_scores, texts_seen & HEADS

    first, texts_seen = run_sweep(task)
    assert texts_seen == HEADS
    assert run_sweep(task) == (first, set())
    assert run_sweep(task, layers=[1]) == ({1: first[1]}, set())
    # Into another folder with the same store: scored again from the same vectors.
    assert run_sweep(task, out=tmp_path / "other", store=out / "embeddings") == (first, set())
    # Another layer was not stored, so every text passes once more.
    three_layers, texts_seen = run_sweep(task, layers=[1, 2, 3])
    assert texts_seen == HEADS
    assert {layer: three_layers[layer] for layer in first} == pytest.approx(first, abs=1e-6)
    # Other grades of the same texts form another task, whose vectors are already stored.
    graded = [{**row, "score": (row["score"] * 5) % 7} for row in ROWS["STS"]]
    regraded_scores, texts_seen = run_sweep(write(task, graded), layers=[1, 2, 3])
    assert not texts_seen
    cut = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    assert regraded_scores[2] == pytest.approx(mteb_score(cut, task), abs=1e-3)
    assert regraded_scores[2] != pytest.approx(three_layers[2], abs=1e-3)


def test_stopped_sweep_ends_its_workers(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_disk(*_: Any) -> None:
        raise DiskFullError("made")

    ended: list[bool] = []
    monkeypatch.setattr(mteb_jobs.Workers, "kill", lambda *_: ended.append(True))
    monkeypatch.setattr(mteb_jobs, "_evaluate", fill_disk)
    with pytest.raises(DiskFullError):
        sweep(tiny_folder("Llama"), write_sts_task(tmp_path), out=tmp_path / "out", **QUICK)
    assert ended


def change_digits(path: Path) -> None:
    """Change every digit of the scores in a JSON file."""
    head, mark, tail = path.read_text().partition('"scores"')
    path.write_text(head + mark + re.sub(r"0\.(\d)", lambda match: f"0.{9 - int(match[1])}", tail))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["together", "mteb"])
def test_changed_digit_of_a_saved_score_is_never_returned(kind: str, tiny_folder: Folder, tmp_path: Path) -> None:
    task, out = write_sts_task(tmp_path), tmp_path / "out"
    first = sweep(tiny_folder("Llama"), task, out=out, **QUICK, layers=[1, 3])
    changed = [path for path in (out / kind).rglob("*.json") if '"scores"' in path.read_text()]
    assert changed
    for path in changed:
        change_digits(path)
    assert sweep(tiny_folder("Llama"), task, out=out, **QUICK, layers=[1, 3]).frame.equals(first.frame)


@pytest.mark.long
def test_changed_config_reuses_neither_scores_nor_vectors(tmp_path: Path) -> None:
    task, out, folder = write_sts_task(tmp_path), tmp_path / "out", Path(save_tiny("Llama", tmp_path / "model"))
    before = layer_scores_of(sweep(str(folder), task, out=out, **QUICK, layers=[1, 3]), task)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    after = layer_scores_of(sweep(str(folder), task, out=out, **QUICK, layers=[1, 3]), task)
    assert after[3] == pytest.approx(mteb_score(LayerEncoder(str(folder), 3, device="cpu"), task), abs=1e-3)
    assert after[3] != pytest.approx(before[3], abs=1e-3)
