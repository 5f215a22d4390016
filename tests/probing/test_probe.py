import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders.cli._labeled_examples import read_examples
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.extras.probing import (
    AttentiveProbes,
    CachedTokens,
    LinearProbes,
    ProbeResult,
    ProbeSettings,
    Split,
    probe_tokens,
    split_examples,
    wilson,
)
from midlayer_encoders.extras.probing.probe import train_probes
from midlayer_encoders.extras.probing.token_states import LiveTokens, read_tokens
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.tasks import TaskFileError
from midlayer_encoders.tasks.tables import Columns
from tests.support.families import DEPTH
from tests.support.grouped import probe
from tests.support.made_media import waveform
from tests.support.tiny_folders import Folder

LAYERS, COUNT, TOKENS, WIDTH, CLASSES = 3, 200, 5, 16, 4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def synthetic(*, signal: float) -> tuple[Tensor, Tensor]:
    """Tokens (L, N, T, D) of which one, at a random position, carries the class: the mean shows it weakly, attention well."""
    labels = torch.arange(COUNT) % CLASSES
    states = torch.randn(LAYERS, COUNT, TOKENS, WIDTH, generator=seeded())
    places = torch.randint(TOKENS, (COUNT,), generator=seeded(1))
    states[:, torch.arange(COUNT), places] += signal * torch.eye(WIDTH)[labels]
    return states, labels


def whole(states: Tensor) -> CachedTokens:
    return CachedTokens(states, torch.ones(states.shape[1:3], dtype=torch.bool))


