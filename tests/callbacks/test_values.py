"""What the callbacks keep and log at each step is what `measure` finds in the weights of that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from midlayer_encoders.callbacks import LayerMetricsCallback, LayerMetricsTrainerCallback, _measurement
from midlayer_encoders.metrics import curvature, dataset_entropy, infonce, prompt_entropy
from midlayer_encoders.selection.ridge import label_folds
from midlayer_encoders.spectra import kernels_enabled
from tests.callbacks.oracles import TEXTS, VIEWS, TrainerWeights, Weights, assert_frames_match, encoder_of, measured
from tests.callbacks.test_trainer import trainer
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, fit, neox

pytestmark = ADVICE

STEPS = [0, 2, 3]
KINDS = ["prompt_entropy", "block_influence", "half_match", "dataset_entropy", "cka", "infonce", "lidar"]
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"metrics": "all", "views": 2},
    "some": {
        "metrics": KINDS, "layers": [-1, 1], "norm": "final", "pooling": "last", "views": 4, "seed": 3, "max_length": 20,
    },
    "given": {"metrics": ["curvature", *KINDS[3:]], "layers": [2, 0], "norm": "final", "views": VIEWS},
}  # fmt: skip


@pytest.fixture(scope="module", params=["lightning", pytest.param("transformers", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return one run under a callback for each of the settings: those, what was logged, files and an encoder a step."""
    folder = tmp_path_factory.mktemp(request.param)
    common = {"every_n_steps": STEPS[:2], "token_budget": 40, "figures": False, "strict": True}
    if request.param == "lightning":
        weights: Any = Weights()
        seen: Any = {
            name: LayerMetricsCallback(TEXTS, TOKENIZER, name=name, **common, **SETTINGS[name]) for name in SETTINGS
        }
        logger = CSVLogger(folder)
        fit(Boring(neox()), folder, [weights, *seen.values()], max_steps=3, logger=logger)
        files = Path(logger.log_dir)
        logged = polars.read_csv(files / "metrics.csv", infer_schema_length=None).rows(named=True)
    else:
        weights = TrainerWeights()
        seen = {name: LayerMetricsTrainerCallback(TEXTS, name=name, **common, **SETTINGS[name]) for name in SETTINGS}
        made = trainer(folder, [weights, *seen.values()], max_steps=3)
        made.train()
        files, logged = folder, made.state.log_history
    encoders = {step: encoder_of(weights.steps[step], folder / f"model{step}") for step in STEPS}
    return seen, logged, files, encoders


@pytest.mark.parametrize("name", SETTINGS)
def test_values_of_each_step_are_those_of_measure(run: Any, name: str) -> None:
    callbacks, logged, files, encoders = run
    seen = callbacks[name]
    expected = measured(encoders, **SETTINGS[name])
    assert_frames_match(seen.frame, expected)
    assert polars.read_parquet(files / name / "history.parquet").equals(seen.frame)
    found = {
        (f"step{entry['step']}", *key.removeprefix(f"{name}/").split("/layer_")): value
        for entry in logged
        for key, value in entry.items()
        if key.startswith(f"{name}/") and value is not None
    }
    wanted = {(step, metric, f"{layer:02d}"): value for step, metric, layer, _, value in expected.rows()}
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def states_by_hand(model: Any, ids: list[list[int]]) -> list[list[torch.Tensor]]:
    """Return the states of each text alone, by layer: the residual stream after each block, in one unpadded pass."""
    blocks, found = model.gpt_neox.layers, []
    for row in ids:
        kept: list[torch.Tensor] = []
        hooks = [blocks[0].register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))]
        hooks += [
            block.register_forward_hook(lambda _, __, out: kept.append((out[0] if isinstance(out, tuple) else out)[0]))
            for block in blocks
        ]
        with torch.no_grad():
            model.eval()(input_ids=torch.tensor([row]))
        for hook in hooks:
            hook.remove()
        found.append(kept)
    return found


def loaded(rows: torch.Tensor, lengths: list[int], batch_size: int) -> DataLoader:
    mask = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
    items = [
        {"input_ids": ids, "attention_mask": real.long(), "labels": ids} for ids, real in zip(rows, mask, strict=True)
    ]
    return DataLoader(items, batch_size)


def test_a_dataloader_of_inputs_is_read_up_to_max_inputs_with_its_views(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    rows, one, two = (torch.randint(4, 90, (9, 11), generator=draw) for _ in range(3))
    lengths = [11, 4, 7, 5, 11, 6, 8, 9, 10]
    weights = Weights()
    seen = LayerMetricsCallback(
        loaded(rows, lengths, 3), metrics=["prompt_entropy", "curvature", "dataset_entropy", "infonce"], max_inputs=7,
        views=[loaded(one, lengths, 2), loaded(two, lengths, 9)], every_n_steps=[2], figures=False, strict=True,
    )  # fmt: skip
    fit(Boring(neox()), tmp_path, [weights, seen], max_steps=2)
    model = neox()
    model.load_state_dict(weights.steps[2])
    first, *views = (
        states_by_hand(model, [row[:length].tolist() for row, length in zip(given[:7], lengths[:7], strict=True)])
        for given in (rows, one, two)
    )
    for layer in range(4):
        tokens = [states[layer] for states in first]
        pooled, *others = (
            torch.stack([states[layer].mean(dim=0) for states in given]).double() for given in (first, *views)
        )
        expected = {
            "prompt_entropy": torch.stack([prompt_entropy(each) for each in tokens]).mean(),
            "curvature": torch.stack([curvature(each) for each in tokens]).mean(),
            "dataset_entropy": dataset_entropy(pooled),
            "infonce": infonce(*others),
        }
        found = dict(seen.frame.filter(polars.col("layer") == layer).select("name", "value").iter_rows())
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4)


