r"""Pool token states into one vector, numerically equal to sentence-transformers.

:class:`FusedPooling` fuses the final norm and the pooling, without writing the normalized states to memory.

An RMSNorm followed by a weighted mean over tokens is one weighted sum; a LayerNorm also subtracts each token's mean:

.. math::
    \sum_t w_t \Bigl( g \odot \frac{x_t}{\mathrm{rms}(x_t)} + b \Bigr)
    = g \odot \sum_t \frac{w_t}{\mathrm{rms}(x_t)}\, x_t + b \sum_t w_t

Each known form is compared with the model's norm on random rows and then on real states. If none agrees, norm and
pooling run separately.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from midlayer_encoders._types import POOLINGS, Pooling
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.spectra.eigen import kernels_run_on
from midlayer_encoders.validation import check_choice

_SCALED_MEAN = "mean_sqrt_len_tokens"  # of sentence-transformers: the sum over the square root of the length
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_MAX_ROUNDINGS = 4  # tolerance, in machine epsilons of the states' dtype
_SUM_TOLERANCE = 1e-5  # relative, for the order of summation in float32
_MAX_KERNEL_WIDTH = 8192  # dimensions that fit into the registers of one program


def pool(states: Tensor, mask: Tensor, pooling: Pooling = "mean") -> Tensor:
    r"""Return one vector per text, pooled over its real tokens; texts may be padded on either side.

    .. math::
        \text{mean: } \frac{\sum_t m_t z_t}{\sum_t m_t}, \qquad
        \text{weightedmean: } \frac{\sum_t m_t\, i_t\, z_t}{\sum_t m_t\, i_t},
        \quad i_t = 1, 2, \dots \text{ over the real tokens}

    Args:
        states: shape ``(B, T, D)``.
        mask: true at real tokens, shape ``(B, T)``.
        pooling: ``"mean"``, ``"last"``, ``"cls"`` (the first token), ``"max"``, ``"weightedmean"`` or
            ``"mean_sqrt_len_tokens"``, or several joined by plus signs, whose vectors are concatenated.

    Returns:
        Shape ``(B, D)``, float32 or better. Zeros for a text without tokens.

    Example:
        >>> states = torch.tensor([[[1.0], [3.0], [9.0]]])
        >>> mask = torch.tensor([[True, True, False]])
        >>> [pool(states, mask, pooling).item() for pooling in ("mean", "last", "cls", "max")]
        [2.0, 3.0, 1.0, 3.0]
    """
    if "+" in pooling:
        return torch.cat([pool(states, mask, cast(Pooling, part)) for part in pooling.split("+")], dim=-1)
    check_choice("pooling", pooling, (*POOLINGS, _SCALED_MEAN))
    states = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    if pooling in ("mean", "weightedmean", _SCALED_MEAN):
        weights = token_weights(mask, pooling, states.dtype)
        total = torch.einsum("btd,bt->bd", states, weights)
        count = weights.sum(dim=1, keepdim=True).clamp(min=1)
        return total / (count.sqrt() if pooling == _SCALED_MEAN else count)
    if pooling == "max":
        real = mask.any(dim=1, keepdim=True)
        return states.masked_fill(~mask[..., None], -torch.inf).amax(dim=1).masked_fill(~real, 0.0)
    real, place = token_places(mask, pooling)
    return states[torch.arange(len(states), device=states.device), place].masked_fill(~real, 0.0)


def token_weights(mask: Tensor, pooling: Pooling, dtype: torch.dtype) -> Tensor:
    """Return the token weights of a ``"mean"`` or ``"weightedmean"``, zero at padding, shape ``(B, T)``."""
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return mask * mask.cumsum(dim=1).to(dtype) if pooling == "weightedmean" else mask.to(dtype)


def token_places(mask: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor]:
    """Return whether each text has a token, shape ``(B, 1)``, and the index of its first (``"cls"``) or last one."""
    last = mask.shape[1] - 1
    place = mask.int().argmax(dim=1) if pooling == "cls" else last - mask.int().flip(1).argmax(dim=1)
    return mask.any(dim=1, keepdim=True), place


def real_tokens(mask: Tensor | None, states: Tensor, *, model: nn.Module | None = None) -> Tensor:
    """Return the bool mask of real tokens, shape ``(B, T)``; all true without an attention mask.

    Audio models downsample their inputs, so the input mask is longer than the states. Wav2Vec2, HuBERT and WavLM
    have a method that downsamples the mask; Whisper keeps every second frame.

    Args:
        mask: the ``attention_mask`` of the model's inputs.
        states: shape ``(B, T, D)``.
        model: the transformer.
    """
    if mask is None or len(mask) != len(states) or mask.ndim != 2:
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    mask = mask.to(states.device)
    length = states.shape[1]
    if mask.shape[1] == length:
        return mask.bool()
    main_input = getattr(model, "main_input_name", "")
    if main_input == "input_ids" and length > mask.shape[1]:  # the model pads to whole windows
        return torch.nn.functional.pad(mask, (0, length - mask.shape[1])).bool()
    if model is not None and internals.has_mask_of_states(model):
        return internals.mask_of_states(model, length, mask)
    if main_input == "input_features":
        return mask[:, :: -(-mask.shape[1] // length)].bool()
    return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)


class NormForm(NamedTuple):
    r"""The form of a norm: :math:`(o + w) \odot (x - c\,\bar x) / \sqrt{\mathrm{ms} + \epsilon} + b`.

    Attributes:
        module: the norm, with ``weight`` and ``bias``; ``None`` for no norm.
        center: subtract the token's mean.
        offset: added to the weight, 1 in Gemma's norms.
        eps: added to the mean square.
    """

    module: nn.Module | None
    center: bool = False
    offset: float = 0.0
    eps: float = 0.0

    def sums(self, states: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each text's normalized tokens, shape ``(B, D)``, in float32 or better."""
        sums = normed_sums(states, weights, scale=self.module is not None, center=self.center, eps=self.eps)
        if (gain := getattr(self.module, "weight", None)) is not None:
            sums = sums * (gain.to(sums.dtype) + self.offset)
        if (bias := getattr(self.module, "bias", None)) is not None:
            sums = sums + bias.to(sums.dtype) * weights.to(sums.dtype).sum(dim=1, keepdim=True)
        return sums