class Published(nn.Module):
    """AIM's attentive probe as published, for one layer."""

    def __init__(self, probes: AttentiveProbes, layer: int) -> None:
        super().__init__()
        D, self.heads = probes.key.shape[1], probes.heads
        self.norm = nn.BatchNorm1d(D, affine=False, eps=1e-6)
        self.key, self.value = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.classifier = nn.Linear(D, probes.weight.shape[1])
        self.query = nn.Parameter(probes.query[layer].detach())
        for module, name in ((self.key, "key"), (self.value, "value"), (self.classifier, "weight")):
            module.weight = nn.Parameter(getattr(probes, name)[layer].detach())
        self.classifier.bias = nn.Parameter(probes.bias[layer].detach())

    def forward(self, states: Tensor) -> Tensor:
        B, T, D = states.shape
        normed = self.norm(states.mT).mT
        key, value = (part(normed).view(B, T, self.heads, -1) for part in (self.key, self.value))
        scores = torch.einsum("he,bthe->bht", self.query.view(self.heads, -1), key) / math.sqrt(D // self.heads)
        return self.classifier(torch.einsum("bht,bthe->bhe", scores.softmax(dim=-1), value).reshape(B, D))


def test_attentive_probes_and_gradients_match_the_published_probe() -> None:
    states, labels = synthetic(signal=3.0)
    states = 5 * states[:, :20] + 30  # far from zero, where batch norm matters
    probes = AttentiveProbes(LAYERS, WIDTH, CLASSES, heads=4, seed=3)
    with torch.no_grad():
        probes.query.add_(torch.randn(probes.query.shape, generator=seeded(2)))
    logits = probes(states, torch.ones(20, TOKENS, dtype=torch.bool))
    nn.functional.cross_entropy(logits.flatten(0, 1), labels[:20].repeat(LAYERS), reduction="sum").backward()
    for layer in range(LAYERS):
        published = Published(probes, layer)
        expected = published(states[layer])
        torch.testing.assert_close(logits[layer], expected, rtol=1e-4, atol=1e-4)
        nn.functional.cross_entropy(expected, labels[:20], reduction="sum").backward()
        torch.testing.assert_close(probes.query.grad[layer], published.query.grad, rtol=1e-3, atol=1e-4)  # type: ignore[index]
        torch.testing.assert_close(probes.key.grad[layer], published.key.weight.grad, rtol=1e-3, atol=1e-4)  # type: ignore[index]


@pytest.mark.parametrize("kind", [AttentiveProbes, LinearProbes])
def test_padding_is_ignored(kind: Any) -> None:
    states, _ = synthetic(signal=3.0)
    padded = torch.cat([states, 1e3 * torch.randn(LAYERS, COUNT, 2, WIDTH, generator=seeded(9))], dim=2)
    mask = torch.arange(TOKENS + 2).expand(COUNT, -1) < TOKENS
    for training in (True, False):
        plain, longer = kind(LAYERS, WIDTH, CLASSES).train(training), kind(LAYERS, WIDTH, CLASSES).train(training)
        torch.testing.assert_close(longer(padded, mask), plain(states, mask[:, :TOKENS]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [AttentiveProbes, LinearProbes])
def test_probes_trained_together_match_probes_trained_alone(kind: Any) -> None:
    states, labels = synthetic(signal=3.0)
    states[0] = torch.randn(
        states[0].shape, generator=seeded(12)
    )  # noise: alone it stops before an epoch that is better
    split = Split(torch.arange(140), torch.arange(140, COUNT), torch.arange(0))
    settings = ProbeSettings(epochs=10, patience=2, batch_size=32, learning_rate=1e-2, seed=1)
    options: dict[str, Any] = {"split": split, "settings": settings}
    together = kind(LAYERS, WIDTH, CLASSES)
    _, best_epochs = train_probes(together, whole(states), labels, **options)
    assert best_epochs[0] < best_epochs[1:].min()
    for layer in range(LAYERS):
        separate = kind(1, WIDTH, CLASSES)
        _, best_epoch = train_probes(separate, whole(states[layer : layer + 1]), labels, **options)
        assert best_epochs[layer] == best_epoch[0]
        for name, weights in together.state_dict().items():
            torch.testing.assert_close(weights[layer], separate.state_dict()[name][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "least"), [("attentive", 0.95), ("linear", 0.9)])
def test_separable_tokens_reach_the_oracle_and_noise_stays_at_chance(kind: Any, least: float) -> None:
    states, labels = synthetic(signal=12.0)
    states[1] = torch.randn(states[1].shape, generator=seeded(7))
    split = split_examples(labels)
    source = whole(states if kind == "attentive" else states.mean(dim=2, keepdim=True))
    right, validation, epochs = probe_tokens(
        source, labels, split, kind=kind, settings=ProbeSettings(batch_size=32, learning_rate=1e-2)
    )
    reports = right.double().mean(dim=1)
    assert reports[[0, 2]].min() >= least, reports
    assert (
        wilson(int(right[1].sum()), right.shape[1])[0] <= 1 / CLASSES <= wilson(int(right[1].sum()), right.shape[1])[1]
    )
    assert validation[0] >= least
    assert (epochs > 0).all()


def test_attention_finds_what_the_mean_hides() -> None:
    labels = torch.arange(COUNT) % 2
    states = torch.zeros(1, COUNT, TOKENS, WIDTH)
    states[0, :, 0, 0] = 1.0  # marks the token that tells the class
    sign = labels * 2.0 - 1
    states[0, :, 0, 1] = sign
    states[0, :, 1:, 1] = (torch.randn(COUNT, TOKENS - 1, generator=seeded()) * 3).sub(sign[:, None] / (TOKENS - 1))
    split = split_examples(labels)
    scores = {
        kind: probe_tokens(
            whole(states),
            labels,
            split,
            kind=kind,
            settings=ProbeSettings(epochs=25, batch_size=32, learning_rate=5e-2, patience=25),
        )[0]  # type: ignore[arg-type]
        for kind in ("attentive", "linear")
    }
    assert scores["attentive"].double().mean() > 0.95
    assert scores["linear"].double().mean() < 0.75


def test_interval_matches_scipy() -> None:
    from scipy.stats import binomtest

    for right, count in ((0, 9), (9, 9), (3, 10), (480, 1000)):
        expected = binomtest(right, count).proportion_ci(method="wilson")
        assert wilson(right, count) == pytest.approx((expected.low, expected.high), abs=1e-6)
    with pytest.raises(ValueError, match="must not be greater"):
        wilson(3, 2)


def test_splits_hold_every_class_and_are_disjoint() -> None:
    labels = torch.arange(50) % 5
    split = split_examples(labels)
    assert sorted(torch.cat([split.train, split.validation, split.test]).tolist()) == list(range(50))
    for part in (split.train, split.validation, split.test):
        assert set(labels[part].tolist()) == set(range(5))
    inputs = split_examples(labels, num_test=10)
    assert inputs.test.tolist() == list(range(40, 50))
    assert set(inputs.train.tolist()).isdisjoint(inputs.validation.tolist())


def test_state_that_is_too_large_is_reported() -> None:
    states, labels = synthetic(signal=1.0)
    states[1] = torch.inf
    with pytest.raises(NotFiniteError, match="layer number 1 "):
        probe_tokens(whole(states), labels, split_examples(labels), settings=ProbeSettings(epochs=1))


@pytest.mark.parametrize(("keep_gb", "is_cached"), [(384e-9, True), (383e-9, False)])
def test_tokens_are_cached_up_to_the_memory_limit(keep_gb: float, is_cached: bool) -> None:
    states = torch.randn(2, 4, 3, 8, generator=seeded())  # 384 bytes in half precision
    tokens: Any = SimpleNamespace(inputs=range(4), reader=SimpleNamespace(layers=(0, 1)), batch=whole(states).batch)
    source: Any = read_tokens(tokens, [[2, 0], [1, 3]], keep_gb=keep_gb)
    assert isinstance(source, CachedTokens) == is_cached
    if is_cached:
        torch.testing.assert_close(source.states.float(), states, atol=2e-3, rtol=1e-3)


def test_padding_after_the_longest_example_is_not_cached(tiny_folder: Folder) -> None:
    """Whisper pads every waveform to its window, 20 states here."""
    encoder = LayerEncoder(tiny_folder("Whisper"), -1, device="cpu")
    waveforms = [waveform(n, 800 * states) for n, states in enumerate((3, 5, 2))]
    live = LiveTokens(layer_reader(encoder, layers="all"), waveforms)
    source: Any = read_tokens(live, [[2], [0, 1]], keep_gb=1.0)
    states, mask = live.batch(torch.arange(3))
    assert states.shape[2] == 20
    assert mask.sum(dim=1).tolist() == [3, 5, 2]
    assert torch.equal(source.mask, mask[:, :5])
    expected = states[:, :, :5].masked_fill(~source.mask[None, :, :, None], 0.0)
    torch.testing.assert_close(source.states.float(), expected, atol=2e-3, rtol=1e-3)


def images(folder: Path, *, count: int = 12) -> Path:
    """Three classes of color images, one folder each."""
    from PIL import Image

    for number, name in enumerate(("blue", "green", "red")):
        (folder / name).mkdir(parents=True)
        for item in range(count):
            pixels = torch.randint(0, 60, (16, 16, 3), generator=seeded(100 * number + item), dtype=torch.uint8)
            pixels[:, :, 2 - number] += 180
            Image.fromarray(pixels.numpy()).save(folder / name / f"{item:02d}.png")
    return folder


@pytest.fixture(scope="module")
def vit(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("ViT"), -1, device="cpu")


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("coloured"))


@pytest.mark.long
def test_image_probe_from_folders_to_figure(vit: LayerEncoder, coloured: Path) -> None:
    inputs, labels = read_examples(coloured, vit.media)
    reports: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"epochs": 6, "batch_size": 8, "learning_rate": 3e-2, "dataset": "colours"}
    result = probe(vit, inputs, labels, progress=lambda *step: reports.append(step), **options)
    assert result.layers == tuple(range(DEPTH + 1))
    assert result.classes == ["blue", "green", "red"]
    assert result.accuracy.min() > 0.8, result.table
    assert result.chance == pytest.approx(1 / 3, abs=0.1)
    assert ("reading", 36, 36) in reports
    assert reports[-1][0] == "training"
    assert result.frame["dataset"].unique().to_list() == ["colours (attentive probe)"]
    assert result.plot().axes[0].get_title(loc="left") == "colours"
    low, high = result.gain()[1:]
    assert low <= result.gain()[0] <= high
    probe_result = probe(vit, inputs, labels, keep_gb=0, layers=[1, -1], **options)
    saved = result.table.filter(result.table["layer"].is_in([1, DEPTH]))["accuracy"].to_list()
    assert probe_result.table["accuracy"].to_list() == pytest.approx(
        saved, abs=0.15
    )  # kept in half precision, read again in full


