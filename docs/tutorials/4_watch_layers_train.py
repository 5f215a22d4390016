# %% [markdown]
# # 4. Watch the layers while a model trains
#
# In this tutorial you train a very small language model from scratch with Lightning and measure every layer during
# the run with a callback, which leaves the run itself unchanged. The training texts are the documentation of
# installed packages.
#
# First, load the texts and train a tokenizer on them.

# %%
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from midlayer_encoders.tasks.docstrings import entries

texts = [f"{entry.summary} {entry.description}" for entry in entries()]
words = Tokenizer(models.BPE(unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.train_from_iterator(
    texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=["[UNK]", "[PAD]", "[EOS]"], show_progress=False)
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]")
ids = torch.tensor(tokenizer("[EOS]".join(texts[64:]))["input_ids"])
print(f"{len(texts):,} texts, {len(ids):,} tokens")

# %% [markdown]
# The model has four blocks. The Lightning module is an ordinary one, without any code for layers.

# %%
import lightning as L

L.seed_everything(0, verbose=False)
config = GPTNeoXConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=64,
)


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPTNeoXForCausalLM(config)

    def training_step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


rows = ids[: len(ids) // 64 * 64].view(-1, 64)
batches = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)

# %% [markdown]
# The callback receives 64 held-out texts. By default it measures before the first step and then at steps 8, 16,
# 32, 64 …, because layers change most at the beginning.

# %%
import logging

from midlayer_encoders.callbacks import LayerMetricsCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
watch = LayerMetricsCallback(
    texts[:64], tokenizer, metrics=["prompt_entropy", "half_match", "effective_rank"], dirpath="watched", strict=True
)
trainer = L.Trainer(
    max_steps=128,
    accelerator="cpu",
    callbacks=[watch],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(LanguageModel(), batches)
print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.2f}")

# %% [markdown]
# `watch.frame` is the same tidy frame that sweeps return; `revision` names the step. This table shows `half_match`,
# how often the two halves of a text match among all texts (chance is about 0.07 for 64 texts):

# %%
table = watch.frame.filter(name="half_match").pivot("revision", index="layer", values="value").sort("layer")
steps = ["step0", "step8", "step32", "step128"]
print("layer  " + "  ".join(f"{step:>7}" for step in steps))
for row in table.iter_rows(named=True):
    print(f"{row['layer']:>5}  " + "  ".join(f"{row[step]:7.2f}" for step in steps))

# %% [markdown]
# Before the first step, the halves match best, and the deeper the layer, the better. Untrained attention weights all
# earlier tokens equally, so each token contains a mean of the tokens before it, and the second half of a text
# contains the first. Training removes this effect first; learning useful features takes longer than this run. A
# metric needs a baseline: here, the untrained model.
#
# The same history as curves, one color per step:

# %%
from midlayer_encoders.report import plot_steps_curves

figure = plot_steps_curves(watch.frame)
figure.savefig("training.png", dpi=72, bbox_inches="tight")

# %% [markdown]
# ![Three metrics of each layer over a training run](figures/training.png)
#
# A toy run of 128 steps demonstrates the callback; [the training record](../../benchmarks/results/training.md) has real runs. Next steps:
# with TensorBoard, W&B or MLflow as Lightning's logger, every value is logged at its step; `LastLayerDecline` warns
# if the last layer declines while earlier ones improve; and there is a callback for Hugging Face's `Trainer`
# ([Callbacks](../callbacks.md)).
