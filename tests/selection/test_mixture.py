"""Weights of layers learned from labels: against the definition, on layers made for it, and where they are reported."""

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
    """Return four layers of which the second and the third each tell one half of what four classes are."""
    classes = torch.arange(count) % 4
    vectors = seeded(4, count, 8)
    vectors[1, :, 0] += 6.0 * (classes % 2)
    vectors[2, :, 1] += 6.0 * (classes // 2)
    return vectors, classes


def test_the_error_is_that_of_leaving_each_row_out() -> None:
    rows, targets, penalty = seeded(12, 5).double(), seeded(12, 3, seed=1).double(), 0.3
    targets = targets - targets.mean(dim=0)
    unit = torch.nn.functional.normalize(rows, dim=-1)
    scale = (unit - unit.mean(dim=0)).square().sum(dim=1).mean()
    errors = []
    for left_out in range(12):
        kept = torch.arange(12) != left_out
        # With an intercept, which the penalty leaves alone: centered on all rows, as the closed form is.
        x = torch.cat([unit - unit.mean(dim=0), torch.ones(12, 1).double()], dim=1)
        ridge = penalty * scale * torch.diag(torch.tensor([1.0] * 5 + [0.0]).double())
        solved = torch.linalg.solve(x[kept].mT @ x[kept] + ridge, x[kept].mT @ targets[kept])
        errors.append((targets[left_out] - x[left_out] @ solved).square().sum())
    made = _leave_one_out_error(rows, targets, torch.tensor(penalty).double())
    torch.testing.assert_close(made, torch.stack(errors).mean())


def test_layers_that_each_know_a_half_are_mixed_and_significantly_better() -> None:
    vectors, classes = halves()
    weights = mixture_weights(vectors, classes)
    assert float(weights.sum()) == pytest.approx(1)
    assert weights.topk(2).indices.sort().values.tolist() == [1, 2]
    right = ridge_correct(vectors, classes).double()
    found = held_out_mixture(vectors, classes, right)
    assert found.better
    assert set(found.layers) >= {1, 2}
    assert found.accuracy > found.single_accuracy + 0.2
    assert found.accuracy == pytest.approx(float(mixture_correct(vectors, classes).double().mean()))
    assert f"significantly better than layer {found.single} alone" in found.verdict()


def test_one_layer_that_knows_all_is_not_beaten() -> None:
    vectors, classes = seeded(4, 80, 8), torch.arange(80) % 2
    vectors[2, :, 0] += 9.0 * classes
    found = held_out_mixture(vectors, classes, ridge_correct(vectors, classes).double())
    assert found.single == 2
    assert not found.better
    assert "layer 2 alone" in found.verdict()
    worse = replace(found, layers=(1, 2), weights=(0.5, 0.5), low=-9.0, high=-1.0)
    assert not worse.better
    assert "significantly worse than layer 2" in worse.verdict()
    assert "not significantly better than" in replace(worse, high=1.0).verdict()


def test_labels_of_the_examples_in_question_are_not_seen() -> None:
    vectors, classes = seeded(6, 200, 16), torch.randint(4, (200,), generator=torch.Generator().manual_seed(3))
    assert float(mixture_correct(vectors, classes).double().mean()) < 0.35  # guessing: 0.25
    vectors, classes = halves()
    train, test = torch.arange(80), torch.arange(80, 120)
    wrong = classes.clone()
    wrong[80:] = 0
    told = [mixture_on_test(vectors, one, train, test, [0, 1, 2, 3], seed=0) for one in (classes, wrong)]
    assert (told[0].layers, told[0].weights) == (told[1].layers, told[1].weights)
    assert told[0].accuracy > 0.8 > told[1].accuracy


def test_weights_of_a_fold_are_fitted_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, classes = halves(40)
    vectors[0, :, 7] = torch.arange(40)  # tells which text it is
    seen: list[set[int]] = []

    def fitted(some: Tensor, labels: Tensor) -> Tensor:
        seen.append(set(some[0, :, 7].int().tolist()))
        assert labels.tolist() == [int(classes[text]) for text in some[0, :, 7].int().tolist()]
        return torch.tensor([0.0, 0.5, 0.5, 0.0])

    monkeypatch.setattr(ridge, "mixture_weights", fitted)
    mixture_correct(vectors, classes)
    assert [len(texts) for texts in seen] == [32] * 5
    assert [text for text in range(40) if sum(text not in texts for texts in seen) != 1] == []


def test_the_size_of_a_layer_does_not_matter() -> None:
    vectors, classes = halves()
    plain = mixture_weights(vectors, classes)
    larger = mixture_weights(vectors * torch.tensor([1.0, 1000.0, 1.0, 1.0])[:, None, None], classes)
    expected = plain / torch.tensor([1.0, 1000.0, 1.0, 1.0])
    torch.testing.assert_close(larger, expected / expected.sum(), rtol=2e-2, atol=1e-5)


# --- where it is reported --------------------------------------------------------------------------------------------


def test_select_hands_on_a_mixture_that_is_significantly_better(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    found = select_layer(encoder, TEXTS, LABELS, mixture=True)
    assert found.mixture is not None
    assert found.mixture.verdict() in str(found)
    sure = found.mixture.better
    assert found.keywords == (
        {"layer": list(found.mixture.layers), "layer_weights": list(found.mixture.weights)}
        if sure
        else {"layer": found.layer}
    )
    assert select_layer(encoder, TEXTS, LABELS).mixture is None
    monkeypatch.setattr(type(found.mixture), "better", property(lambda _: not sure))
    assert ("layer_weights" in found.keywords) is not sure
    made = LayerEncoder(tiny_folder("Llama"), device="cpu", **found.keywords)
    assert made.encode(TEXTS[:2]).shape == (2, 32)


def test_probe_reports_what_an_encoder_of_the_mixture_gives(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    train, test = slice(0, 36), slice(36, 48)
    given = {"test_inputs": TEXTS[test], "test_labels": LABELS[test], "mixture": True}
    found = probe(encoder, TEXTS[train], LABELS[train], kind="knn", **given)
    again = probe(encoder, TEXTS[train], LABELS[train], kind="attentive", epochs=1, **given)
    learned = found.mixture
    assert learned is not None
    assert again.mixture == learned  # of the vectors, whatever the probe reads
    layers = list(learned.layers) if len(learned.layers) > 1 else learned.layers[0]
    options = {"layer_weights": learned.weights} if len(learned.layers) > 1 else {}
    vectors = LayerEncoder(tiny_folder("Llama"), layers, device="cpu", **options).encode(TEXTS, convert_to_tensor=True)
    classes, _ = class_numbers(LABELS)
    named = ridge_predict(vectors[None, train], classes[train], vectors[None, test])[0]
    assert float((named == classes[test]).double().mean()) == pytest.approx(learned.accuracy)
    assert learned.verdict() in found.html()
    assert found.tables()["mixture.csv"]["layer"].to_list() == list(learned.layers)


def test_a_mixture_of_vectors_is_that_of_the_encoder(tiny_folder: Folder) -> None:
    alone = [LayerEncoder(tiny_folder("Llama"), layer, device="cpu").encode(TEXTS[:4]) for layer in (1, 3)]
    both = LayerEncoder(tiny_folder("Llama"), [1, 3], layer_weights=[0.2, 0.8], device="cpu").encode(TEXTS[:4])
    vectors = torch.stack([torch.tensor(one) for one in alone])
    torch.testing.assert_close(mix_layers(vectors, torch.tensor([0.2, 0.8])), torch.tensor(both), rtol=1e-5, atol=1e-6)


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
def test_the_command_is_printed_where_a_folder_can_hold_the_mixture(
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