def test_text_probe_from_a_file(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [f'"{"a" * (3 + n % 5)} {"cat" if n % 2 else "DOG!"}",{"pet" if n % 2 else "loud"}' for n in range(40)]
    (tmp_path / "texts.csv").write_text("text,label\n" + "\n".join(rows))
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    inputs, labels = read_examples(tmp_path / "texts.csv", encoder.media)
    result = probe(encoder, inputs, labels, layers=[0, 2], epochs=6, batch_size=8, learning_rate=3e-2)
    assert result.layers == (0, 2)
    assert result.accuracy.min() > 0.8, result.table
    encoder.options = replace(encoder.options, revision="step8")
    linear = probe(encoder, inputs, labels, kind="linear", layers=[0], epochs=6, batch_size=8, learning_rate=3e-2)
    assert (linear.revision, linear.frame["revision"].unique().to_list()) == ("step8", ["step8"])
    assert linear.accuracy[0] > 0.8
    (tmp_path / "renamed.csv").write_text("review;kind\n" + "\n".join(rows).replace(",", ";"))
    columns = Columns("review", "kind")
    assert read_examples(tmp_path / "renamed.csv", encoder.media, columns=columns) == (inputs, labels)
    with pytest.raises(OptionError, match="`text_column` has no effect for a folder of class folders"):
        read_examples(tmp_path, encoder.media, columns=columns)


def test_audio_probe_with_different_lengths(tiny_folder: Folder) -> None:
    steps = torch.arange(2200) / 16000
    sounds = [
        (torch.sin(2 * math.pi * (300.0 if n % 2 else 3000.0) * steps)[: 1500 + 100 * (n % 7)].numpy(), 16000)
        for n in range(40)
    ]
    encoder = LayerEncoder(tiny_folder("Wav2Vec2"), -1, device="cpu")
    result = probe(encoder, sounds, [n % 2 for n in range(40)], epochs=6, batch_size=8, learning_rate=3e-2)
    assert result.classes == ["0", "1"]
    assert result.accuracy[0] == 1.0, result.table


def test_best_layer_is_selected_on_validation_examples() -> None:
    right = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    result = ProbeResult(
        model="m", revision="default", num_layers=4, layers=(0, 2, 4), kind="linear", dataset="d", classes=["a", "b"],
        right=right, validation=torch.tensor([0.9, 0.5, 0.9]), epochs=torch.ones(3), chance=0.4, num_train=8,
    )  # fmt: skip
    assert result.best_layer == 0
    assert result.gain()[0] == pytest.approx(0.25)
    assert "layer 0 of 4 is the choice for the linear probe: +25.0 points" in result.verdict()
    assert result.frame["depth"].to_list() == [0.0, 0.5, 1.0]
    page = result.html()
    assert "The page marks layer 2, the best on the test examples, which the choice did not see." in page
    assert "8 to train, 4 to test, 2 classes" in page
    assert "Guessing gives 40.0." in page
    assert "Use this layer" not in page
    assert "as much as the best layer" not in page
    saved = replace(result, source="org/m", options=EncoderOptions(norm="none"))
    assert "midlayer export org/m --layer 0 --norm none --out layer-0" in saved.html()
    assert 40.0 in [line.get_ydata()[0] for line in result.plot().axes[0].lines]  # type: ignore[index]


def test_invalid_input_is_refused(vit: LayerEncoder, coloured: Path, tmp_path: Path) -> None:
    inputs, labels = read_examples(coloured, vit.media)
    with pytest.raises(OptionError, match="Did you mean 'attentive'"):
        probe(vit, inputs, labels, kind="atentive")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="one class for each of 36 examples, but got 35"):
        probe(vit, inputs, labels[1:])
    with pytest.raises(
        OptionError, match="2 classes or more with at least 2 texts each, but 12 labels have 1 such class"
    ):
        probe(vit, inputs[:12], labels[:12])
    with pytest.raises(OptionError, match=r"at least 3 examples of each class.* but 'green' has 1"):
        probe(vit, inputs[:13], labels[:13])
    with pytest.raises(OptionError, match="must be among `labels`, but 'mauve' is not"):
        probe(vit, inputs, labels, test_inputs=inputs[:1], test_labels=["mauve"])
    with pytest.raises(OptionError, match="must divide the width 32"):
        probe(vit, inputs, labels, heads=5, epochs=1)


