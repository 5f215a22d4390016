"""The callbacks of Hugging Face's trainers: what they log is right, and the run is what it would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from midlayer_encoders.callbacks import LastLayerDeclineTrainerCallback, LayerMetricsTrainerCallback
from midlayer_encoders.errors import MidlayerError, OptionError
from tests.callbacks.training import ADVICE, INPUTS, TOKENIZER, generators, neox
from tests.families import VOCAB

pytestmark = ADVICE

CHEAP = ["prompt_entropy", "infonce"]


def llama(seed: int = 0) -> LlamaForCausalLM:
    """Return a model whose checkpoints the trainer loads again; of GPTNeoX it loses the head (transformers 5.22)."""
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


def callback(**options: Any) -> LayerMetricsTrainerCallback:
    return LayerMetricsTrainerCallback(INPUTS, **{"metrics": CHEAP, "figures": False, "strict": True, **options})


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = torch.randint(4, 90, (32, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[place], "labels": self.rows[place]}


def trainer(folder: Path, callbacks: list[Any], model: Any = None, **options: Any) -> Trainer:
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


def trained(made: Trainer, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    made.train(**options)
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, made.model.state_dict(), generators()


@pytest.mark.slow  # that nothing of a run changes is quick in test_neutral.py
@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}], ids=["plain", "bf16"])
def test_a_run_is_bit_for_bit_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    seen = callback(every_n_steps=2)
    callbacks = [seen, LastLayerDeclineTrainerCallback(INPUTS, strict=True, figures=False)]
    losses, weights, state = trained(trainer(tmp_path / "a", [], **options))
    losses_with, weights_with, state_with = trained(trainer(tmp_path / "b", callbacks, **options))
    assert losses == losses_with
    assert len(losses) == 8
    assert state == state_with
    for name, value in weights.items():
        assert torch.equal(value, weights_with[name]), name
    assert seen.frame["revision"].unique(maintain_order=True).to_list() == [f"step{k}" for k in (0, 2, 4, 6, 8)]


def test_values_reach_the_trainers_own_log_and_a_file(tmp_path: Path) -> None:
    alone, attached = (callback(every_n_steps=4, figures=True, name=name) for name in ("detached", "attached"))
    made = trainer(tmp_path, [alone], report_to=["tensorboard"])
    attached.attach(made)
    trained(made)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("events*"))
    assert b"attached/prompt_entropy/layer_03" in written
    assert b"attached/heat" in written
    assert b"detached/" not in written  # it was not attached
    key = "{}/prompt_entropy/layer_03"
    for name, seen in (("detached", alone), ("attached", attached)):
        found = {e["step"]: e[key.format(name)] for e in made.state.log_history if key.format(name) in e}
        wanted = seen.frame.filter((pl.col("name") == "prompt_entropy") & (pl.col("layer") == 3))
        assert list(found) == [0, 4, 8]
        assert list(found.values()) == pytest.approx(wanted["value"].to_list())
        assert pl.read_parquet(tmp_path / name / "history.parquet").equals(seen.frame)
    assert {path.name for path in (tmp_path / "detached").iterdir()} == {"history.parquet", "heat.png", "curves.png"}


class Killed(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            raise RuntimeError("killed")


@pytest.mark.slow  # a resumed history is quick in test_resume.py
def test_a_run_killed_and_resumed_has_the_history_of_one_that_was_not(tmp_path: Path) -> None:
    whole, killed, resumed = (callback(every_n_steps=1) for _ in range(3))
    _, weights, _ = trained(trainer(tmp_path / "a", [whole], model=llama()))
    saving = {"save_strategy": "steps", "save_steps": 4}
    with pytest.raises(RuntimeError, match="killed"):
        trained(trainer(tmp_path / "b", [killed, Killed()], model=llama(), **saving))
    again = trainer(tmp_path / "b", [resumed], model=llama(seed=5), **saving)
    _, found, _ = trained(again, resume_from_checkpoint=True)
    for name, value in weights.items():
        assert torch.equal(value, found[name]), name
    assert resumed.frame.equals(whole.frame)
    assert pl.read_parquet(tmp_path / "b" / "midlayer" / "history.parquet").equals(whole.frame)


def test_steps_that_a_resumed_run_trains_again_are_measured_again(tmp_path: Path) -> None:
    killed, resumed = callback(every_n_steps=1), callback(every_n_steps=1)
    saving = {"save_strategy": "steps", "save_steps": 4}
    with pytest.raises(RuntimeError, match="killed"):
        trained(trainer(tmp_path, [killed, Killed()], model=llama(), **saving))
    again = trainer(tmp_path, [resumed], model=llama(), **saving)
    again.train_dataset = torch.utils.data.Subset(again.train_dataset, [0, 1, 2, 3] * 8)  # from here on, other weights
    trained(again, resume_from_checkpoint=True)
    values = [
        [one.frame.filter(revision=f"step{step}")["value"].to_list() for step in (4, 5)] for one in (killed, resumed)
    ]
    assert values[0][0] == values[1][0]
    assert values[0][1] != values[1][1]


def test_a_sentence_transformer_is_the_same_and_is_found(tiny_folder: Any, tmp_path: Path) -> None:
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
    weights, seen = [], callback(every_n_steps=1)
    for callbacks in ([], [seen]):
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
    assert sorted(set(seen.frame["layer"])) == [0, 1, 2, 3]
    assert set(seen.frame["revision"]) == {"step0", "step1", "step2"}


@pytest.mark.parametrize("action", ["stop", "checkpoint"])
def test_a_collapse_stops_or_saves_the_run(action: Any, tmp_path: Path) -> None:
    class Collapses(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step == 3:
                with torch.no_grad():
                    model.gpt_neox.embed_in.weight[:] = torch.linspace(-1e4, 1e4, 99)[:, None]

    watch = LastLayerDeclineTrainerCallback(INPUTS, every_n_steps=1, on_decline=action, strict=True, figures=False)
    made = trainer(tmp_path, [Collapses(), watch])
    made.train()
    assert "the entropy of layer 0 collapsed" in watch.events[0]
    assert made.state.global_step == (3 if action == "stop" else 8)
    assert (tmp_path / "checkpoint-3").exists() == (action == "checkpoint")


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    class Sharded:
        fsdp, output_dir = ["full_shard"], str(tmp_path)

    with pytest.raises(MidlayerError, match=r"FSDP shards its weights.*midlayer progression"):
        callback().on_train_begin(Sharded(), None, None, model=neox())
    with pytest.raises(OptionError, match="at least 2 texts"):
        trainer(tmp_path, [LayerMetricsTrainerCallback(["a"], metrics=CHEAP)]).train()
