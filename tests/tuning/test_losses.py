"""The loss of each kind of pairs, against the formula read aloud and against sentence-transformers' own."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import Stage
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.settings import TuneSettings
from midlayer_encoders.extras.training import trainer_internals
from midlayer_encoders.extras.training.fitting import _make_callback, _prompts, _training_arguments, train
from midlayer_encoders.extras.training.losses import LabelRankingLoss, pair_loss
from midlayer_encoders.tasks.training_rows import TrainingRows, read_pairs
from tests.support.tiny_folders import Folder
from tests.tuning.rows import PAIRS


class Given(nn.Module):
    """Returns the vectors that it is given."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return features


def batch(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [{"sentence_embedding": torch.randn(5, 8, generator=draw)} for _ in range(2)]


def read_aloud(labels: list[int]) -> float:
    anchors, positives = (item["sentence_embedding"] for item in batch())
    total = 0.0
    for row in range(5):
        near = [20 * float(torch.cosine_similarity(anchors[row], positives[k], dim=0)) for k in range(5)]
        rivals = [near[k] for k in range(5) if k == row or labels[k] != labels[row]]
        total += math.log(sum(math.exp(item) for item in rivals)) - near[row]
    return total / 5


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 4], [0, 0, 1, 1, 2], [0, 1, 1, 1, 1]])
def test_positives_of_the_same_label_are_not_negatives(labels: list[int]) -> None:
    actual = LabelRankingLoss(Given())(batch(), torch.tensor(labels))
    assert float(actual) == pytest.approx(read_aloud(labels), rel=1e-5)


def test_loss_without_a_common_label_is_the_ranking_loss() -> None:
    ours = LabelRankingLoss(Given())(batch(), torch.arange(5))
    torch.testing.assert_close(ours, MultipleNegativesRankingLoss(Given())(batch(), torch.arange(5)))


def test_batch_of_one_label_has_zero_loss() -> None:
    assert float(LabelRankingLoss(Given())(batch(), torch.zeros(5))) == 0


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("pairs", {}, "MultipleNegativesRankingLoss"),
        ("pairs", {"mini_batch": 4}, "CachedMultipleNegativesRankingLoss"),
        ("scored", {}, "CoSENTLoss"),
        ("labels", {}, "LabelRankingLoss"),
        ("labels", {"matryoshka": [8]}, "MatryoshkaLoss"),
    ],
)
def test_each_kind_has_its_loss(kind: Any, options: dict[str, Any], name: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), 2, device="cpu")
    loss: Any = pair_loss(encoder, kind, TuneSettings(**options))
    assert type(loss).__name__ == name
    if name == "MatryoshkaLoss":
        assert sorted(loss.matryoshka_dims) == [8, encoder.get_embedding_dimension()]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("scored", {"mini_batch": 4}, "`mini_batch` must be None for rows with scores or labels"),
        ("pairs", {"matryoshka": [4096]}, "`matryoshka` must be at most .*, but got 4096"),
        ("pairs", {"matryoshka": 8}, "`matryoshka` must be a list of numbers"),
    ],
)
def test_unsupported_loss_options_are_refused(kind: Any, options: Any, words: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    with pytest.raises(OptionError, match=words):
        pair_loss(encoder, kind, TuneSettings(**options))


@pytest.mark.parametrize("seed", [0, 5])
def test_seed_is_set_before_adapters_are_initialized(
    seed: int, tiny_folder: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyError(torch.initial_seed())

    monkeypatch.setattr(trainer_internals, "add_lora", stop)
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    settings = TuneSettings(lora=2, seed=seed, held_out=0)
    with isolated_random(), pytest.raises(KeyError, match=str(seed)):
        train(encoder, read_pairs(PAIRS), stop, settings, tmp_path, Stage(None, "training"))


def test_each_text_is_trained_with_the_prompt_of_its_role(tiny_folder: Folder) -> None:
    prompts = {"query": "find: ", "document": "a text: ", "other": "say: "}
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", prompts=prompts, default_prompt_name="other")
    pair = {"anchor": "a", "positive": "b", "negative": "c", "negative_2": "d"}
    expected = {"anchor": "find: "} | dict.fromkeys(("positive", "negative", "negative_2"), "a text: ")
    assert _prompts(encoder, pair) == expected
    assert _prompts(encoder, {"anchor": "a", "positive": "b", "label": 1}) == {"anchor": "say: ", "positive": "say: "}
    assert _prompts(LayerEncoder(tiny_folder("Llama"), 2, device="cpu"), pair) is None


@pytest.mark.parametrize(
    ("kind", "lora", "learning_rate", "sampler"),
    [("pairs", True, 5e-4, BatchSamplers.NO_DUPLICATES), ("scored", False, 5e-5, BatchSamplers.BATCH_SAMPLER)],
)
def test_settings_reach_the_trainer(
    kind: Any, lora: bool, learning_rate: float, sampler: Any, tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), 1, device="cpu", pooling="cls", max_length=20)
    settings = TuneSettings(lora=lora, batch_size=12, checkpoints=4, seed=7)
    args = _training_arguments(encoder, TrainingRows(kind, (), "p"), {}, settings, tmp_path, 100)
    assert (args.max_steps, args.warmup_steps, args.logging_steps) == (100, 10, 2)
    assert (args.eval_steps, args.save_steps) == (25, 25)
    assert args.save_total_limit is None  # `WeightsTrainer` removes earlier checkpoints after it has completed one
    assert (args.learning_rate, args.batch_sampler, args.seed) == (learning_rate, sampler, 7)
    assert args.per_device_train_batch_size == args.per_device_eval_batch_size == 12
    assert (args.use_cpu, args.bf16, args.load_best_model_at_end) == (True, False, True)
    callback = _make_callback(encoder, ["a long text"] * 70, settings, tmp_path)
    assert callback is not None
    measured = callback
    assert (measured.pooling, measured.max_length, measured.seed, measured.dirpath) == ("cls", 20, 7, tmp_path)
    assert len(list(measured.texts_or_dataloader)) == 64
    trainer_internals.add_lora(encoder, 4)
    config = encoder.transformer.peft_config["default"]  # type: ignore[index]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.05)