def ridge_by_hand(vectors: torch.Tensor, labels: torch.Tensor, seed: int) -> float:
    """Return the accuracy of ridge on unit rows, one fold left out at a time, the penalty by leaving one text out."""
    rows = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
    targets = torch.eye(int(labels.max()) + 1, dtype=torch.float64)[labels]

    def predict(train: torch.Tensor, wanted: torch.Tensor, test: torch.Tensor, penalty: float) -> torch.Tensor:
        center, level = train.mean(dim=0), wanted.mean(dim=0)
        x, y = train - center, wanted - level
        gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=torch.float64)
        return (test - center) @ torch.linalg.solve(gram, x.T @ y) + level

    fold, right = label_folds(labels, seed=seed), 0
    for part in range(5):
        train, wanted = rows[fold != part], targets[fold != part]
        scale = float((train - train.mean(dim=0)).square().sum() / len(train))
        penalties = [scale * 10.0**power for power in range(-4, 3)]
        errors = []
        for penalty in penalties:
            x, y = train - train.mean(dim=0), wanted - wanted.mean(dim=0)
            gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=torch.float64)
            hat = x @ torch.linalg.solve(gram, x.T) + 1 / len(x)
            errors.append(float(((y - (hat - 1 / len(x)) @ y) / (1 - hat.diagonal())[:, None]).square().sum()))
        best = penalties[min(range(7), key=errors.__getitem__)]
        right += int((predict(train, wanted, rows[fold == part], best).argmax(dim=1) == labels[fold == part]).sum())
    return right / len(labels)


def test_label_accuracy_is_that_of_ridge_by_hand(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(5)
    words = ["a", "b", "c"]  # three letters after ten or more others: neither easy nor hopeless
    numbers = [place % 3 for place in range(36)]
    letters = torch.randint(97, 123, (36, 20), generator=draw).tolist()
    texts = [
        "".join(map(chr, some[: 10 + place * 7 % 10])) + words[number] * 3  # lengths that mix the order of batches
        for place, (some, number) in enumerate(zip(letters, numbers, strict=True))
    ]
    labels = ["xyz"[number] for number in numbers]
    weights, common = Weights(), {"labels": labels, "token_budget": 60, "strict": True, "figures": False}
    callbacks = {
        (norm, pooling, seed): LayerMetricsCallback(
            texts, TOKENIZER, norm=norm, pooling=pooling, seed=seed, metrics=["infonce"] if seed == 4 else [], every_n_steps=[2], name=f"{norm}{seed}{pooling}", **common,
        )
        for norm, pooling, seed in [("none", "mean", 0), ("none", "mean", 1), ("final", "last", 0), ("final", "mean", 4)]
    }  # fmt: skip
    fit(Boring(neox()), tmp_path, [weights, *callbacks.values()], max_steps=2)
    model = neox()
    model.load_state_dict(weights.steps[2])
    states = states_by_hand(model, TOKENIZER(texts)["input_ids"])
    found = {}
    for (norm, pooling, seed), seen in callbacks.items():
        normed = [[model.gpt_neox.final_layer_norm(each) if norm == "final" else each for each in s] for s in states]
        vectors = [
            torch.stack([s[layer].mean(dim=0) if pooling == "mean" else s[layer][-1] for s in normed])
            for layer in range(4)
        ]
        expected = [ridge_by_hand(layer.detach(), torch.tensor(numbers), seed) for layer in vectors]
        frame = seen.frame.filter(name="label_accuracy")
        found[norm, pooling, seed] = frame["value"].to_list()
        assert frame["layer"].to_list() == [0, 1, 2, 3]
        assert found[norm, pooling, seed] == pytest.approx(expected)
    assert found["none", "mean", 0] != found["none", "mean", 1]


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_values_are_of_the_precision_that_the_run_itself_computes_in(library: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": [1], "strict": True, "figures": False}
    seen: Any
    weights: Any
    if library == "lightning":
        weights, seen = Weights(), LayerMetricsCallback(TEXTS, TOKENIZER, **common)
        fit(Boring(neox()), tmp_path, [weights, seen], max_steps=1, precision="bf16-mixed")
    else:
        weights, seen = TrainerWeights(), LayerMetricsTrainerCallback(TEXTS, **common)
        trainer(tmp_path, [weights, seen], max_steps=1, bf16=True).train()
    model = neox()
    model.load_state_dict(weights.steps[1])
    ids = TOKENIZER([text for text in TEXTS if len(text) > 2])["input_ids"]
    exact = states_by_hand(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = states_by_hand(model, ids)
    expected, full = (
        torch.tensor([float(torch.stack([curvature(text[layer]) for text in states]).mean()) for layer in range(4)])
        for states in (rounded, exact)
    )
    found = torch.tensor(seen.frame["value"])
    # Nearer to bfloat16 than to float32; not equal, since batches round otherwise than texts alone.
    assert (found - expected).abs()[1:].max() < 0.5 * (found - full).abs()[1:].max()


@pytest.mark.parametrize(("few", "wanted"), [(10**9, False), (1, True)])
def test_a_small_measurement_leaves_out_the_kernels_of_a_gpu(
    few: int, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_measurement, "_MAX_CPU_SPECTRA", few)
    model, seen = Boring(neox()), set()
    callback = LayerMetricsCallback(TEXTS, TOKENIZER, metrics="curvature", every_n_steps=[0], figures=False)
    measure = _measurement.compute_metrics
    monkeypatch.setattr(_measurement, "compute_metrics", lambda given: seen.add(kernels_enabled()) or measure(given))
    fit(model, tmp_path, [callback], max_steps=1)
    assert seen == {wanted}
    assert kernels_enabled()
