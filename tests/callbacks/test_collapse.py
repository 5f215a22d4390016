"""The warning that texts move to one point: its rule on made-up runs, and real runs with and without negatives."""

import logging
import math
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from midlayer_encoders.callbacks._recorder import describe_lost_uniformity
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader

from midlayer_encoders import LayerEncoder
from midlayer_encoders.callbacks import LayerMetricsCallback, LayerMetricsTrainerCallback
from midlayer_encoders.metrics import make_metrics, uniformity
from tests.callbacks.training import ADVICE, TOKENIZER, neox
from tests.support.tiny_folders import save_tiny

pytestmark = ADVICE
WORDS = [
    "cat",
    "dog",
    "sun",
    "rain",
    "car",
    "tree",
    "book",
    "river",
    "stone",
    "bird",
    "card",
    "bank",
    "market",
    "street",
    "house",
]
FALLING = {10: 1.0, 20: 0.6, 30: 0.5, 40: 0.2}
METRICS = ["alignment", "uniformity", "raw_uniformity"]
WARNING = "The texts of the last layer"


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=6)) for _ in range(count)]


# --- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uniformities", "expected"),
    [
        ([-2.0, -1.5, -0.9, -0.5], "rose from -2.000 at step 0 to -0.500 at step 30"),
        ([-1.0, -2.0, -0.5, -0.1], "rose from -2.000 at step 10 to -0.100 at step 30"),
        (
            [-0.02, -0.019, -0.005, -0.001],
            "rose from -0.020 at step 0 to -0.001 at step 30",
        ),  # anisotropic from the start
        ([-2.0, -2.5, -3.0, -3.1], None),  # a contrastive run
        ([-3.0, -2.6, -2.2, -1.9], None),  # still spread
        ([-2.0, -2.0, -2.0, -0.1], None),  # one measurement
        ([-2.0, -0.1, -0.1, -1.9], None),  # it recovered
        ([-2.0, -0.1], None),
        ([], None),
    ],
)
def test_rule_on_made_up_runs(uniformities: list[float], expected: str | None) -> None:
    by_step = {10 * place: value for place, value in enumerate(uniformities)}
    description = describe_lost_uniformity(by_step, FALLING)
    assert (description is None) == (expected is None)
    assert expected is None or expected in str(description)


@pytest.mark.parametrize(
    ("uniformities", "losses", "expected"),
    [
        ([-2.0, -1.0, -0.5], {0: 9.0, 10: 0.8, 20: 0.4}, None),  # half of the lowest is not above half of it
        ([-2.0, -0.9, -0.5], {0: 9.0, 10: 0.8, 20: 0.4}, "from -2.000 at step 0 to -0.500 at step 20, while the loss fell from 0.8 to 0.4"),
        ([-2.0, -0.9, -0.5], {0: 9.0, 20: 0.4}, None),  # one loss since
        ([-2.0, -0.9, -0.5], {0: 9.0, 10: math.nan, 20: 0.4}, None),
        ([-2.0, -0.9, -0.5], {0: 9.0, 10: 0.4, 20: 0.4}, None),  # an equal loss is not below
        ([-2.0, -0.9, -2.0, -0.5], {0: 0.9, 10: 0.8, 30: 0.4}, None),  # it returned to the lowest
        ([-1.0, -2.0, -0.9, -0.4], {10: 9.0, 20: 0.7, 40: 0.6}, "from -2.000 at step 10 to -0.400 at step 30, while the loss fell from 0.7 to 0.6"),
        ([-2e-5, -5e-6, -5e-6], {10: 0.8, 20: 0.4}, "from -0.000 at step 0 to -0.000 at step 20, while the loss fell from 0.8 to 0.4"),
        ([-9e-6, -4e-6, -4e-6], {10: 0.8, 20: 0.4}, None),  # equal texts, up to rounding
    ],
)  # fmt: skip
def test_rule_at_its_boundaries(uniformities: list[float], losses: dict[int, float], expected: str | None) -> None:
    by_step = {10 * place: value for place, value in enumerate(uniformities)}
    description = describe_lost_uniformity(by_step, losses)
    assert description == (expected and f"raw_uniformity rose {expected}")