def normed_sums(states: Tensor, weights: Tensor, *, scale: bool, center: bool, eps: float) -> Tensor:
    """Return the weighted sum of each text's tokens, optionally scaled to a root mean square of one.

    Args:
        states: shape ``(B, T, D)``.
        weights: token weights, zero at padding, shape ``(B, T)``.
        scale: divide each token by its root mean square.
        center: first subtract the token's mean.
        eps: added to the mean square.

    Returns:
        Shape ``(B, D)``, float32 or better.
    """
    if _kernel_runs(states):
        from midlayer_encoders.reading import _pooling_triton

        return _pooling_triton.normed_sums(states, weights, scale=scale, center=center, eps=eps)
    states = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    weights = weights.to(states.dtype)
    if scale and center:
        variance, means = torch.var_mean(states, dim=-1, correction=0, keepdim=True)
        states = states - means  # before the sum, to avoid cancellation
        weights = weights / (variance[..., 0] + eps).sqrt()
    elif scale:
        squares = torch.linalg.vector_norm(states, dim=-1).square() / states.shape[-1]
        weights = torch.where(weights == 0, weights, weights / (squares + eps).sqrt())
    return torch.einsum("btd,bt->bd", states, weights)


def _kernel_runs(states: Tensor) -> bool:
    width = states.shape[-1]
    fits = states.numel() and states.stride(-1) == 1 and width <= _MAX_KERNEL_WIDTH and states.dtype != torch.float64
    if states.shape[1] == 1:  # no sum: the trial of a norm must not wait for a compiler
        return False
    return bool(fits) and kernels_run_on(states, (7, 0))


def find_form(modules: nn.Sequential, states: Tensor) -> NormForm | None:
    """Return the form of the modules after the last block, or ``None`` if they are not a known norm.

    Args:
        modules: the modules in order; empty for no norm.
        states: states with the device, dtype and width to use, shape ``(B, T, D)``.
    """
    if not len(modules):
        return NormForm(None)
    if len(modules) > 1 or any(modules[0].children()):
        return None
    norm = modules[0]
    if not all(
        name in ("weight", "bias") and parameter.shape == states.shape[-1:] and parameter.device == states.device
        for name, parameter in norm.named_parameters()
    ):
        return None
    eps = norm_eps(norm)
    rows = _random_rows(states)
    expected = norm(rows)
    if expected.shape != rows.shape or not expected.is_floating_point():
        return None
    for center in (False, True):
        for offset in (0.0, 1.0):
            form = NormForm(norm, center, offset, eps)
            # Each row is a text of one token, so its sum is the normalized row.
            sums = form.sums(rows.reshape(-1, 1, rows.shape[-1]), torch.ones(len(rows[0]), 1, device=rows.device))
            rows_normed = expected[0].to(sums.dtype)
            if not _differ(sums, rows_normed, rows_normed.abs(), _MAX_ROUNDINGS * torch.finfo(states.dtype).eps):
                return form
    return None


