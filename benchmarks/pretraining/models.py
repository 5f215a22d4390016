"""Language models of one depth, width and vocabulary that differ in one thing, and what they are trained on.

The same seed gives models of the same blocks the same first weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pretraining.corpus import BOS, EOS, MASK, PAD, VOCAB

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:  # a GPU machine may have the older package alone
    import pytorch_lightning as pl  # type: ignore[no-redef]

__all__ = ["VARIANTS", "LanguageModel", "Pretraining", "Size", "Variant", "language_model", "pl", "task_of"]

MASKED = 0.3  # of the tokens; all of them are replaced by the mask
IGNORED = -100  # the target that cross entropy skips
WARMUP = 100  # steps, whatever the length of the run


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What decides a run, beside the size and the data.

    Attributes:
        blocks: ``"llama"`` or ``"gpt_neox"``.
        objective: ``"causal"``, or ``"masked"``: both sides are seen, and 30 % of the tokens are hidden.
        bos: share of the sequences that begin with ``[BOS]``.
        peak: learning rate after the warm-up.
        decay: weight decay of the matrices.
        tied: whether the output layer has the embeddings' weights.
        seed: of the first weights; the order of the data is the same for all.
        steps: of 65,536 tokens each.
    """

    blocks: str = "llama"
    objective: str = "causal"
    bos: float = 1.0
    peak: float = 2e-3
    decay: float = 0.1
    tied: bool = True
    seed: int = 0
    steps: int = 2000


BASE = Variant()
FIRST = replace(BASE, blocks="gpt_neox", bos=0.0, peak=1e-3, tied=False, steps=1024)
VARIANTS = {
    "base": BASE,
    "base-seed1": replace(BASE, seed=1),
    "base-seed2": replace(BASE, seed=2),
    "no-bos": replace(BASE, bos=0.0),
    "half-bos": replace(BASE, bos=0.5),
    "gpt-neox": replace(BASE, blocks="gpt_neox"),
    "low-rate": replace(BASE, peak=5e-4),
    "no-decay": replace(BASE, decay=0.0),
    "masked": replace(BASE, objective="masked"),
    # What benchmarks/results/training_first.md tells of: 67M tokens, no BOS.
    "first-causal": FIRST,
    "first-masked": replace(FIRST, objective="masked"),
}


@dataclass(frozen=True)
class Size:
    """How large a model is: by default 38.5M parameters in Llama's blocks and 4.2M in the embeddings."""

    blocks: int = 12
    width: int = 512
    vocab: int = VOCAB
    length: int = 256

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)

    @property
    def shared(self) -> dict[str, Any]:
        """What every config takes."""
        return {
            "vocab_size": self.vocab, "hidden_size": self.width, "num_hidden_layers": self.blocks, "use_cache": False,
            "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
        }  # fmt: skip


