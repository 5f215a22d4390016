"""The values that callbacks store and log at each step match `measure` on the weights of that step."""

from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from midlayer_encoders.callbacks import LayerMetricsCallback, LayerMetricsTrainerCallback, _measurement
from midlayer_encoders.metrics import alignment, curvature, dataset_entropy, infonce, prompt_entropy, uniformity
from midlayer_encoders.metrics.eigen import kernels_enabled
from midlayer_encoders.metrics.label_accuracy import label_folds
from tests.callbacks.oracles import (
    TEXTS,
    VIEWS,
    TrainerWeights,
    Weights,
    assert_frames_match,
    make_encoder,
    measure_steps,
)
from tests.callbacks.test_trainer import make_trainer
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, fit, neox

pytestmark = ADVICE

STEPS = [0, 2, 3]
KINDS = ["prompt_entropy", "block_influence", "half_match", "dataset_entropy", "cka", "infonce", "lidar", "alignment"]
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"metrics": "all", "views": 2},
    "some": {
        "metrics": KINDS, "layers": [-1, 1], "norm": "final", "pooling": "last", "views": 4, "seed": 3, "max_length": 20,
    },
    "given": {"metrics": ["curvature", *KINDS[3:]], "layers": [2, 0], "norm": "final", "views": VIEWS},
}  # fmt: skip


