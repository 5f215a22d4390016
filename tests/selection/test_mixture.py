"""Layer weights learned from labels: compared with the definition, on synthetic layers, and in reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder, select_layer
from midlayer_encoders.cli import app
from midlayer_encoders.cli._output import print_encoder_lines
from midlayer_encoders.cli.select import encoder_lines
from midlayer_encoders.errors import OptionError
from midlayer_encoders.selection import ridge
from midlayer_encoders.selection.ridge import (
    _leave_one_out_error,
    class_numbers,
    held_out_mixture,
    mix_layers,
    mixture_correct,
    mixture_on_test,
    mixture_weights,
    ridge_correct,
    ridge_predict,
)
from tests.grouped import probe

Folder = Callable[[str], str]

NOUNS = {"food": ["apple pie", "brown bread", "green soup"], "metal": ["iron ore", "tin cans", "gold coins"]}
TEXTS = [f"{noun} number {n}" for n in range(8) for nouns in NOUNS.values() for noun in nouns]
LABELS = [label for _ in range(8) for label, nouns in NOUNS.items() for _ in nouns]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def halves(count: int = 120) -> tuple[Tensor, Tensor]:
    """Return four layers of which the second and third each encode one half of four classes."""
    classes = torch.arange(count) % 4
    vectors = seeded(4, count, 8)
    vectors[1, :, 0] += 6.0 * (classes % 2)
    vectors[2, :, 1] += 6.0 * (classes // 2)
    return vectors, classes


def test_error_is_the_leave_one_out_error() -> None:
    rows, targets, penalty = seeded(12, 5).double(), seeded(12, 3, seed=1).double(), 0.3
    targets = targets - targets.mean(dim=0)
    unit = torch.nn.functional.normalize(rows, dim=-1)
    scale = (unit - unit.mean(dim=0)).square().sum(dim=1).mean()
    errors = []
    for left_out in range(12):
        saved = torch.arange(12) != left_out
        # With an unpenalized intercept: centered on all rows, like the closed form.
        x = torch.cat([unit - unit.mean(dim=0), torch.ones(12, 1).double()], dim=1)
        ridge = penalty * scale * torch.diag(torch.tensor([1.0] * 5 + [0.0]).double())
        solved = torch.linalg.solve(x[saved].mT @ x[saved] + ridge, x[saved].mT @ targets[saved])
        errors.append((targets[left_out] - x[left_out] @ solved).square().sum())
    result = _leave_one_out_error(rows, targets, torch.tensor(penalty).double())
    torch.testing.assert_close(result, torch.stack(errors).mean())


def test_complementary_layers_are_mixed_and_significantly_better() -> None:
    vectors, classes = halves()
    weights = mixture_weights(vectors, classes)
    assert float(weights.sum()) == pytest.approx(1)
    assert weights.topk(2).indices.sort().values.tolist() == [1, 2]
    right = ridge_correct(vectors, classes).double()
    actual = held_out_mixture(vectors, classes, right)
    assert actual.better
    assert set(actual.layers) >= {1, 2}
    assert actual.accuracy > actual.single_accuracy + 0.2
    assert actual.accuracy == pytest.approx(float(mixture_correct(vectors, classes).double().mean()))
    assert f"significantly better than layer {actual.single} alone" in actual.verdict()
    points = 100 * (actual.accuracy - actual.single_accuracy)
    assert actual.low < points < actual.high
    assert f"({points:+.1f} points, {actual.low:+.1f} to {actual.high:+.1f})" in actual.verdict()


def test_single_sufficient_layer_is_not_beaten() -> None:
    vectors, classes = seeded(4, 80, 8), torch.arange(80) % 2
    vectors[2, :, 0] += 9.0 * classes
    actual = held_out_mixture(vectors, classes, ridge_correct(vectors, classes).double())
    assert actual.single == 2
    assert not actual.better
    assert "layer 2 alone" in actual.verdict()
    worse = replace(actual, layers=(1, 2), weights=(0.5, 0.5), low=-9.0, high=-1.0)
    assert not worse.better
    assert "significantly worse than layer 2" in worse.verdict()
    assert "not significantly better than" in replace(worse, high=1.0).verdict()


def test_held_out_labels_are_not_used() -> None:
    vectors, classes = seeded(6, 200, 16), torch.randint(4, (200,), generator=torch.Generator().manual_seed(3))
    assert float(mixture_correct(vectors, classes).double().mean()) < 0.35  # guessing: 0.25
    vectors, classes = halves()
    train, test = torch.arange(80), torch.arange(80, 120)
    wrong = classes.clone()
    wrong[80:] = 0
    reports = [mixture_on_test(vectors, item, train, test, [0, 1, 2, 3], seed=0) for item in (classes, wrong)]
    assert (reports[0].layers, reports[0].weights) == (reports[1].layers, reports[1].weights)
    assert reports[0].accuracy > 0.8 > reports[1].accuracy


def test_weights_of_a_fold_are_fitted_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, classes = halves(40)
    vectors[0, :, 7] = torch.arange(40)  # identifies the text
    recorded: list[set[int]] = []

    def fitted(sample: Tensor, labels: Tensor) -> Tensor:
        recorded.append(set(sample[0, :, 7].int().tolist()))
        assert labels.tolist() == [int(classes[text]) for text in sample[0, :, 7].int().tolist()]
        return torch.tensor([0.0, 0.5, 0.5, 0.0])

    monkeypatch.setattr(ridge, "mixture_weights", fitted)
    mixture_correct(vectors, classes)
    assert [len(texts) for texts in recorded] == [32] * 5
    assert [text for text in range(40) if sum(text not in texts for texts in recorded) != 1] == []


def test_scale_of_a_layer_does_not_matter() -> None:
    vectors, classes = halves()
    plain = mixture_weights(vectors, classes)
    larger = mixture_weights(vectors * torch.tensor([1.0, 1000.0, 1.0, 1.0])[:, None, None], classes)
    expected = plain / torch.tensor([1.0, 1000.0, 1.0, 1.0])
    torch.testing.assert_close(larger, expected / expected.sum(), rtol=2e-2, atol=1e-5)


# --- reports ---------------------------------------------------------------------------------------------------------


def test_select_returns_a_mixture_that_is_significantly_better(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    selection = select_layer(encoder, TEXTS, LABELS, mixture=True)
    assert selection.mixture is not None
    assert selection.mixture.verdict() in str(selection)
    sure = selection.mixture.better
    assert selection.keywords == (
        {"layer": list(selection.mixture.layers), "layer_weights": list(selection.mixture.weights)}
        if sure
        else {"layer": selection.layer}
    )
    assert select_layer(encoder, TEXTS, LABELS).mixture is None
    monkeypatch.setattr(type(selection.mixture), "better", property(lambda _: not sure))
    assert ("layer_weights" in selection.keywords) is not sure
    result = LayerEncoder(tiny_folder("Llama"), device="cpu", **selection.keywords)
    assert result.encode(TEXTS[:2]).shape == (2, 32)


def test_probe_reports_the_result_of_the_mixture(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    train, test = slice(0, 36), slice(36, 48)
    inputs = {"test_inputs": TEXTS[test], "test_labels": LABELS[test], "mixture": True}
    probe_result = probe(encoder, TEXTS[train], LABELS[train], kind="knn", **inputs)
    repeated = probe(encoder, TEXTS[train], LABELS[train], kind="attentive", epochs=1, **inputs)
    learned = probe_result.mixture
    assert learned is not None
    assert repeated.mixture == learned  # of the vectors, whatever the probe reads
    layers = list(learned.layers) if len(learned.layers) > 1 else learned.layers[0]
    options = {"layer_weights": learned.weights} if len(learned.layers) > 1 else {}
    vectors = LayerEncoder(tiny_folder("Llama"), layers, device="cpu", **options).encode(TEXTS, convert_to_tensor=True)
    classes, _ = class_numbers(LABELS)
    named = ridge_predict(vectors[None, train], classes[train], vectors[None, test])[0]
    assert float((named == classes[test]).double().mean()) == pytest.approx(learned.accuracy)
    assert learned.verdict() in probe_result.html()
    assert probe_result.tables()["mixture.csv"]["layer"].to_list() == list(learned.layers)


def test_mixture_of_vectors_matches_the_encoder(tiny_folder: Folder) -> None:
    separate = [LayerEncoder(tiny_folder("Llama"), layer, device="cpu").encode(TEXTS[:4]) for layer in (1, 3)]
    combined = LayerEncoder(tiny_folder("Llama"), [1, 3], layer_weights=[0.2, 0.8], device="cpu").encode(TEXTS[:4])
    vectors = torch.stack([torch.tensor(item) for item in separate])
    torch.testing.assert_close(
        mix_layers(vectors, torch.tensor([0.2, 0.8])), torch.tensor(combined), rtol=1e-5, atol=1e-6
    )


def test_without_labels_no_weights_are_learned(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with pytest.raises(OptionError, match="`mixture` must be False without labels"):
        select_layer(encoder, TEXTS, mixture=True)
    with pytest.raises(OptionError, match="with rule='last', which ignores labels"):
        select_layer(encoder, TEXTS, LABELS, rule="last", mixture=True)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    words = ["select", tiny_folder("Llama"), "--texts", str(tmp_path / "texts.txt"), "--mixture"]
    assert "without --labels" in str(CliRunner().invoke(app, words).exception)


def test_commands_print_the_mixture(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "labels.txt").write_text("\n".join(LABELS))
    words = ["select", tiny_folder("Llama"), "--texts", str(tmp_path / "texts.txt"), "--device", "cpu", "--mixture"]
    result = CliRunner().invoke(app, [*words, "--labels", str(tmp_path / "labels.txt")])
    assert result.exit_code == 0, result.output
    assert "A mixture of layers" in result.output
    pl.DataFrame({"text": TEXTS, "label": LABELS}).write_csv(tmp_path / "data.csv")
    words = ["probe", tiny_folder("Llama"), "--data", str(tmp_path / "data.csv"), "--kind", "knn", "--mixture"]
    result = CliRunner().invoke(app, [*words, "--device", "cpu", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "A mixture of layers" in result.output
    assert (tmp_path / "out" / "mixture.csv").exists()


@pytest.mark.parametrize("norm", ["final", "none"])
def test_command_is_printed_if_a_folder_can_hold_the_mixture(
    norm: str, tiny_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, norm=norm, device="cpu")  # type: ignore[arg-type]
    keywords = {"layer": [1, 3], "layer_weights": [0.25, 0.75]}
    print_encoder_lines(encoder_lines(encoder, keywords, Path("texts.txt")))
    printed = capsys.readouterr().out
    assert ("--layer 1,3 " in printed and "--weights 0.25,0.75 --out layer-1-3" in printed) is (norm == "none")
    assert ("cannot be exported" in printed) is (norm == "final")
    assert "layer=[1, 3]" in printed
    assert "weights=[0.25, 0.75])" in printed