class LanguageModel(nn.Module):
    """A transformers model without a head, and a linear layer to the vocabulary: the embeddings, or one of its own."""

    def __init__(self, backbone: Any, size: Size, *, tied: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        if tied:
            self.head.weight = backbone.get_input_embeddings().weight
        else:
            nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats, at the targets that are not ignored."""
        return self.loss(self.backbone(input_ids=inputs, use_cache=False).last_hidden_state, targets)

    def loss(self, states: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1).float(), targets.flatten())

    def compile_training(self, **options: Any) -> None:
        """Compile the blocks, each alike and so once for all, and the loss, for passes that keep gradients.

        Hooks sit on a block's call, not on its forward, so the callback's hooks never reach the compiler, and a measurement
        of another shape runs the uncompiled blocks.
        """
        for block in self.backbone.layers:
            block.forward = _when_training(block.forward, torch.compile(block.forward, dynamic=False, **options))
        self.loss = _when_training(self.loss, torch.compile(self.loss, dynamic=False, **options))  # type: ignore[method-assign]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[Any]:
    """Put a model in eval mode, without gradients, and every module of it back in its own."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode


def _when_training(plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (compiled if torch.is_grad_enabled() else plain)(*args, **kwargs)


def language_model(variant: Variant, size: Size | None = None, *, dropout: float = 0.0) -> LanguageModel:
    """Return a model of random weights."""
    size = size or Size()
    with torch.random.fork_rng():
        torch.manual_seed(variant.seed)
        backbone = _MAKERS[variant.blocks](size, dropout)
        if variant.objective == "masked":
            _see_both_sides(backbone)
        return LanguageModel(backbone, size, tied=variant.tied)


def _see_both_sides(backbone: Any) -> None:
    backbone.config.is_causal = False
    for part in backbone.modules():
        if getattr(part, "is_causal", None) is True:
            part.is_causal = False


def _llama(size: Size, dropout: float) -> Any:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        **size.shared, num_attention_heads=size.heads, num_key_value_heads=size.heads, attention_dropout=dropout,
        intermediate_size=11 * size.width // 4, max_position_embeddings=size.length,
    )  # fmt: skip
    return LlamaModel(config)


def _gpt_neox(size: Size, dropout: float) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXModel

    config = GPTNeoXConfig(
        **size.shared, num_attention_heads=size.heads, intermediate_size=4 * size.width,
        max_position_embeddings=size.length, hidden_dropout=dropout, attention_dropout=dropout,
    )  # fmt: skip
    return GPTNeoXModel(config)


_MAKERS: dict[str, Callable[[Size, float], Any]] = {"llama": _llama, "gpt_neox": _gpt_neox}


def task_of(variant: Variant, windows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of windows of ids: the next token, or the tokens under the mask.

    Args:
        variant: its objective, and the share of windows that ``[BOS]`` is put before.
        windows: shape ``(B, T + 1)``.
        generator: draws the windows that begin with ``[BOS]`` and the masked places, on the windows' device.

    Returns:
        Both of shape ``(B, T)``.
    """
    plain, after = windows[:, :-1], windows[:, 1:]
    begun = nn.functional.pad(windows[:, :-2], (1, 0), value=BOS)
    draws = torch.rand(len(windows), 1, device=windows.device, generator=generator) < variant.bos
    inputs, targets = torch.where(draws, begun, plain), torch.where(draws, plain, after)
    if variant.objective != "masked":
        return inputs, targets
    hidden = torch.rand(inputs.shape, device=inputs.device, generator=generator) < MASKED
    hidden &= inputs != BOS
    return inputs.masked_fill(hidden, MASK), inputs.masked_fill(~hidden, IGNORED)


@torch.no_grad()
def sees_ahead(backbone: Any, vocab: int, length: int = 16) -> bool:
    """Return whether the first token's state depends on the last token."""
    device = next(backbone.parameters()).device
    ids = torch.arange(4, 4 + length, device=device)[None] % vocab
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 7) % vocab
    first, second = (backbone(input_ids=x, use_cache=False).last_hidden_state[0, 0] for x in (ids, other))
    return not torch.equal(first, second)


def block_parameters(model: LanguageModel) -> int:
    """Return the number of parameters in the blocks."""
    return sum(p.numel() for name, p in model.backbone.named_parameters() if "layers." in name)


def rate(step: int, *, steps: int, warmup: int) -> float:
    """Return the share of the peak learning rate: a line up, then half a cosine down to a tenth.

    Example:
        >>> [round(rate(step, steps=100, warmup=10), 2) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Pretraining(pl.LightningModule):
    """Trains a language model on windows of ids.

    Args:
        model: its backbone is what the callback measures.
        variant: decides inputs, targets and optimizer.
        compiled: whether to compile the blocks and the loss.
    """

    def __init__(self, model: LanguageModel, variant: Variant, *, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.variant = model, variant
        if compiled:
            model.compile_training()
        self.losses: list[Tensor] = []

    def on_fit_start(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def training_step(self, windows: Tensor) -> Tensor:
        loss: Tensor = self.model(*task_of(self.variant, windows, self.generator))
        self.losses.append(loss.detach())  # left on the device: reading it each step would wait for the step
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW, with weight decay on matrices alone, and the schedule."""
        given, parameters = self.variant, list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": given.decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=given.peak, betas=(0.9, 0.95), fused=parameters[0].is_cuda)
        warmup = min(WARMUP, max(1, given.steps // 20))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate(step, steps=given.steps, warmup=warmup)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        # Lightning refuses to clip for a fused optimizer, because of float16's scaler; in bfloat16 there is none.
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    @torch.no_grad()
    def held_out_loss(self, windows: Tensor, batch: int = 64) -> float:
        """Return the mean loss over windows, under the same draws each time; draws from no shared generator."""
        generator = torch.Generator(windows.device).manual_seed(0)
        inputs, targets = task_of(self.variant, windows, generator)
        losses = [self.model(*pair) for pair in zip(inputs.split(batch), targets.split(batch), strict=True)]
        return float(torch.stack(losses).mean())
