"""Runs that end with the best weights instead of the last: each measurement has the step of its weights."""

from pathlib import Path

import polars
import pytest
import torch
from transformers import EarlyStoppingCallback

from midlayer_encoders.callbacks import LayerMetricsTrainerCallback
from tests.callbacks.oracles import TEXTS, TrainerWeights
from tests.callbacks.test_run_files import by_hand
from tests.callbacks.test_trainer import make_trainer
from tests.callbacks.training import ADVICE
from tests.support.thinned import thinned

pytestmark = ADVICE

BEST: dict[str, tuple[dict[int, float], int, list[int]]] = {
    # name: scores by step, the step of the final weights, and the measured steps
    "neither is due": ({2: 3, 4: 2, 6: 1, 7: 0}, 2, [0, 2, 7]),
    "the last is best": ({2: 0.0, 4: 1.0, 6: 0.0, 7: 2.0}, 7, [0, 7]),
    "stopped early": ({2: 1.0, 4: 0.0}, 2, [0, 2]),
    # Checkpoints are written at steps 2, 4, 6 and 7.
    "a better one was not saved": ({1: 0, 2: 1, 3: 9, 4: 0, 5: 0, 6: 0, 7: 0}, 2, [0, 2, 7]),
    "the best was not saved": ({1: 9, 2: 1, 3: 0, 4: 0, 5: 0, 6: 0, 7: 0}, 7, [0, 7]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", thinned(BEST, 2))
def test_each_measurement_has_the_step_of_its_weights(name: str, tmp_path: Path) -> None:
    scores, loaded, steps = BEST[name]
    callback = LayerMetricsTrainerCallback(TEXTS, metrics="curvature", every_n_steps=[0], figures=False, strict=True)
    weights = TrainerWeights()
    early = [EarlyStoppingCallback(1)] if name == "stopped early" else []
    hf_trainer = make_trainer(
        tmp_path, [callback, weights, *early], max_steps=7, eval_strategy="steps", eval_steps=min(scores),
        save_strategy="steps", save_steps=2, save_only_model=True, load_best_model_at_end=True,
        metric_for_best_model="score", greater_is_better=True,
    )  # fmt: skip
    hf_trainer.compute_metrics = lambda _: {"score": scores[hf_trainer.state.global_step]}
    hf_trainer.train()
    body = {key: value for key, value in hf_trainer.model.state_dict().items() if key.startswith("gpt_neox")}
    assert all(torch.equal(value, weights.steps[loaded][key]) for key, value in body.items())
    values_by_step = {
        step: values["value"].to_list() for (step,), values in callback.frame.group_by("revision", maintain_order=True)
    }
    assert list(values_by_step) == [f"step{step}" for step in steps]
    for step in steps:
        assert values_by_step[f"step{step}"] == pytest.approx(by_hand(weights.steps[step]), rel=1e-4)
    key = "midlayer/curvature/layer_03"
    logged = {entry["step"]: (entry[key], entry["epoch"]) for entry in hf_trainer.state.log_history if key in entry}
    assert logged == {step: (values_by_step[f"step{step}"][3], pytest.approx(step / 8)) for step in steps}
    assert polars.read_parquet(tmp_path / "midlayer" / "history.parquet").equals(callback.frame)
