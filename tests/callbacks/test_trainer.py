"""The callbacks of Hugging Face trainers log correct values and do not change the run."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from midlayer_encoders.callbacks import LastLayerDeclineTrainerCallback, LayerMetricsTrainerCallback
from midlayer_encoders.errors import MidlayerError, OptionError
from tests.callbacks.training import ADVICE, INPUTS, TOKENIZER, generators, neox
from tests.support.families import VOCAB

pytestmark = ADVICE

CHEAP = ["prompt_entropy", "infonce"]


def llama(seed: int = 0) -> LlamaForCausalLM:
    """Return a model whose checkpoints the trainer can reload; it loses the head of GPTNeoX (transformers 5.22)."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
            attention_dropout=0.1,
        )
    )


def make_callback(**options: Any) -> LayerMetricsTrainerCallback:
    return LayerMetricsTrainerCallback(INPUTS, **{"metrics": CHEAP, "figures": False, "strict": True, **options})


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = torch.randint(4, 90, (32, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_trainer(folder: Path, callbacks: list[Any], model: Any = None, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        **{
            "max_steps": 8, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "logging_steps": 1,
            "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2, **options,
        },
    )  # fmt: skip
    return Trainer(
        model or neox(), arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks,
        processing_class=TOKENIZER,
    )  # fmt: skip


def train(hf_trainer: Trainer, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    hf_trainer.train(**options)
    losses = [entry["loss"] for entry in hf_trainer.state.log_history if "loss" in entry]
    return losses, hf_trainer.model.state_dict(), generators()


@pytest.mark.slow  # test_neutral.py has a quick version
@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}], ids=["plain", "bf16"])
def test_run_is_bitwise_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    callback = make_callback(every_n_steps=2)
    callbacks = [callback, LastLayerDeclineTrainerCallback(INPUTS, strict=True, figures=False)]
    losses, weights, state = train(make_trainer(tmp_path / "a", [], **options))
    losses_with, weights_with, state_with = train(make_trainer(tmp_path / "b", callbacks, **options))
    assert losses == losses_with
    assert len(losses) == 8
    assert state == state_with
    for name, value in weights.items():
        assert torch.equal(value, weights_with[name]), name
    assert callback.frame["revision"].unique(maintain_order=True).to_list() == [f"step{k}" for k in (0, 2, 4, 6, 8)]


def test_values_reach_the_trainers_log_and_a_file(tmp_path: Path) -> None:
    detached, attached = (make_callback(every_n_steps=4, figures=True, name=name) for name in ("detached", "attached"))
    hf_trainer = make_trainer(tmp_path, [detached], report_to=["tensorboard"])
    attached.attach(hf_trainer)
    train(hf_trainer)
    event_bytes = b"".join(path.read_bytes() for path in tmp_path.rglob("events*"))
    assert b"attached/prompt_entropy/layer_03" in event_bytes
    assert b"detached/" not in event_bytes  # it was not attached
    key = "{}/prompt_entropy/layer_03"
    for name, callback in (("detached", detached), ("attached", attached)):
        logged = {e["step"]: e[key.format(name)] for e in hf_trainer.state.log_history if key.format(name) in e}
        expected = callback.frame.filter((pl.col("name") == "prompt_entropy") & (pl.col("layer") == 3))
        assert list(logged) == [0, 4, 8]
        assert list(logged.values()) == pytest.approx(expected["value"].to_list())
        assert pl.read_parquet(tmp_path / name / "history.parquet").equals(callback.frame)
    assert {path.name for path in (tmp_path / "detached").iterdir()} == {"history.parquet", "curves.png", "report.html"}


