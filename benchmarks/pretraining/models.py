"""Three language models of one depth, width and vocabulary that differ in their objective, and what they are trained on.

``causal`` and ``masked`` are the very same GPTNeoX blocks, from the very same first weights; the masked one sees both sides.
``ssm`` is a causal Mamba2 whose mixers are as large as a GPTNeoX block. Every model has an output layer of its own weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pretraining.corpus import EOS, MASK, PAD, VOCAB
from benchmarks.pretraining.scan import use_matrix_products

OBJECTIVES = ("causal", "masked", "ssm")
MASKED = 0.3  # of the tokens; all of them are replaced by the mask
IGNORED = -100  # the target that cross entropy skips


@dataclass(frozen=True)
class Size:
    """How large a model is: by default 38M parameters in its blocks and 8M outside them."""

    blocks: int = 12
    width: int = 512
    vocab: int = VOCAB
    length: int = 256

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)


class LanguageModel(nn.Module):
    """A transformers model without a head, and a linear layer to the vocabulary."""

    def __init__(self, backbone: nn.Module, size: Size) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(size.width, size.vocab, bias=False)
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


def _when_training(plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (compiled if torch.is_grad_enabled() else plain)(*args, **kwargs)


def language_model(objective: str, size: Size | None = None, *, dropout: float = 0.0, seed: int = 0) -> LanguageModel:
    """Return a model of random weights; the same seed gives ``causal`` and ``masked`` the same ones."""
    size = size or Size()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LanguageModel(_mamba2(size) if objective == "ssm" else _gpt_neox(size, objective, dropout), size)


def _gpt_neox(size: Size, objective: str, dropout: float) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXModel

    config = GPTNeoXConfig(
        vocab_size=size.vocab, hidden_size=size.width, num_hidden_layers=size.blocks, num_attention_heads=size.heads,
        intermediate_size=4 * size.width, max_position_embeddings=size.length, use_cache=False,
        hidden_dropout=dropout, attention_dropout=dropout, pad_token_id=PAD, bos_token_id=EOS, eos_token_id=EOS,
    )  # fmt: skip
    config.is_causal = objective != "masked"
    return GPTNeoXModel(config)


def _mamba2(size: Size, *, expand: int = 4, head: int = 128, state: int = 64) -> nn.Module:
    """Return a Mamba2 whose blocks hold about the 12 width² parameters of a GPTNeoX block, by ``expand=4``."""
    from transformers import Mamba2Config, Mamba2Model

    head = min(head, size.width)
    config = Mamba2Config(
        vocab_size=size.vocab, hidden_size=size.width, num_hidden_layers=size.blocks, expand=expand, head_dim=head,
        num_heads=expand * size.width // head, n_groups=1, state_size=state, chunk_size=min(64, size.length),
        use_cache=False, pad_token_id=PAD, bos_token_id=EOS, eos_token_id=EOS,
    )  # fmt: skip
    return use_matrix_products(Mamba2Model(config))


def task_of(objective: str, windows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of windows of ids: the next token, or the tokens under the mask.

    Args:
        objective: ``"causal"``, ``"masked"`` or ``"ssm"``.
        windows: shape ``(B, T + 1)``.
        generator: draws the masked places, on the windows' device.

    Returns:
        Both of shape ``(B, T)``.
    """
    inputs = windows[:, :-1]
    if objective != "masked":
        return inputs, windows[:, 1:]
    hidden = torch.rand(inputs.shape, device=inputs.device, generator=generator) < MASKED
    return inputs.masked_fill(hidden, MASK), inputs.masked_fill(~hidden, IGNORED)


@torch.no_grad()
def sees_ahead(backbone: Any, vocab: int, length: int = 16) -> bool:
    """Return whether the first token's state depends on the last token."""
    device = next(backbone.parameters()).device
    ids = torch.arange(3, 3 + length, device=device)[None] % vocab
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 7) % vocab
    first, second = (backbone(input_ids=x, use_cache=False).last_hidden_state[0, 0] for x in (ids, other))
    return not torch.equal(first, second)


def block_parameters(model: LanguageModel) -> int:
    """Return the number of parameters in the blocks."""
    return sum(p.numel() for name, p in model.backbone.named_parameters() if "layers." in name)
