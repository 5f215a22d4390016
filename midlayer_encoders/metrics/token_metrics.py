"""Metrics of each text's token states, averaged over texts and accumulated as sums."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import _layer_metric as base
from midlayer_encoders.metrics._layer_metric import Kind, LayerMetric, Normalization
from midlayer_encoders.metrics.eigen import Method, spectral_entropy
from midlayer_encoders.metrics.row_metrics import normalized_entropy, rank_of_gram


class MeanOverTexts(LayerMetric):
    """Mean over texts of a number that is computed from each text's token states.

    Stores three sums per layer, regardless of the number of texts. A text for which the number is undefined, such as a
    text that is too short, is excluded from the mean and counted in ``skipped``.

    Attributes:
        count: number of texts in the mean, shape ``(len(layers),)``.
        skipped: number of excluded texts, shape ``(len(layers),)``.
    """

    kind: ClassVar[Kind] = "tokens"
    total: Tensor
    count: Tensor
    skipped: Tensor

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        for name, dtype in (("total", torch.float64), ("count", torch.int64), ("skipped", torch.int64)):
            self.add_state(name, torch.zeros(len(self.layers), dtype=dtype), dist_reduce_fx="sum")

    def _add(self, rows: int | list[int], values: Tensor, defined: Tensor) -> None:
        """Add the number of each text for which it is defined to the sums of its layer; both tensors are ``(B,)``."""
        device = self.total.device
        position = torch.tensor(rows).expand(len(values)).to(device, non_blocking=True)
        values, defined = values.to(device), defined.to(device)
        # Not in place: sums that were created in inference mode may be updated outside it.
        self.total = self.total.index_add(0, position, torch.where(defined, values, 0.0).double())
        self.count = self.count.index_add(0, position, defined.long())
        self.skipped = self.skipped.index_add(0, position, (~defined).long())

    def _values(self) -> Tensor:
        for layer, texts in zip(self.layers, self.count.tolist(), strict=True):
            if self._has_value(layer):
                base.check_at_least(1, texts, f"Texts long enough for {type(self).__name__} at layer {layer}")
        return self.total / self.count


class TokenMetric(MeanOverTexts):
    """A :class:`MeanOverTexts` of a number of one layer, computed for several layers at once on a GPU.

    The small matrices or few angles of one layer do not fill a GPU, and every kernel launch has the same cost. So the
    intermediate results of a layer are buffered until the next layers are available
    (benchmarks/results/metrics_h200.md). :meth:`settle`, which ``compute`` and ``sync`` call, completes the sums.
    """

    #: Maximum size of the buffered intermediate results.
    _max_waiting_bytes: ClassVar[int] = 2**23  # more layers at once would save no time, and angles are in float64
    _kernels_read_in_place: ClassVar[bool] = False

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self._layout: tuple[torch.device, torch.dtype, torch.Size] | None = None
        #: The row of each text's layer in the sums, and tensors with one row per text.
        self._waiting: list[tuple[list[int], tuple[Tensor, ...]]] = []

    @abstractmethod
    def _intermediates(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of :meth:`_numbers`, tensors with one row per text that are not views of the states."""

    @abstractmethod
    def _numbers(self, intermediates: tuple[Tensor, ...], width: int) -> tuple[Tensor, Tensor]:
        """Return each text's number and whether it is defined, both ``(B,)``, from the intermediate results."""

    def _waits(self, states: Tensor) -> bool:
        return states.is_cuda

    def update(self, states: Tensor, mask: Tensor, *, layer: int, index: Tensor | None = None) -> None:  # noqa: ARG002
        """Add one layer's token states of a batch.

        Args:
            states: shape ``(B, T, D)``.
            mask: which tokens are real, shape ``(B, T)``, bool; padding may be on either side.
            layer: one of ``layers``.
            index: ignored; other metrics of token states need it.
        """
        base.check_tokens(states, mask)
        row = self._position(layer)
        layout = states.device, states.dtype, states.shape[1:]
        if layout != self._layout:
            self.settle()
        self._layout = layout
        for chunk, real in base.chunks(states, mask, self._kernels_read_in_place and base.kernels_can_read(states)):
            self._waiting.append(([row] * len(chunk), self._intermediates(chunk, real)))
            size = sum(tensor.nbytes for _, tensors in self._waiting for tensor in tensors)
            if size >= self._max_waiting_bytes or not self._waits(states):
                self.settle()

    def settle(self) -> None:
        """Add all buffered texts to the sums."""
        if not self._waiting or self._layout is None:
            return
        rows = [row for batch_rows, _ in self._waiting for row in batch_rows]
        intermediates = tuple(map(torch.cat, zip(*(tensors for _, tensors in self._waiting), strict=True)))
        self._waiting.clear()
        self._add(rows, *self._numbers(intermediates, self._layout[-1][-1]))

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Settle, then merge the sums with the other processes; ``compute`` calls this first."""
        self.settle()
        super().sync(*args, **kwargs)

    @property
    def metric_state(self) -> dict[str, list[Tensor] | Tensor]:
        """The sums, including buffered texts."""
        self.settle()
        return super().metric_state

    def reset(self) -> None:
        """Remove all texts."""
        super().reset()
        self._waiting = []


def prompt_entropy(
    states: Tensor,
    mask: Tensor | None = None,
    *,
    alpha: float = 1.0,
    normalization: Normalization = "raw",
    center: bool = True,
    unit: bool = True,
    method: Method = "auto",
) -> Tensor:
    r"""Return the matrix entropy of each text's tokens, in nats, after centering them and scaling them to unit length.

    .. math::
        S_\alpha(\hat Z), \qquad \hat z_t = \frac{z_t - \bar z}{\lVert z_t - \bar z \rVert}

    with :math:`S_\alpha` of :func:`matrix_entropy`. Centering and scaling follow Wei et al. (2024), as in the paper.

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all. Padding may be anywhere.
        alpha: order, ``> 0``.
        normalization: see :func:`matrix_entropy`; N is the number of real tokens.
        center: subtract the mean of the text's tokens.
        unit: scale each token to unit length.
        method: eigenvalue method, see :mod:`midlayer_encoders.metrics.eigen`.

    Returns:
        Shape ``(*)``, between ``0`` and ``log(min(T - 1, D))`` if raw and centered. ``0`` for fewer than two tokens
        and for equal tokens. NaN if the states hold NaN or infinity.

    Example:
        >>> import torch
        >>> prompt_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]))
        tensor(0.6931)
    """
    base.check_options(alpha=alpha, normalization=normalization)
    mask = base.all_real(states) if mask is None else mask
    gram, sizes, count = _grams(states, mask, center=center, unit=unit, double=alpha < 1)
    entropy = spectral_entropy(gram, sizes, alpha=alpha, method=method, check=False)
    return normalized_entropy(entropy, count, states.shape[-1], normalization).to(base.result_dtype(states))


def _grams(states: Tensor, mask: Tensor, *, center: bool, unit: bool, double: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return each text's Gram or moment matrix, the size of its valid corner, and the number of tokens.

    Low powers of small eigenvalues need ``double``, products in float64 on every device.
    """
    mask = mask.expand(states.shape[:-1])
    gram, sizes = base.token_gram(states, mask, center=center, unit=unit, double=double)
    if sizes is not None:
        return gram, sizes, sizes
    count = mask.sum(dim=-1)
    return gram, torch.full_like(count, gram.shape[-1]), count


