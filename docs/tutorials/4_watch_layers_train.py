# %% [markdown]
# # 4. Watch the layers while a model trains
#
# What happens inside a model while it learns? A callback reads every layer at some steps of the run, and leaves the run itself exactly as it would have
# been without it. We train a very small language model from scratch, with Lightning, on the documentation that is installed, and watch.
#
# First the texts, and a tokenizer that is trained on them.

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
# A model of four blocks, and a Lightning module of the ordinary kind: nothing in it knows of layers.

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
# The callback gets 64 texts that the model is not trained on. By default it measures before the first step and then at steps 1, 2, 4, 8 …: most of
# what happens to layers happens early.

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
# `watch.frame` is the same tidy frame that sweeps return; `revision` names the step. Here is `half_match`, how well the two halves of a text find each other
# among the others (chance is about 0.07 for 64 texts):

# %%
table = watch.frame.filter(name="half_match").pivot("revision", index="layer", values="value").sort("layer")
steps = ["step0", "step8", "step32", "step128"]
print("layer  " + "  ".join(f"{step:>7}" for step in steps))
for row in table.iter_rows(named=True):
    print(f"{row['layer']:>5}  " + "  ".join(f"{row[step]:7.2f}" for step in steps))

# %% [markdown]
# A surprise to begin with: before the first step the halves find each other best of all, and the deeper the layer the better. Attention that has learned nothing
# looks at all earlier tokens alike, so each token carries a mean of what came before it, and the second half of a text holds the first. That is no understanding, and training
# takes it away first; to build something in its place takes longer than this run. A metric is only as good as what you compare it with.
#
# The same history as curves, one color for each step:

# %%
from midlayer_encoders.report import plot_steps_curves

figure = plot_steps_curves(watch.frame)
figure.savefig("training.png", dpi=72, bbox_inches="tight")

# %% [markdown]
# ![Three metrics of each layer over a training run](figures/training.png)
#
# A run of 128 steps on a toy shows the tool, not the truth about language models: [the training record](../training.md) has real runs. Where to go from
# here: with TensorBoard, W&B or MLflow as Lightning's logger every value is logged at its step; `LastLayerDecline` warns when the last layer
# gets worse while earlier ones improve; Hugging Face's `Trainer` has a callback of its own ([Callbacks](../callbacks.md)).