@pytest.mark.parametrize("losses", [{}, {40: 0.1}, {10: 0.2, 40: 0.3}, {10: 0.2, 40: 0.2}, {10: 0.2, 40: float("nan")}])
def test_loss_must_be_known_and_fall(losses: dict[int, float]) -> None:
    by_step = {0: -2.0, 10: -0.5, 20: -0.2, 30: -0.1}
    assert describe_lost_uniformity(by_step, losses) is None
    assert describe_lost_uniformity(by_step, FALLING) is not None
    assert describe_lost_uniformity(by_step, FALLING, patience=4) is None
    assert describe_lost_uniformity(by_step, FALLING, share=0.1) is None
    equal_texts = {step: value * 1e-8 for step, value in by_step.items()}
    assert describe_lost_uniformity(equal_texts, FALLING) is None
    assert describe_lost_uniformity(by_step, dict(zip(FALLING, (math.inf, 0.5), strict=False))) is None


def test_only_raw_uniformity_sees_texts_that_share_a_direction() -> None:
    vectors = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    near = vectors * 0.01 + torch.ones(16)
    metric = make_metrics("raw_uniformity", [0])["raw_uniformity"]
    metric.update(near, layer=0)
    assert float(metric.compute()[0]) == pytest.approx(float(uniformity(near, center=False)), rel=1e-4)
    torch.testing.assert_close(uniformity(near), uniformity(vectors), atol=0.1, rtol=0)
    assert uniformity(near, center=False) > -0.01 > uniformity(vectors, center=False)


# --- real runs -------------------------------------------------------------------------------------------------------


class WithoutNegatives(nn.Module):
    """Pulls pairs together, and nothing apart."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any, labels: Any = None) -> Tensor:
        first, second = (self.model(part)["sentence_embedding"] for part in features)
        return 1 - cosine_similarity(first, second).mean()


@pytest.mark.long
@pytest.mark.parametrize(("collapses", "logging_steps"), [(True, 24), (False, 4)])
def test_run_without_negatives_warns_once_and_a_contrastive_run_does_not(
    collapses: bool, logging_steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from datasets import Dataset

    encoder = LayerEncoder(save_tiny("BERT", tmp_path / "model"), -1, device="cpu")
    anchors = sentences(128)
    rows = {"anchor": anchors, "positive": [text.rpartition(" ")[0] for text in anchors]}
    args = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=48, per_device_train_batch_size=8, learning_rate=1e-3,
        logging_steps=logging_steps, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    loss: Any = (WithoutNegatives if collapses else MultipleNegativesRankingLoss)(encoder)
    trainer = SentenceTransformerTrainer(model=encoder, args=args, train_dataset=Dataset.from_dict(rows), loss=loss)
    callback = LayerMetricsTrainerCallback(
        sentences(24, seed=1), encoder.tokenizer, metrics=METRICS, layers=[4], every_n_steps=8, strict=True
    )
    callback.attach(trainer)
    with caplog.at_level(logging.WARNING, "midlayer_encoders"):
        trainer.train()
    warnings = [record.getMessage() for record in caplog.records if record.getMessage().startswith(WARNING)]
    assert len(warnings) == int(collapses)
    assert all("Train with a loss that has negatives" in warning for warning in warnings)
    assert set(callback.frame["name"]) == set(METRICS)
    assert (tmp_path / "midlayer" / "curves.png").exists()


class Lightning(pl.LightningModule):
    """Pulls a text and its beginning together, with or without pushing different texts apart."""

    def __init__(self, *, negatives: bool) -> None:
        super().__init__()
        self.backbone: Any = neox(dropout=0.0).gpt_neox
        self.negatives = negatives

    def training_step(self, batch: list[str], _: int) -> Tensor:
        pairs = batch, [text.rpartition(" ")[0] for text in batch]
        inputs = (TOKENIZER(texts, padding=True, return_tensors="pt") for texts in pairs)
        first, second = (self.backbone(**dict(texts)).last_hidden_state.mean(1) for texts in inputs)
        similarities = cosine_similarity(first[:, None], second[None], dim=-1)
        if self.negatives:
            return nn.functional.cross_entropy(20 * similarities, torch.arange(len(batch)))
        return 1 - similarities.diagonal().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@pytest.mark.long
@pytest.mark.parametrize("negatives", [False, True])
def test_lightning_run(negatives: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = LayerMetricsCallback(
        sentences(24, seed=1), TOKENIZER, metrics="raw_uniformity", every_n_steps=8, figures=False, strict=True
    )
    trainer = pl.Trainer(
        max_steps=64, callbacks=[callback], logger=CSVLogger(tmp_path), accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=1,
    )  # fmt: skip
    loader: Any = DataLoader(sentences(512), batch_size=8, collate_fn=list)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "midlayer_encoders"):
        trainer.fit(Lightning(negatives=negatives), loader)
    warnings = [record for record in caplog.records if record.getMessage().startswith(WARNING)]
    assert len(warnings) == int(not negatives)