class PromptEntropy(TokenMetric, function=prompt_entropy):
    """Mean over texts of :func:`prompt_entropy`, per layer.

    Texts of fewer than two tokens are excluded and counted in ``skipped``. Options as in the function.
    """

    _max_waiting_bytes: ClassVar[int] = 2**28  # the scratch memory of the spectra's kernels
    _kernels_read_in_place: ClassVar[bool] = True

    def _intermediates(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        center, unit, alpha = (self.options[name] for name in ("center", "unit", "alpha"))
        return _grams(states, mask, center=center, unit=unit, double=alpha < 1)

    def _numbers(self, intermediates: tuple[Tensor, ...], width: int) -> tuple[Tensor, Tensor]:
        gram, sizes, count = intermediates
        options = {name: self.options[name] for name in ("alpha", "method")}
        entropy = spectral_entropy(gram, sizes, check=False, **options)
        return normalized_entropy(entropy, count, width, self.options["normalization"]), count >= 2


def prompt_effective_rank(
    states: Tensor, mask: Tensor | None = None, *, center: bool = False, unit: bool = False, method: Method = "exact"
) -> Tensor:
    r"""Return the effective rank of each text's tokens.

    .. math::
        \operatorname{EffRank}(Z), \qquad Z = \text{the token states of one text}

    as in :func:`effective_rank`.

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all.
        center: subtract the mean of the text's tokens.
        unit: scale tokens to unit length, after centering.
        method: eigenvalue method, see :mod:`midlayer_encoders.metrics.eigen`.

    Returns:
        Shape ``(*)``, between ``1`` and ``min(T, D)``; ``0`` if all tokens are zero, NaN if they hold NaN or infinity.

    Example:
        >>> import torch
        >>> prompt_effective_rank(torch.eye(3)[None].repeat(2, 1, 1))
        tensor([3., 3.])
    """
    mask = base.all_real(states) if mask is None else mask
    gram, sizes, _ = _grams(states, mask, center=center, unit=unit, double=True)
    return rank_of_gram(gram, sizes, method).to(base.result_dtype(states))


class PromptEffectiveRank(TokenMetric, function=prompt_effective_rank):
    """Mean over texts of :func:`prompt_effective_rank`, per layer.

    Texts of fewer than two tokens are excluded and counted in ``skipped``. Options as in the function.
    """

    _max_waiting_bytes: ClassVar[int] = 2**29  # the scratch memory of the spectra's kernels in float64

    def _intermediates(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return _grams(states, mask, center=self.options["center"], unit=self.options["unit"], double=True)

    def _numbers(self, intermediates: tuple[Tensor, ...], width: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        gram, sizes, count = intermediates
        return rank_of_gram(gram, sizes, self.options["method"]), count >= 2


def curvature(states: Tensor, mask: Tensor | None = None, *, step: int = 1) -> Tensor:
    r"""Return the mean angle between successive differences of each text's tokens, in radians.

    .. math::
        \frac{1}{T-2} \sum_{k=1}^{T-2} \angle(v_{k+1}, v_k), \qquad v_k = z_{k+1} - z_k

    and for a step s, :math:`v_k = z_{k+s} - z_k` and the angle between :math:`v_{k+s}` and :math:`v_k`, over
    :math:`k = 1 \ldots T - 2s`. Pairs in which a difference is zero are skipped.

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all. Other tokens are left out of the path.
        step: number of tokens that a difference spans, 1 or more.

    Returns:
        Shape ``(*)``, between ``0`` (a line) and ``pi`` (back and forth). NaN if a text has fewer than
        ``2 * step + 1`` tokens or no nonzero difference, or its states hold NaN or infinity.

    Example:
        >>> curvature(torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [2.0, 1.0]]))
        tensor(1.5708)
    """
    base.check_options(step=step)
    total, count = _angles(*_turns(states, base.all_real(states) if mask is None else mask, step))
    return (total / count).to(base.result_dtype(states))


def _angles(apart: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of each text's angles and their number, both ``(*)``."""
    # Kahan's formula has full precision near 0 and pi, where the arc cosine loses half the digits.
    angles = 2 * torch.atan2(apart.double().sqrt(), along.double().sqrt())
    counts = apart != -1
    return torch.where(counts, angles, 0.0).sum(dim=-1), counts.sum(dim=-1)


def _turns(states: Tensor, mask: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return, for unit differences u and w that follow each other, the squared lengths of w - u and w + u, or -1."""
    if base.kernels_can_read(states):
        from midlayer_encoders.extras.kernels.tokens import turns

        return turns(states, mask, step)
    path, mask = base.tokens_first(states, mask)
    path = path.to(base.result_dtype(path))
    moves = path[..., step:, :] - path[..., :-step, :]
    length = base.lengths(moves)
    moves = moves / length.unsqueeze(-1)
    before, after = moves[..., :-step, :], moves[..., step:, :]
    exists = torch.arange(before.shape[-2], device=mask.device) + 2 * step < mask.sum(dim=-1, keepdim=True)
    exists = exists & (length[..., :-step] != 0) & (length[..., step:] != 0)
    apart, along = base.lengths(after - before).square(), base.lengths(after + before).square()
    return torch.where(exists, apart, -1.0), torch.where(exists, along, -1.0)


class Curvature(TokenMetric, function=curvature):
    """Mean over texts of :func:`curvature`, per layer.

    Texts without an angle (fewer than ``2 * step + 1`` tokens, or all tokens equal) are excluded and counted in
    ``skipped``. Options as in the function.
    """

    _kernels_read_in_place: ClassVar[bool] = True

    def _intermediates(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return _turns(states, mask, self.options["step"])

    def _numbers(self, intermediates: tuple[Tensor, ...], _: int) -> tuple[Tensor, Tensor]:
        total, count = _angles(*intermediates)
        return total / count, count > 0


def first_token_share(states: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the first token's share of the squared norm of each text's tokens.

    .. math::
        \frac{\lVert z_1 \rVert^2}{\sum_t \lVert z_t \rVert^2}

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all. The first real token is the first token.

    Returns:
        Shape ``(*)``, between ``0`` and ``1``; ``1 / T`` if all tokens are equally long. NaN if there is no token, all
        are zero, or the states hold NaN or infinity.

    Example:
        >>> first_token_share(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor(0.9000)
    """
    share, _ = _first_token_shares(states, base.all_real(states) if mask is None else mask)
    return share.to(base.result_dtype(states))


def _first_token_shares(states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return each text's share and whether it is defined, both ``(*)``."""
    # Squares in float64, so that a massive token does not overflow.
    energy = torch.where(mask, base.lengths(states.to(base.result_dtype(states))).double(), 0.0).square()
    first = mask.int().argmax(dim=-1, keepdim=True)
    total = energy.sum(dim=-1)
    share = torch.where(total.isinf(), torch.nan, energy.gather(-1, first).squeeze(-1) / total)
    return share, total != 0


class FirstTokenShare(TokenMetric, function=first_token_share):
    """Mean over texts of :func:`first_token_share`, per layer.

    Texts without a token, or with only zeros, are excluded and counted in ``skipped``.
    """

    def _intermediates(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return _first_token_shares(states, mask)

    def _numbers(self, intermediates: tuple[Tensor, ...], _: int) -> tuple[Tensor, Tensor]:
        share, defined = intermediates
        return share, defined


def block_influence(before: Tensor, after: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return one minus the mean cosine between each token before and after a block (ShortGPT, Men et al., 2024).

    .. math::
        1 - \frac{1}{T} \sum_t \cos(z_t^{\text{before}}, z_t^{\text{after}})

    Args:
        before: token states before the block, shape ``(*, T, D)``.
        after: token states after the block, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all.

    Returns:
        Shape ``(*)``, between ``0`` (direction unchanged) and ``2``. Tokens that are zero on either side are skipped;
        NaN if none is left or the states hold NaN or infinity.

    Example:
        >>> block_influence(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
        tensor(0.5000)
    """
    total, count = _rotations(before, after, base.all_real(after) if mask is None else mask)
    return (total / count).to(base.result_dtype(after))


def _rotations(before: Tensor, after: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of one minus cosine over each text's tokens, and their number, both ``(*)``."""
    before, after = before.to(base.result_dtype(before)), after.to(base.result_dtype(after))
    scale = base.lengths(before).double() * base.lengths(after).double()
    counts = mask & (scale != 0)
    cosine = (before * after).sum(dim=-1).double() / scale
    return torch.where(counts, 1.0 - cosine, 0.0).sum(dim=-1), counts.sum(dim=-1)


class BlockInfluence(MeanOverTexts, function=block_influence):
    """Mean over texts of :func:`block_influence` between each layer and the one listed before it.

    Within a batch, update the layers in the order of ``layers``; the previous layer's states are stored for that batch
    only. The first layer's value is always NaN. With all layers listed, the value at layer k is the influence of
    block k.
    """

    needs_previous = True

    _previous: tuple[int, Tensor] | None = None

    def update(self, states: Tensor, mask: Tensor, *, layer: int, index: Tensor | None = None) -> None:  # noqa: ARG002
        """Add one layer's token states ``(B, T, D)`` of a batch, after the previous layer."""
        base.check_tokens(states, mask)
        row = self._position(layer)
        previous = self._previous
        self._previous = (row, states.detach()) if row + 1 < len(self.layers) else None
        if row == 0:
            return
        if previous is None or previous[0] != row - 1 or previous[1].shape != states.shape:
            self._previous = None
            raise OptionError(
                f"`layer` {layer} must follow layer {self.layers[row - 1]} of the same batch: "
                f"update the layers in the order {list(self.layers)}, batch by batch."
            )
        for (before, real), (after, _) in zip(base.chunks(previous[1], mask), base.chunks(states, mask), strict=True):
            total, count = _rotations(before, after, real)
            self._add(row, total / count, count > 0)

    def reset(self) -> None:
        """Remove all texts and the current batch."""
        super().reset()
        self._previous = None