def norm_eps(norm: nn.Module) -> float:
    """Return what a norm adds to the mean square."""
    return next(
        (float(getattr(norm, name)) for name in _EPS_NAMES if isinstance(getattr(norm, name, None), float)), 0.0
    )


def _random_rows(states: Tensor) -> Tensor:
    """Return rows of many magnitudes with nonzero means, which distinguish all forms."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0])[:, None]
    rows = sizes * (0.5 + torch.randn(len(sizes), states.shape[-1], generator=generator))
    return rows.to(states.device, states.dtype)[None]


def _differ(vectors: Tensor, expected: Tensor, magnitude: Tensor, tolerance: float) -> Tensor:
    """Return whether vectors differ by more than the tolerance relative to the states; NaN counts as equal."""
    return ((vectors - expected).abs() > tolerance * (magnitude + magnitude.amax() / 4)).any()


class FusedPooling:
    """Normalizes and pools the states of each layer in one step if that gives the same vectors.

    The first batch of each layer is pooled both ways, and :meth:`settle` compares the vectors; later batches never
    wait for the device.

    Args:
        modules: modules after the last block.
        pooling: how token states become one vector.
        enabled: False to normalize and pool separately, which also works for gradients.
        trusted: whether each layer may be pooled in one step, as far as earlier runs have compared the vectors.
    """

    def __init__(
        self, modules: nn.Sequential, pooling: Pooling, *, enabled: bool = True, trusted: dict[int, bool] | None = None
    ) -> None:
        self.modules = modules
        self.pooling = pooling
        self.enabled = enabled and pooling in ("mean", "weightedmean", "cls", "last")
        self.trusted = {} if trusted is None else trusted  # by layer
        self._forms: dict[torch.dtype, NormForm | None] = {}
        self._first_batches: dict[int, tuple[Tensor, Tensor]] = {}  # vectors pooled separately, whether they differ

    def __call__(self, layer: int, states: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors of a layer, shape ``(B, D)``, in float32 or better.

        Args:
            layer: number of the layer.
            states: raw, shape ``(B, T, D)``.
            mask: true at real tokens, shape ``(B, T)``.
        """
        vectors = self._fused(states, mask) if self.trusted.get(layer, True) else None
        if vectors is not None and layer in self.trusted:
            return vectors
        normed = self.modules(states)
        separate = pool(normed, mask, self.pooling)
        if vectors is None:
            return separate
        tolerance = max(_MAX_ROUNDINGS * torch.finfo(normed.dtype).eps, _SUM_TOLERANCE)
        magnitude = pool(normed.abs(), mask, self.pooling)
        self._first_batches[layer] = separate, _differ(vectors.to(separate.dtype), separate, magnitude, tolerance)
        return vectors

    def settle(self) -> dict[int, Tensor]:
        """Return the separately pooled vectors of the layers whose first batch differs, which are not trusted."""
        first, self._first_batches = self._first_batches, {}
        if not first:
            return {}
        differ = torch.stack([differs.to(first[min(first)][1].device) for _, differs in first.values()]).tolist()
        self.trusted |= {layer: not differs for layer, differs in zip(first, differ, strict=True)}
        return {layer: separate for layer, (separate, _) in first.items() if not self.trusted[layer]}

    def _fused(self, states: Tensor, mask: Tensor) -> Tensor | None:
        """Return the vectors in one step, or None if the norm has no known form."""
        if not self.enabled:
            return None
        if self.pooling in ("cls", "last"):  # normalize only the pooled token
            real, place = token_places(mask, self.pooling)
            pooled = states[torch.arange(len(states), device=states.device), place]
            return pool(self.modules(pooled[:, None]), real, "cls")
        if states.dtype not in self._forms:
            self._forms[states.dtype] = find_form(self.modules, states)
        form = self._forms[states.dtype]
        if form is None:
            return None
        weights = token_weights(mask, self.pooling, states.dtype)
        return form.sums(states, weights) / weights.sum(dim=1, keepdim=True).clamp(min=1)
