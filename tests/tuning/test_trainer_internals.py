"""Assumptions of `tuning/compat.py` about the trainer and PEFT: each test fails when a release changes one."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.extras import settings
from midlayer_encoders.extras.training.trainer_internals import (
    WEIGHTS,
    add_lora,
    check_lora,
    remove_autocast,
    remove_lora,
)
from tests.support.tiny_folders import TEXTS, Folder
from tests.tuning.rows import tuned


def test_only_adapters_are_trained_and_merging_keeps_the_vectors(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    before, kind = encoder.encode(TEXTS), type(encoder.transformer)
    add_lora(encoder, 4)
    trained = {name: item for name, item in encoder.named_parameters() if item.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    with torch.no_grad():
        for item in trained.values():
            item.normal_(std=0.1)
    changed = encoder.eval().encode(TEXTS)
    remove_lora(encoder)
    np.testing.assert_allclose(encoder.encode(TEXTS), changed, atol=1e-5)
    assert np.abs(changed - before).max() > 0.01
    assert type(encoder.transformer) is kind
    assert not hasattr(encoder.transformer, "peft_config")
    assert not any("lora" in name for name, _ in encoder.named_modules())
    assert all(item.requires_grad for item in encoder.parameters())


def test_checking_for_adapters_leaves_the_model_unchanged(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    names, before, figure = [name for name, _ in encoder.named_modules()], encoder.encode(TEXTS), torch.get_rng_state()
    check_lora(encoder)
    assert [name for name, _ in encoder.named_modules()] == names
    assert not hasattr(encoder.transformer, "peft_config")
    assert torch.equal(torch.get_rng_state(), figure)
    np.testing.assert_array_equal(encoder.encode(TEXTS), before)


@pytest.mark.parametrize(("lora", "package"), [(False, "accelerate"), (4, "peft")])
def test_missing_package_is_named_immediately(
    lora: int, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name == package else find(name))
    words = rf"{package} is not installed: pip install 'midlayer-encoders\[tuning\]'"
    with pytest.raises(MidlayerError, match=words):
        tuned("no/such-model", tmp_path, lora=lora)


@pytest.mark.long
def test_a_checkpoint_holds_what_is_trained_and_the_best_is_loaded(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def remove_others(path: Any, *args: Any, **keywords: Any) -> None:
        if not Path(path).name.startswith("checkpoint"):
            remove(path, *args, **keywords)

    monkeypatch.setattr("shutil.rmtree", remove_others)
    result = tuned(tiny_folder("Llama"), tmp_path, learning_rate=0.02, max_steps=8, checkpoints=8, patience=9)
    evaluated = result.trained.losses.drop_nulls("held_out").filter(pl.col("step") > 0).sort("held_out")
    assert result.trained.best_step == evaluated["step"][0] < result.trained.steps == 8
    folder = tmp_path / "checkpoints" / f"checkpoint-{result.trained.best_step}"
    best, own_values = safetensors.torch.load_file(folder / WEIGHTS), dict(result.encoder.named_parameters())
    assert set(best) == set(own_values)
    for name, item in best.items():
        torch.testing.assert_close(own_values[name].detach(), item, rtol=0, atol=0)
    assert not (folder / "config.json").exists()


def test_vectors_are_float32_again_after_a_run_under_autocast(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, dtype="float32", device="cpu")
    expected = encoder.encode(TEXTS)
    AcceleratorState._reset_state(reset_partial_state=True)  # of trainers before: a process has one
    try:
        Accelerator(cpu=True, mixed_precision="bf16").prepare_model(encoder)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert np.abs(encoder.encode(TEXTS) - expected).max() > 1e-4  # as the trainer leaves it
    remove_autocast(encoder)
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected)
