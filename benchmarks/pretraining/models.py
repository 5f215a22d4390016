"""Language models of one depth, width and vocabulary that differ in one thing, and what they are trained on.

A ``mamba2`` has mixers as large as a Llama block. The same seed gives models of the same blocks the same first weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pretraining.attention import give_sink
from benchmarks.pretraining.scan import use_matrix_products
from benchmarks.pretraining.variants import Variant
from benchmarks.pretraining.vocabulary import BOS, EOS, MASK, PAD, VOCAB

MASKED = 0.3  # of the tokens; all of them are replaced by the mask
IGNORED = -100  # the target that cross entropy skips


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

        The whole of a Mamba2 as one graph takes over 100 s to compile, its blocks alone seconds. Hooks sit on a block's call, not
        on its forward, so the callback's hooks never reach the compiler, and a measurement of another shape runs the uncompiled blocks.
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
        if variant.sink:
            give_sink(backbone, variant.sink)
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


def _mamba2(size: Size, _: float, *, expand: int = 4, head: int = 128, state: int = 64) -> Any:
    """Return a Mamba2 whose blocks hold about the 12 width² parameters of a transformer's, by ``expand=4``."""
    from transformers import Mamba2Config, Mamba2Model

    head = min(head, size.width)
    config = Mamba2Config(
        **size.shared, expand=expand, head_dim=head, num_heads=expand * size.width // head, n_groups=1,
        state_size=state, chunk_size=min(64, size.length),
    )  # fmt: skip
    return use_matrix_products(Mamba2Model(config))


_MAKERS: dict[str, Callable[[Size, float], Any]] = {"llama": _llama, "gpt_neox": _gpt_neox, "mamba2": _mamba2}


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