def test_invalid_folders_and_files_are_refused(coloured: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="There is no file"):
        read_examples(tmp_path / "nowhere", ["image"])
    (tmp_path / "one" / "only").mkdir(parents=True)
    with pytest.raises(OptionError, match=r"at least two folders, one for each class, but .* has only"):
        read_examples(tmp_path / "one", ["image"])
    with pytest.raises(OptionError, match=r"must hold \.txt files"):
        read_examples(coloured, ["text"])
    (tmp_path / "wrong.jsonl").write_text('{"text": "a", "lable": 1}\n')
    with pytest.raises(TaskFileError, match=r"must have the column label, but has text, lable"):
        read_examples(tmp_path / "wrong.jsonl", ["text"])
    (tmp_path / "empty.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "", "label": 1}\n')
    with pytest.raises(TaskFileError, match="line 2: `text` must be a string that is not empty, but got ''"):
        read_examples(tmp_path / "empty.jsonl", ["text"])


def test_corrupt_image_is_named_and_may_be_skipped(tmp_path: Path) -> None:
    folder = images(tmp_path / "some", count=2)
    (folder / "red" / "broken.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"broken\.png"):
        read_examples(folder, ["image"])
    inputs, _ = read_examples(folder, ["image"], bad="skip")
    assert len(inputs) == 6


def test_class_folders_of_texts(tmp_path: Path) -> None:
    for name in ("a", "b", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text(f" {name} text\n")
    inputs, labels = read_examples(tmp_path, ["text"])
    assert (inputs, labels) == (["a text", "b text"], ["a", "b"])


@pytest.mark.long
def test_probe_command(tiny_folder: Folder, coloured: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from midlayer_encoders.cli import app

    command = ["probe", tiny_folder("ViT"), "--data", str(coloured), "--out", str(tmp_path), "--kind", "linear"]
    result = CliRunner().invoke(app, [*command, "--device", "cpu", "--epochs", "3", "--batch-size", "8"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "By validation, layer" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"probe.parquet", "probe.csv", "probe.png", "report.html"}
    page = (tmp_path / "report.html").read_text()
    assert "Guessing" in page
    assert "By validation, layer" in page


@pytest.mark.parametrize(
    ("extra", "text"),
    [(["--kind", "lineer"], "Invalid value for '--kind'"), (["--data", "nowhere"], "There is no file 'nowhere'")],
)
def test_invalid_arguments_are_refused_before_the_model_is_loaded(extra: list[str], text: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from midlayer_encoders.cli import app

    command = ["probe", "no-such-model", "--data", str(tmp_path), "--out", str(tmp_path / "out"), *extra]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert text in f"{result.exception} {result.output}"
