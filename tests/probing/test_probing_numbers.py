"""Every number of a probe, compared with a computation by hand: training loop, split, intervals."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli._labeled_examples import read_examples
from midlayer_encoders.extras.probing import (
    AttentiveProbes,
    CachedTokens,
    LinearProbes,
    LiveTokens,
    ProbeResult,
    ProbeSettings,
    Split,
    probe_tokens,
    split_examples,
)
from midlayer_encoders.metrics.measuring import layer_reader
from tests.support.families import DEPTH
from tests.support.grouped import probe
from tests.support.tiny_folders import Folder

TEXTS = [f"{'abcdefgh'[n % 8] * (2 + n % 5)} {n * n} {'xyz'[n % 3]}" for n in range(60)]
LABELS = ["pear", "fig", "kiwi"]


@pytest.fixture(scope="module")
def llama(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the loop -------------------------------------------------------------------------------------------------------


def trained_by_hand(
    head: nn.Module, states: Tensor, labels: Tensor, split: Split, *, epochs: int, patience: int, batch_size: int,
    learning_rate: float, weight_decay: float, seed: int,
) -> tuple[Tensor, float, int]:  # fmt: skip
    """Train the probe of one layer in a plain loop; return the correct examples, the validation accuracy and the epoch."""
    mask = torch.ones(states.shape[1:3], dtype=torch.bool)
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, weight_decay=weight_decay, betas=(0.9, 0.95))
    steps = epochs * math.ceil(len(split.train) / batch_size)
    generator, process = seeded(seed), 0
    best, lowest, transformed = (-1.0, math.inf), math.inf, 0
    saved: tuple[Tensor, float, int] = (torch.empty(0), 0.0, 0)
    for epoch in range(1, epochs + 1):
        head.train()
        order = split.train[torch.randperm(len(split.train), generator=generator)]
        for batch in order.split(batch_size):
            optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * process / steps)) / 2
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(states[:, batch], mask[batch])[0], labels[batch]).backward()
            optimizer.step()
            process += 1
        head.eval()
        with torch.no_grad():
            logits = head(states[:, split.validation], mask[split.validation])[0]
            named = head(states[:, split.test], mask[split.test])[0].argmax(dim=1)
        accuracy = float((logits.argmax(dim=1) == labels[split.validation]).double().mean())
        loss = float(nn.functional.cross_entropy(logits.double(), labels[split.validation]))
        if accuracy > best[0] or loss < lowest:
            transformed = epoch
        lowest = min(loss, lowest)
        if accuracy > best[0] or (accuracy == best[0] and loss < best[1]):
            best, saved = (accuracy, loss), (named == labels[split.test], accuracy, epoch)
        if epoch - transformed >= patience:
            break
    return saved


@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("kind", ["linear", "attentive"])
def test_each_layer_ends_like_its_own_training_loop(kind: Any, patience: int) -> None:
    labels = torch.arange(110) % 3
    states = torch.randn(3, 110, 4, 8, generator=seeded(0))
    for layer, signal in enumerate((0.0, 1.0, 4.0)):
        states[layer, :, :, :3] += signal * torch.eye(3)[labels][:, None]
    split = split_examples(labels, seed=4)
    options: dict[str, Any] = {"epochs": 9, "patience": patience, "batch_size": 16, "learning_rate": 3e-2}
    options |= {"weight_decay": 0.3, "seed": 6}
    source = CachedTokens(states, torch.ones(110, 4, dtype=torch.bool))
    settings = ProbeSettings(**options, heads=2)
    right, validation, epochs = probe_tokens(source, labels, split, kind=kind, settings=settings)
    for layer in range(3):
        head = LinearProbes(1, 8, 3, seed=6) if kind == "linear" else AttentiveProbes(1, 8, 3, heads=2, seed=6)
        expected = trained_by_hand(head, states[layer : layer + 1], labels, split, **options)
        assert (right[layer] == expected[0]).double().mean() >= 0.95, "but for a tie of rounding"
        assert (float(validation[layer]), int(epochs[layer])) == (pytest.approx(expected[1]), expected[2])
    assert len(set(epochs.tolist())) > 1, "or one epoch for all would do"


# --- end to end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["final", "none"])
def test_linear_probe_by_hand_with_string_labels_and_an_unbalanced_test_set(norm: Any, tiny_folder: Folder) -> None:
    draws = np.random.default_rng(1)
    labels = [LABELS[k] for k in draws.integers(0, 3, size=40)]
    reference = ["kiwi"] * 14 + ["fig"] * 4 + ["pear"] * 2
    options: dict[str, Any] = {"epochs": 7, "patience": 3, "batch_size": 16, "learning_rate": 3e-2}
    options |= {"weight_decay": 0.3, "seed": 2}
    result = probe(
        LayerEncoder(tiny_folder("Llama"), -1, norm=norm, device="cpu"), TEXTS[:40], labels, test_inputs=TEXTS[40:],
        test_labels=reference, kind="linear", layers=[1, -1], dataset="fruit", **options,
    )  # fmt: skip
    numbers = torch.tensor([sorted(LABELS).index(item) for item in labels + reference])
    split = split_examples(numbers, num_test=20, seed=2)
    assert (result.classes, result.layers, result.num_train) == (sorted(LABELS), (1, DEPTH), len(split.train))
    assert result.chance == 14 / 20
    for row, layer in enumerate((1, DEPTH)):
        encoder = LayerEncoder(tiny_folder("Llama"), layer, norm=norm, device="cpu")
        vectors = encoder.encode(TEXTS, convert_to_tensor=True).clone()[None, :, None]
        head = LinearProbes(1, vectors.shape[-1], 3, seed=2)
        right, validation, epoch = trained_by_hand(head, vectors, numbers, split, **options)
        assert (result.right[row] == right).double().mean() >= 0.95, "but for a tie of rounding"
        assert (float(result.validation[row]), int(result.epochs[row])) == (pytest.approx(validation), epoch)
        assert float(result.accuracy[row]) == pytest.approx(np.mean(result.right[row].numpy()))
    assert result.frame.select("layer", "depth", "dataset").rows() == [
        (1, 1 / DEPTH, "fruit (linear probe)"),
        (DEPTH, 1.0, "fruit (linear probe)"),
    ]


def test_chance_level_is_independent_of_class_names(llama: LayerEncoder) -> None:
    for names in (("a", "b"), ("b", "a")):
        labels = [names[n % 2] for n in range(20)]
        result = probe(
            llama, TEXTS[:20], labels, test_inputs=TEXTS[20:30], test_labels=[names[n > 1] for n in range(10)],
            kind="linear", layers=[0], epochs=1,
        )  # fmt: skip
        assert result.chance == 0.8


@pytest.mark.parametrize("num_test", [0, 20])
def test_split_has_no_leaks_holds_every_class_and_follows_its_seed(num_test: int) -> None:
    labels = torch.tensor([0] * 50 + [1] * 20 + [2] * 10)[torch.randperm(80, generator=seeded(3))]
    split, same, second = (split_examples(labels, num_test=num_test, seed=seed) for seed in (0, 0, 1))
    parts = [set(part.tolist()) for part in (split.train, split.validation, split.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 80
    if num_test:
        assert split.test.tolist() == list(range(60, 80))
    inputs = labels[: 80 - num_test].bincount().tolist()
    for part in (split.validation,) if num_test else (split.validation, split.test):
        stored = labels[part].bincount(minlength=3).tolist()
        assert all(abs(own_rows - complete / 5) <= 1 for own_rows, complete in zip(stored, inputs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((split.train, split.test), (same.train, same.test), strict=True))
    assert not torch.equal(split.train, second.train)
    assert all(part.tolist() == sorted(part.tolist()) for part in (split.train, split.validation, split.test))


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["final", "none"])
def test_tokens_are_the_hidden_states_of_the_model(norm: Any, llama: LayerEncoder) -> None:
    live = LiveTokens(layer_reader(llama, layers=[0, 3, -1], norm=norm), TEXTS)
    index = torch.tensor([7, 0, 4])
    states, mask = live.batch(index)
    assert live.shape == (3, states.shape[3])
    model = llama[0].model
    for place, text in enumerate(index.tolist()):
        with torch.no_grad():
            outputs = model(**llama.tokenizer(TEXTS[text], return_tensors="pt"), output_hidden_states=True)
            raw = []
            hook = model.layers[-1].register_forward_hook(lambda _m, _a, out: raw.append(out))
            model(**llama.tokenizer(TEXTS[text], return_tensors="pt"))
            hook.remove()
            last = raw[0][0] if isinstance(raw[0], tuple) else raw[0]
            expected = [outputs.hidden_states[0], outputs.hidden_states[3], last.view(1, -1, states.shape[3])]
            expected = [model.norm(item) for item in expected] if norm == "final" else expected
        assert int(mask[place].sum()) == len(TEXTS[text])
        for layer in range(3):
            torch.testing.assert_close(states[layer, place][mask[place]], expected[layer][0], rtol=1e-4, atol=1e-5)


def test_stored_tokens_and_a_pass_per_step_give_the_same_numbers(tiny_folder: Folder) -> None:
    raw = LayerEncoder(tiny_folder("Llama"), -1, norm="none", device="cpu")
    labels = ["xyz"[n % 3] for n in range(60)]
    options: dict[str, Any] = {"layers": [0, 2], "epochs": 8, "batch_size": 12, "learning_rate": 5e-2}
    reports: list[str] = []
    saved, live = (
        probe(raw, TEXTS, labels, keep_gb=gb, progress=lambda case, *_: reports.append(case), **options)
        for gb in (1, 0)
    )
    assert saved.epochs.tolist() == live.epochs.tolist()
    assert saved.validation.tolist() == pytest.approx(live.validation.tolist())
    assert saved.right.tolist() == live.right.tolist()
    assert reports.count("training") == 16
    assert 0.5 < float(saved.accuracy.mean()) < 1, "something is learned, and not all"


def test_only_the_seed_changes_split_weights_and_order(llama: LayerEncoder) -> None:
    labels = ["xyz"[n % 3] for n in range(60)]
    options: dict[str, Any] = {"layers": [1], "epochs": 2, "batch_size": 12, "learning_rate": 1e-2}
    state = torch.get_rng_state()
    first, same, second = (probe(llama, TEXTS, labels, seed=seed, **options) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not ours"
    assert (first.right.tolist(), first.validation.tolist()) == (same.right.tolist(), same.validation.tolist())
    assert first.table.equals(same.table)
    assert (first.right.tolist(), first.validation.tolist()) != (second.right.tolist(), second.validation.tolist())
    weights = [LinearProbes(1, 8, 3, seed=seed).weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# --- what is said of them -------------------------------------------------------------------------------------------


def test_intervals_of_accuracy_and_gain_match_numpy() -> None:
    from scipy.stats import binomtest

    right = torch.rand(3, 37, generator=seeded(8)) < torch.tensor([[0.5], [0.9], [0.6]])
    result = ProbeResult(
        model="m", revision="r", num_layers=8, layers=(0, 4, 6), kind="linear", dataset="d", classes=["a", "b"],
        right=right, validation=torch.tensor([0.4, 0.8, 0.7]), epochs=torch.tensor([3, 1, 2]), chance=0.5, num_train=8,
    )  # fmt: skip
    for row, (layer, accuracy, low, high, validation, epoch) in enumerate(result.table.iter_rows()):
        hits = int(right[row].sum())
        expected = binomtest(hits, 37).proportion_ci(method="wilson")
        assert (accuracy, low, high) == pytest.approx((hits / 37, expected.low, expected.high), abs=1e-6)
        assert (layer, epoch) == ((0, 4, 6)[row], (3, 1, 2)[row])
        assert validation == pytest.approx((0.4, 0.8, 0.7)[row])
    figure = torch.randint(37, (1000, 37), generator=seeded(5)).numpy()
    spread = right[1].numpy()[figure].mean(axis=1) - right[2].numpy()[figure].mean(axis=1)
    gain = (right[1].sum() - right[2].sum()).item() / 37
    assert result.gain(seed=5) == pytest.approx((gain, *np.quantile(spread, [0.025, 0.975])))
    assert result.best_layer == 4


def test_paths_in_a_table_are_relative_to_it_and_labels_are_strings(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("path,label\na/1.png,10\n2.png,9\n")
    inputs, labels = read_examples(tmp_path / "rows.csv", ["image"])
    assert inputs == [str(tmp_path / "a/1.png"), str(tmp_path / "2.png")]
    assert labels == ["10", "9"]