@pytest.fixture(scope="module", params=["lightning", pytest.param("transformers", marks=pytest.mark.slow)])
def finished_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return one run with a callback for each of the settings: the callbacks, the log, the folder and an encoder per step."""
    folder = tmp_path_factory.mktemp(request.param)
    common = {"every_n_steps": STEPS[:2], "token_budget": 40, "figures": False, "strict": True}
    if request.param == "lightning":
        weights: Any = Weights()
        callbacks: Any = {
            name: LayerMetricsCallback(TEXTS, TOKENIZER, name=name, **common, **SETTINGS[name]) for name in SETTINGS
        }
        logger = CSVLogger(folder)
        fit(Boring(neox()), folder, [weights, *callbacks.values()], max_steps=3, logger=logger)
        files = Path(logger.log_dir)
        logged = polars.read_csv(files / "metrics.csv", infer_schema_length=None).rows(named=True)
    else:
        weights = TrainerWeights()
        callbacks = {
            name: LayerMetricsTrainerCallback(TEXTS, name=name, **common, **SETTINGS[name]) for name in SETTINGS
        }
        hf_trainer = make_trainer(folder, [weights, *callbacks.values()], max_steps=3)
        hf_trainer.train()
        files, logged = folder, hf_trainer.state.log_history
    encoders = {step: make_encoder(weights.steps[step], folder / f"model{step}") for step in STEPS}
    return callbacks, logged, files, encoders


@pytest.mark.parametrize("name", SETTINGS)
def test_values_of_each_step_match_measure(finished_run: Any, name: str) -> None:
    callbacks, logged, files, encoders = finished_run
    callback = callbacks[name]
    expected = measure_steps(encoders, **SETTINGS[name])
    assert_frames_match(callback.frame, expected)
    assert polars.read_parquet(files / name / "history.parquet").equals(callback.frame)
    actual = {
        (f"step{entry['step']}", *key.removeprefix(f"{name}/").split("/layer_")): value
        for entry in logged
        for key, value in entry.items()
        if key.startswith(f"{name}/") and value is not None
    }
    expected_values = {(step, metric, f"{layer:02d}"): value for step, metric, layer, _, value in expected.rows()}
    assert actual.keys() == expected_values.keys()
    assert actual == pytest.approx(expected_values, rel=1e-4, abs=1e-5)


def states_by_hand(model: Any, ids: list[list[int]]) -> list[list[torch.Tensor]]:
    """Return the states of each text alone by layer: the residual stream after each block, in one unpadded pass."""
    blocks, all_states = model.gpt_neox.layers, []
    for row in ids:
        states: list[torch.Tensor] = []
        hooks = [blocks[0].register_forward_pre_hook(lambda _, args: states.append(args[0][0]))]
        hooks += [
            block.register_forward_hook(
                lambda _, __, out: states.append((out[0] if isinstance(out, tuple) else out)[0])
            )
            for block in blocks
        ]
        with torch.no_grad():
            model.eval()(input_ids=torch.tensor([row]))
        for hook in hooks:
            hook.remove()
        all_states.append(states)
    return all_states


def make_loader(rows: torch.Tensor, lengths: list[int], batch_size: int) -> DataLoader:
    mask = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
    items = [
        {"input_ids": ids, "attention_mask": real.long(), "labels": ids} for ids, real in zip(rows, mask, strict=True)
    ]
    return DataLoader(items, batch_size)


@pytest.mark.parametrize("more", [[], ["alignment", "uniformity"]])
def test_dataloader_is_read_up_to_max_inputs_with_its_views(more: list[str], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, first_view, second_view = (torch.randint(4, 90, (9, 11), generator=generator) for _ in range(3))
    lengths = [11, 4, 7, 5, 11, 6, 8, 9, 10]
    weights = Weights()
    callback = LayerMetricsCallback(
        make_loader(rows, lengths, 3), metrics=["prompt_entropy", "curvature", "dataset_entropy", "infonce", *more], max_inputs=7,
        views=[make_loader(first_view, lengths, 2), make_loader(second_view, lengths, 9)], every_n_steps=[2], figures=False, strict=True,
    )  # fmt: skip
    fit(Boring(neox()), tmp_path, [weights, callback], max_steps=2)
    model = neox()
    model.load_state_dict(weights.steps[2])
    first, *views = (
        states_by_hand(model, [row[:length].tolist() for row, length in zip(inputs[:7], lengths[:7], strict=True)])
        for inputs in (rows, first_view, second_view)
    )
    for layer in range(4):
        tokens = [states[layer] for states in first]
        pooled, *pooled_views = (
            torch.stack([states[layer].mean(dim=0) for states in inputs]).double() for inputs in (first, *views)
        )
        expected = {
            "prompt_entropy": torch.stack([prompt_entropy(token_states) for token_states in tokens]).mean(),
            "curvature": torch.stack([curvature(token_states) for token_states in tokens]).mean(),
            "dataset_entropy": dataset_entropy(pooled),
            "infonce": infonce(*pooled_views),
        }
        if more:
            expected |= {"alignment": alignment(pooled, pooled_views[0]), "uniformity": uniformity(pooled)}
        actual = dict(callback.frame.filter(polars.col("layer") == layer).select("name", "value").iter_rows())
        assert actual == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4)


def ridge_by_hand(vectors: torch.Tensor, labels: torch.Tensor, seed: int) -> float:
    """Return the accuracy of ridge regression on unit rows over folds, with the penalty chosen by leave-one-out."""
    rows = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
    targets = torch.eye(int(labels.max()) + 1, dtype=torch.float64)[labels]

    def predict(train: torch.Tensor, train_targets: torch.Tensor, test: torch.Tensor, penalty: float) -> torch.Tensor:
        center, level = train.mean(dim=0), train_targets.mean(dim=0)
        x, y = train - center, train_targets - level
        gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=torch.float64)
        return (test - center) @ torch.linalg.solve(gram, x.T @ y) + level

    fold, num_correct = label_folds(labels, seed=seed), 0
    for part in range(5):
        train, train_targets = rows[fold != part], targets[fold != part]
        scale = float((train - train.mean(dim=0)).square().sum() / len(train))
        penalties = [scale * 10.0**power for power in range(-4, 3)]
        errors = []
        for penalty in penalties:
            x, y = train - train.mean(dim=0), train_targets - train_targets.mean(dim=0)
            gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=torch.float64)
            hat = x @ torch.linalg.solve(gram, x.T) + 1 / len(x)
            errors.append(float(((y - (hat - 1 / len(x)) @ y) / (1 - hat.diagonal())[:, None]).square().sum()))
        best = penalties[min(range(7), key=errors.__getitem__)]
        num_correct += int(
            (predict(train, train_targets, rows[fold == part], best).argmax(dim=1) == labels[fold == part]).sum()
        )
    return num_correct / len(labels)


@pytest.mark.long
def test_label_accuracy_matches_ridge_by_hand(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    suffixes = ["a", "b", "c"]  # three letters after ten or more others: neither easy nor impossible
    numbers = [index % 3 for index in range(36)]
    letters = torch.randint(97, 123, (36, 20), generator=generator).tolist()
    texts = [
        "".join(map(chr, codes[: 10 + index * 7 % 10]))
        + suffixes[number] * 3  # varied lengths change the order of batches
        for index, (codes, number) in enumerate(zip(letters, numbers, strict=True))
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
    accuracies = {}
    for (norm, pooling, seed), callback in callbacks.items():
        normed = [
            [
                model.gpt_neox.final_layer_norm(states_of_layer) if norm == "final" else states_of_layer
                for states_of_layer in s
            ]
            for s in states
        ]
        vectors = [
            torch.stack([s[layer].mean(dim=0) if pooling == "mean" else s[layer][-1] for s in normed])
            for layer in range(4)
        ]
        expected = [ridge_by_hand(layer.detach(), torch.tensor(numbers), seed) for layer in vectors]
        frame = callback.frame.filter(name="label_accuracy")
        accuracies[norm, pooling, seed] = frame["value"].to_list()
        assert frame["layer"].to_list() == [0, 1, 2, 3]
        assert accuracies[norm, pooling, seed] == pytest.approx(expected)
    assert accuracies["none", "mean", 0] != accuracies["none", "mean", 1]


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_values_use_the_precision_of_the_run(library: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": [1], "strict": True, "figures": False}
    callback: Any
    weights: Any
    if library == "lightning":
        weights, callback = Weights(), LayerMetricsCallback(TEXTS, TOKENIZER, **common)
        fit(Boring(neox()), tmp_path, [weights, callback], max_steps=1, precision="bf16-mixed")
    else:
        weights, callback = TrainerWeights(), LayerMetricsTrainerCallback(TEXTS, **common)
        make_trainer(tmp_path, [weights, callback], max_steps=1, bf16=True).train()
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
    actual = torch.tensor(callback.frame["value"])
    # Closer to bfloat16 than to float32; not equal, since batches round differently from single texts.
    assert (actual - expected).abs()[1:].max() < 0.5 * (actual - full).abs()[1:].max()


@pytest.mark.parametrize(("limit", "expected"), [(10**9, False), (1, True)])
def test_small_measurement_skips_gpu_kernels(
    limit: int, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_measurement, "_MAX_CPU_SPECTRA", limit)
    model, kernel_states = Boring(neox()), set()
    callback = LayerMetricsCallback(TEXTS, TOKENIZER, metrics="curvature", every_n_steps=[0], figures=False)
    measure = _measurement.compute_metrics
    monkeypatch.setattr(
        _measurement, "compute_metrics", lambda inputs: kernel_states.add(kernels_enabled()) or measure(inputs)
    )
    fit(model, tmp_path, [callback], max_steps=1)
    assert kernel_states == {expected}
    assert kernels_enabled()