class Killed(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            raise RuntimeError("killed")


@pytest.mark.slow  # test_resume.py has a quick version
def test_killed_and_resumed_run_has_the_history_of_an_uninterrupted_one(tmp_path: Path) -> None:
    uninterrupted, killed, resumed = (make_callback(every_n_steps=1) for _ in range(3))
    _, weights, _ = train(make_trainer(tmp_path / "a", [uninterrupted], model=llama()))
    saving = {"save_strategy": "steps", "save_steps": 4}
    with pytest.raises(RuntimeError, match="killed"):
        train(make_trainer(tmp_path / "b", [killed, Killed()], model=llama(), **saving))
    resumed_trainer = make_trainer(tmp_path / "b", [resumed], model=llama(seed=5), **saving)
    _, resumed_weights, _ = train(resumed_trainer, resume_from_checkpoint=True)
    for name, value in weights.items():
        assert torch.equal(value, resumed_weights[name]), name
    assert resumed.frame.equals(uninterrupted.frame)
    assert pl.read_parquet(tmp_path / "b" / "midlayer" / "history.parquet").equals(uninterrupted.frame)


@pytest.mark.long
def test_retrained_steps_of_a_resumed_run_are_measured_again(tmp_path: Path) -> None:
    killed, resumed = make_callback(every_n_steps=1), make_callback(every_n_steps=1)
    saving = {"save_strategy": "steps", "save_steps": 4}
    with pytest.raises(RuntimeError, match="killed"):
        train(make_trainer(tmp_path, [killed, Killed()], model=llama(), **saving))
    resumed_trainer = make_trainer(tmp_path, [resumed], model=llama(), **saving)
    resumed_trainer.train_dataset = torch.utils.data.Subset(
        resumed_trainer.train_dataset, [0, 1, 2, 3] * 8
    )  # other weights from here on
    train(resumed_trainer, resume_from_checkpoint=True)
    values = [
        [callback.frame.filter(revision=f"step{step}")["value"].to_list() for step in (4, 5)]
        for callback in (killed, resumed)
    ]
    assert values[0][0] == values[1][0]
    assert values[0][1] != values[1][1]


@pytest.mark.long
def test_sentence_transformer_is_unchanged_and_measured(tiny_folder: Any, tmp_path: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    pairs = Dataset.from_dict({"anchor": INPUTS, "positive": INPUTS[::-1]})
    folder = tmp_path / "model"
    from midlayer_encoders import LayerEncoder

    LayerEncoder(tiny_folder("BERT"), 3, device="cpu").save_pretrained(str(folder))
    weights, callback = [], make_callback(every_n_steps=1)
    for callbacks in ([], [callback]):
        model = SentenceTransformer(str(folder), device="cpu")
        arguments = SentenceTransformerTrainingArguments(
            str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
        )  # fmt: skip
        SentenceTransformerTrainer(
            model, arguments, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model), callbacks=callbacks
        ).train()
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert sorted(set(callback.frame["layer"])) == [0, 1, 2, 3]
    assert set(callback.frame["revision"]) == {"step0", "step1", "step2"}


@pytest.mark.long
@pytest.mark.parametrize("action", ["stop", "checkpoint"])
def test_collapse_stops_or_saves_the_run(action: Any, tmp_path: Path) -> None:
    class Collapses(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step == 3:
                with torch.no_grad():
                    model.gpt_neox.embed_in.weight[:] = torch.linspace(-1e4, 1e4, 99)[:, None]

    watch = LastLayerDeclineTrainerCallback(INPUTS, every_n_steps=1, on_decline=action, strict=True, figures=False)
    hf_trainer = make_trainer(tmp_path, [Collapses(), watch])
    hf_trainer.train()
    assert "the entropy of layer 0 collapsed" in watch.events[0]
    assert hf_trainer.state.global_step == (3 if action == "stop" else 8)
    assert (tmp_path / "checkpoint-3").exists() == (action == "checkpoint")


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="at least 2 texts"):
        make_trainer(tmp_path, [LayerMetricsTrainerCallback(["a"], metrics=CHEAP)]).train()


def test_weights_that_deepspeed_splits_are_refused_and_whole_ones_measured(tmp_path: Path) -> None:
    callback = make_callback()
    hf_trainer = make_trainer(tmp_path, [])
    hf_trainer.args.deepspeed = "zero.json"
    begin = hf_trainer.args, hf_trainer.state, hf_trainer.control
    callback.on_train_begin(*begin, model=hf_trainer.model, processing_class=TOKENIZER)
    assert set(callback.frame["revision"]) == {"step0"}
    next(iter(hf_trainer.model.parameters())).ds_id = 0  # as ZeRO-3 marks a weight
    with pytest.raises(MidlayerError, match=r"but DeepSpeed ZeRO-3 splits the weights.*ZeRO-2.*midlayer progression"):
        callback.on_train_begin(*begin, model=hf_trainer.model, processing_class=TOKENIZER)
