"""Metrics that compare texts with each other: all of them, or a capped sample that every process draws alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import _layer_metric as base
from midlayer_encoders.metrics._layer_metric import Kind, LayerMetric, precise, products, result_dtype, unit_rows
from midlayer_encoders.spectra import Method, spectral_entropy
from midlayer_encoders.validation import check_choice, check_count

_STATES = ("rows", "index", "view")


class SampleMetric(LayerMetric):
    """A number that depends on the distances between texts.

    Stores the vectors of at most ``max_samples`` texts per layer (up to twice as many between updates): those whose
    position in the whole list has the smallest seeded hash. So every order, batch split and sharding gives the same
    sample and bitwise the same value. A repeated text counts once. Most such values depend on the number of texts:
    compare only values of equal ``num_samples``.

    A subclass passes ``number``, which computes the numbers of samples, shape ``(*)``, from the vectors of each view,
    ``(*, N, D)`` float64, and the options.

    Args:
        layers: as in :class:`LayerMetric`.
        max_samples: largest number of texts stored, 2 or more.
        seed: seed of the sample if there are more texts.
        options: as in :class:`LayerMetric`.

    Attributes:
        num_samples: texts that the last ``compute`` used; ``None`` before.
        views: number of views of each text.
        least: smallest number of texts that has a value.
        counted: description of the texts that count.
    """

    views: int = 1
    least: int = 2
    counted: ClassVar[str] = "Different texts"
    _counts_repeats = False

    def __init__(self, layers: Sequence[int], *, max_samples: int = 1000, seed: int = 0, **options: Any) -> None:
        if "seed" in self._option_defaults:
            options["seed"] = seed
        super().__init__(layers, **options)
        self._number_of_views = partial(self._number, **self.options)
        self.max_samples = check_count("max_samples", max_samples, minimum=2)
        self.seed = seed
        self.num_samples: int | None = None
        self._num_texts: Counter[int] = Counter()
        for layer in self.layers:
            for name in _STATES:
                self.add_state(f"{name}_{layer}", [], dist_reduce_fx="cat")

    def _numbered(self, layer: int, count: int, index: Tensor | None) -> Tensor:
        """Return the index, or if there is none, number the texts of a layer in order of arrival."""
        if index is not None:
            return index
        if base.is_distributed():
            raise OptionError("`index` must be given when several processes share the texts, but got None.")
        self._position(layer)
        self._num_texts[layer] += count
        return torch.arange(self._num_texts[layer] - count, self._num_texts[layer])

    def reset(self) -> None:
        """Remove all texts."""
        super().reset()
        self._num_texts = Counter()

    def _store(self, layer: int, embeddings: Tensor, index: Tensor, view: int | Tensor) -> None:
        base.check_embeddings(embeddings, index)
        self._position(layer)
        # The index usually is on the CPU, where choosing the sample does not wait for a GPU.
        index = index.to(torch.int64)
        new_states = (base.owned(embeddings), index, torch.zeros_like(index) + view)
        for name, new in zip(_STATES, new_states, strict=True):
            getattr(self, f"{name}_{layer}").append(new)
        if sum(map(len, getattr(self, f"index_{layer}"))) > 2 * self.max_samples * self.views:
            self._thin(layer)

    def _thin(self, layer: int) -> None:
        """Drop texts outside the sample and repeated texts from a layer."""
        index = torch.cat(getattr(self, f"index_{layer}"))
        view = torch.cat(getattr(self, f"view_{layer}"))
        sample = self._sample(index, view)
        for name in _STATES:
            state = getattr(self, f"{name}_{layer}")
            tensor = torch.cat(state)
            state[:] = [tensor[sample.to(tensor.device)]]

    def _sample(self, index: Tensor, view: Tensor) -> Tensor:
        """Return the rows of the sample, sorted by view and then index."""
        index, view = index.cpu(), view.cpu()
        keys, order = torch.sort(index * self.views + view, stable=True)
        first = torch.ones_like(keys, dtype=torch.bool)
        first[1:] = keys[1:] != keys[:-1]
        order = order[first]
        hashes = hashed(index[order], self.seed)
        largest = torch.unique(hashes)[: self.max_samples][-1:]
        order = order[hashes <= largest]
        return order[torch.argsort(view[order], stable=True)]

    def _values(self, layers: Sequence[int]) -> Tensor:
        samples = [sample for sample, _ in self._samples(layers)]
        views, texts, _ = samples[0].shape
        return base.one_device(
            base.in_stacks(samples, self._number_of_stack, temporaries=self._temporaries(views, texts))
        )

    def _number_of_stack(self, samples: Tensor) -> Tensor:
        """Return the numbers of several layers, shape ``(L,)``, from their samples, ``(L, V, N, D)``."""
        samples = samples.double()
        finite = torch.isfinite(samples.flatten(1).sum(dim=1))  # without waiting for a GPU
        return torch.where(finite, self._number_of_views(*samples.unbind(dim=1)), torch.nan)

    def _temporaries(self, views: int, texts: int) -> int:
        """Return how many temporary numbers one layer needs: the similarities of all texts and views."""
        return views * texts * views * texts

    def _samples(self, layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's sample ``(V, N, D)`` and the index of each text, ascending, ``(N,)``.

        Layers usually have the same texts, so that the sample is chosen once.
        """
        samples: list[tuple[Tensor, Tensor]] = []
        previous: tuple[Tensor, Tensor] | None = None
        for layer in layers:
            rows, index, view = (base.joined(getattr(self, f"{name}_{layer}")) for name in _STATES)
            current = index.cpu(), view.cpu()
            if previous is None or not all(map(torch.equal, current, previous)):
                previous = current
                sample = self._sample(*current)
                texts = self._checked_texts(layer, current[0][sample])
                in_order = torch.equal(sample, torch.arange(len(sample)))
            rows = rows if in_order and len(rows) == len(sample) else rows[sample.to(rows.device)]
            samples.append((rows.reshape(self.views, len(texts), -1), texts))
        return samples

    def _checked_texts(self, layer: int, index: Tensor) -> Tensor:
        """Return the texts of a sample, or raise if views or texts are missing."""
        texts: Tensor = torch.unique(index)
        name = type(self).__name__
        if len(index) != len(texts) * self.views:
            raise base.TooFewTextsError(
                f"{name} must have all {self.views} views of every text, but layer {layer} has {len(index)} vectors of "
                f"{len(texts)} texts: pass every view from 0 to {self.views - 1} of each index."
            )
        base.check_at_least(self.least, len(texts), f"{self.counted} for {name} at layer {layer}")
        self.num_samples = len(texts)
        return texts


class PooledSampleMetric(SampleMetric):
    """A :class:`SampleMetric` of one vector per text."""

    kind: ClassVar[Kind] = "pooled"

    def update(self, embeddings: Tensor, *, layer: int, index: Tensor | None = None) -> None:
        """Add one layer's vectors of a batch.

        Args:
            embeddings: one row per text, shape ``(B, D)``.
            layer: one of ``layers``.
            index: position of each text in the whole list, shape ``(B,)``. By default texts are numbered in order of
                arrival, which does not work with several processes.
        """
        self._store(layer, embeddings, self._numbered(layer, len(embeddings), index), view=0)


class ViewMetric(SampleMetric):
    """A :class:`SampleMetric` of several views of each text, which arrive one at a time; ``forward`` raises."""

    kind: ClassVar[Kind] = "views"
    views: int = 2
    _compares = "the views"

    def update(self, embeddings: Tensor, *, layer: int, view: int | Tensor, index: Tensor | None = None) -> None:
        """Add one layer's vectors of one or several views of a batch.

        Args:
            embeddings: one row per text, shape ``(B, D)``.
            layer: one of ``layers``.
            view: view number, from 0, of all rows or of each, shape ``(B,)``; views that the metric does not use are
                ignored, so that metrics with different numbers of views can share the passes.
            index: position of each text in the whole list, shape ``(B,)``; required.
        """
        if index is None:
            raise OptionError(
                f"`index` must be the position of each text in the whole list, shape (B,), by which "
                f"{type(self).__name__} joins the views of a text, but got None. "
                "Pass index=torch.arange(start, start + len(embeddings))."
            )
        views = torch.as_tensor(view).expand(index.shape)
        if views.numel() and int(views.min()) < 0:
            raise OptionError(f"`view` must be 0 or more, but got {int(views.min())}.")
        used = (views < self.views).nonzero().squeeze(1)
        if len(used) == len(views):
            self._store(layer, embeddings, index, views)
        elif len(used):
            self._store(layer, embeddings[used.to(embeddings.device)], index[used.to(index.device)], views[used])


class PairMetric(PooledSampleMetric):
    """A :class:`PooledSampleMetric` that compares the same texts at two layers; ``forward`` raises.

    ``number`` compares two sets of vectors of the same texts, each ``(N, D)``.

    Args:
        layers: as in :class:`LayerMetric`.
        against: ``"previous"`` compares each layer with the one listed before it; the first value is NaN. A layer
            number, one of ``layers``, compares every layer with that one.
        options: as in :class:`SampleMetric`.
    """

    _compares = "two layers"

    def __init__(
        self, layers: Sequence[int], *, against: int | Literal["previous"] = "previous", **options: Any
    ) -> None:
        super().__init__(layers, **options)
        if against != "previous":
            self._position(against)
        self.against = against
        self.needs_previous = against == "previous"

    def _values(self, layers: Sequence[int]) -> Tensor:
        partners = {layer: self._partner(layer) for layer in layers if self._has_value(layer)}
        needed = list(dict.fromkeys([*layers, *partners.values()]))
        samples = dict(zip(needed, self._samples(needed), strict=True))
        for layer, partner in partners.items():
            if not torch.equal(samples[partner][1], samples[layer][1]):
                raise OptionError(
                    f"Layers {partner} and {layer} must be updated with the same texts, but have different `index`."
                )
        rows = {layer: sample.squeeze(0).double() for layer, (sample, _) in samples.items()}
        for layer, layer_rows in rows.items():  # a layer that is not finite has no value with the next one either
            if not torch.isfinite(layer_rows.sum()):
                raise self._not_finite(layer, float(layer_rows.sum()))
        numbers = {layer: self._number_of_views(rows[partner], rows[layer]) for layer, partner in partners.items()}
        return base.one_device([numbers.get(layer, rows[layer].new_tensor(torch.nan)) for layer in layers])

    def _partner(self, layer: int) -> int:
        return self.layers[self._position(layer) - 1] if self.against == "previous" else self.against


def check_pair(first: Tensor, second: Tensor, *, least: int = 2, same_width: bool = False) -> None:
    """Raise an :class:`OptionError` unless both have one row for each of ``least`` or more texts."""
    paired = first.ndim == second.ndim == 2 and len(first) == len(second) >= least
    if not paired or (same_width and first.shape != second.shape):
        raise OptionError(
            f"`first` and `second` must be (N, D) and (N, {'D' if same_width else 'E'}) with N of {least} or more, "
            f"but got {tuple(first.shape)} and {tuple(second.shape)}."
        )


def hashed(index: Tensor, seed: int) -> Tensor:
    """Return a pseudo-random int64 per index, different for different indices: the finalizer of SplitMix64.

    Example:
        >>> hashed(torch.tensor([0, 1, 2]), seed=0).argsort()
        tensor([0, 2, 1])
    """
    mixed = (index + seed + 1).numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((mixed ^ (mixed >> np.uint64(31))).view(np.int64))


TwoNNForm: TypeAlias = Literal["fit", "mle"]
"""A line through the origin fitted to the empirical distribution, or the maximum-likelihood estimate."""


def intrinsic_dimension(embeddings: Tensor, *, form: TwoNNForm = "fit", discard: float = 0.1) -> Tensor:
    r"""Return the intrinsic dimension of the texts from the distances to their two nearest neighbors (TwoNN).

    With :math:`\mu_i = r_{i2} / r_{i1}` in ascending order and :math:`n` of the :math:`N` ratios kept,

    .. math::
        d = \arg\min_d \sum_{i \le n} \Bigl(-\log\bigl(1 - \tfrac{i}{N}\bigr) - d \log \mu_i\Bigr)^2
        \qquad \text{or} \qquad d = \frac{n - 1}{\sum_{i \le n} \log \mu_i + (N - n) \log \mu_n}

    (Facco et al., 2017, for the fit without the largest tenth of the ratios; the other is the unbiased
    maximum-likelihood estimate of the same law with the largest ratios censored.)

    Args:
        embeddings: one row per text, shape ``(N, D)``. Equal rows count as one point.
        form: ``"fit"`` or ``"mle"``.
        discard: share of the largest ratios that are discarded, in ``[0, 1)``.

    Returns:
        Scalar, ``> 0``. NaN if the rows hold NaN or infinity.

    Raises:
        TooFewTextsError: fewer than three different rows, or none whose two neighbors differ in distance.

    Example:
        >>> intrinsic_dimension(torch.tensor([[0.0], [1.0], [3.0], [7.0]]), form="mle", discard=0.0)
        tensor(1.1527)
    """
    _check_dimension_options(form, discard)
    points = precise(embeddings)
    if not torch.isfinite(points.sum()):
        return torch.tensor(torch.nan, dtype=result_dtype(embeddings), device=points.device)
    points = torch.unique(points, dim=0)
    base.check_at_least(3, len(points), "Different rows of `embeddings`")
    logs = _log_ratios(points).sort().values
    count = max(2, int(len(logs) * (1 - discard)))
    base.check_at_least(1, int((logs[:count] > 0).sum()), "Rows whose two nearest neighbors differ in distance")
    if form == "mle":
        dimension = (count - 1) / (logs[:count].sum() + (len(logs) - count) * logs[count - 1])
    else:
        count = min(count, len(logs) - 1)  # the distribution is 1 at the largest ratio, where the log diverges
        share = torch.arange(1, count + 1, dtype=logs.dtype, device=logs.device) / len(logs)
        dimension = (-torch.log1p(-share) * logs[:count]).sum() / logs[:count].square().sum()
    return dimension.to(result_dtype(embeddings))


def _dimensions(embeddings: Tensor, **options: Any) -> Tensor:
    """Return the dimension of each layer, shape ``(L,)``, from vectors ``(L, N, D)``."""
    return torch.stack([intrinsic_dimension(rows, **options) for rows in embeddings])


def _log_ratios(points: Tensor) -> Tensor:
    """Return the logarithm of each point's second over first neighbor distance, shape ``(N,)``."""
    # Products round off the distances of near neighbors, so the distances of a few candidates are computed again.
    points = points - points.mean(dim=0)
    rough = torch.cdist(points, points)
    rough.fill_diagonal_(torch.inf)
    near = rough.topk(min(8, len(points) - 1), largest=False).indices
    exact = base.lengths(points[near] - points.unsqueeze(1)).sort(dim=-1).values
    return exact[:, 1].log() - exact[:, 0].log()


def _check_dimension_options(form: str, discard: float) -> None:
    check_choice("form", form, get_args(TwoNNForm))
    if not 0 <= discard < 1:
        raise OptionError(f"`discard` must be in [0, 1), but got {discard}.")


class IntrinsicDimension(
    PooledSampleMetric, function=intrinsic_dimension, check=_check_dimension_options, number=_dimensions
):
    """:func:`intrinsic_dimension` of one vector per text, per layer.

    Options are those of the function and of :class:`SampleMetric`. The estimate depends on the number of texts.
    """

    least = 3


LEAST_TOKENS = 4
"""Texts with fewer tokens are excluded: one token is not half a text."""


def half_match(first: Tensor, second: Tensor, *, center: bool = True) -> Tensor:
    r"""Return the mean reciprocal rank at which the halves of a text find each other, in both directions.

    .. math::
        \frac{1}{2N} \sum_i \frac{1}{r_{1 \to 2}(i)} + \frac{1}{r_{2 \to 1}(i)}

    where :math:`r_{1 \to 2}(i)` is the rank of text i's second half, by cosine with its first half, among all second
    halves. Equally near halves share the mean of their ranks.

    Args:
        first: mean of each text's first half, shape ``(N, D)``, two texts or more.
        second: mean of its second half, shape ``(N, D)``.
        center: subtract the mean of all first halves from the first halves, and likewise for the second ones. This
            removes common components, such as a massive first token.

    Returns:
        Scalar, above ``0`` and up to ``1``; about ``(log(N) + 0.58) / N`` for independent vectors. NaN if the rows
        hold NaN or infinity.

    Example:
        >>> half_match(torch.eye(4), 2 * torch.eye(4)), half_match(torch.ones(3, 2), torch.ones(3, 2))
        (tensor(1.), tensor(0.5000))
    """
    check_pair(first, second, same_width=True)
    return _half_match(first, second, center=center).to(result_dtype(first))


def _half_match(first: Tensor, second: Tensor, *, center: bool) -> Tensor:
    """Return the mean reciprocal rank of halves, each ``(*, N, D)``: shape ``(*)``."""
    halves = [precise(first), precise(second)]
    x, y = (unit_rows(half - half.mean(dim=-2, keepdim=True) if center else half) for half in halves)
    cosine = products(x, y)
    value = (_reciprocal_ranks(cosine) + _reciprocal_ranks(cosine.mT)).mean(dim=-1) / 2
    return torch.where(torch.isfinite(cosine.sum(dim=(-2, -1))), value, torch.nan)


def _reciprocal_ranks(cosine: Tensor) -> Tensor:
    """Return the reciprocal rank of each row's diagonal entry, shape ``(*, N)``."""
    true_pairs = cosine.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    # Equal up to rounding, as cosines are at most 1.
    close = (cosine - true_pairs).abs() <= 16 * torch.finfo(cosine.dtype).eps
    nearer = (cosine > true_pairs) & ~close
    return 2 / (1 + 2 * nearer.sum(dim=-1) + close.sum(dim=-1)).double()


def half_means(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each text's first half of tokens and of the rest, shape ``(2, B, D)``, float32 or better.

    Args:
        states: shape ``(B, T, D)``.
        mask: which tokens are real, shape ``(B, T)``, bool; padding may be on either side.

    Example:
        >>> half_means(torch.tensor([[[1.0], [3.0], [5.0], [9.0]]]), torch.ones(1, 4, dtype=torch.bool)).flatten()
        tensor([2., 7.])
    """
    count = mask.sum(dim=1, keepdim=True)
    early = mask & (mask.cumsum(dim=1) <= count // 2)
    halves = torch.stack([early, mask & ~early])  # (2, B, T)
    # Padding may hold NaN, and NaN times zero is NaN.
    clean = torch.where(mask.unsqueeze(-1), states, 0.0).to(result_dtype(states))
    with base.full_precision(states.device):
        total = torch.einsum("vbt,btd->vbd", halves.to(clean.dtype), clean)
    return total / halves.sum(dim=2).clamp(min=1).unsqueeze(-1)


class HalfMatch(SampleMetric, function=half_match, number=_half_match):
    """:func:`half_match` of each layer, from the token states of one pass: no augmentation, no second pass.

    Texts of fewer than four tokens are excluded. Options are those of the function and of :class:`SampleMetric`. The
    value decreases with the number of texts.
    """

    kind: ClassVar[Kind] = "tokens"
    views: int = 2
    counted: ClassVar[str] = f"Different texts of {LEAST_TOKENS} tokens or more"

    def update(self, states: Tensor, mask: Tensor, *, layer: int, index: Tensor | None = None) -> None:
        """Add one layer's token states of a batch.

        Args:
            states: shape ``(B, T, D)``.
            mask: which tokens are real, shape ``(B, T)``, bool; padding may be on either side.
            layer: one of ``layers``.
            index: position of each text in the whole list, shape ``(B,)``. By default texts are numbered in order of
                arrival, which does not work with several processes.
        """
        base.check_tokens(states, mask)
        index = self._numbered(layer, len(states), index)
        halves = torch.cat([half_means(*chunk) for chunk in base.chunks(states.detach(), mask)], dim=1)
        long_enough = mask.sum(dim=1) >= LEAST_TOKENS
        index = index.to(states.device)[long_enough]
        for view, rows in enumerate(halves):
            self._store(layer, rows[long_enough], index, view)


InfoNCEForm: TypeAlias = Literal["simclr", "one_way", "bound"]
"""Loss among all 2N views; from the first view among the N second ones; or ``log N`` minus the latter."""


def infonce(first: Tensor, second: Tensor, *, temperature: float = 0.1, form: InfoNCEForm = "simclr") -> Tensor:
    r"""Return the InfoNCE loss of two views of each text, in nats.

    .. math::
        -\frac{1}{2N} \sum_{i=1}^{2N} \log
        \frac{\exp(\cos(u_i, u_{i'}) / \tau)}{\sum_{j \ne i} \exp(\cos(u_i, u_j) / \tau)}

    over the 2N views u of both sides, i' being the other view of i's text (``"simclr"``), or one way,

    .. math::
        -\frac{1}{N} \sum_{i=1}^{N} \log
        \frac{\exp(\cos(x_i, y_i) / \tau)}{\sum_{j=1}^{N} \exp(\cos(x_i, y_j) / \tau)}

    Args:
        first: one view of each text, shape ``(N, D)``, two texts or more.
        second: another view of the same texts, shape ``(N, D)``.
        temperature: :math:`\tau`, ``> 0``.
        form: ``"simclr"``, ``"one_way"``, or ``"bound"``: log N minus the one-way loss, a lower bound on the mutual
            information of the views.

    Returns:
        Scalar, ``>= 0`` as a loss; at chance ``log(2N - 1)`` or one way ``log(N)``. The bound is at most ``log(N)``. A
        zero vector has cosine 0 with all others. NaN if the views hold NaN or infinity.

    Example:
        >>> infonce(torch.ones(4, 3), torch.ones(4, 3))  # at chance, log 7
        tensor(1.9459)
    """
    _check_infonce_options(temperature, form)
    check_pair(first, second, same_width=True)
    return _infonce(first, second, temperature=temperature, form=form).to(result_dtype(first))


def _infonce(first: Tensor, second: Tensor, *, temperature: float, form: InfoNCEForm) -> Tensor:
    """Return the loss of two views, each ``(*, N, D)``: shape ``(*)``."""
    x, y = unit_rows(precise(first)), unit_rows(precise(second))
    if form == "simclr":
        x = y = torch.cat([x, y], dim=-2)
    cosine = products(x, y) / temperature
    positive = cosine.diagonal(dim1=-2, dim2=-1)
    texts = first.shape[-2]
    if form == "simclr":
        positive.fill_(-torch.inf)  # a view is not compared with itself
        positive = torch.cat([cosine.diagonal(offset, dim1=-2, dim2=-1) for offset in (texts, -texts)], dim=-1)
    loss = (cosine.logsumexp(dim=-1) - positive).mean(dim=-1)
    return math.log(texts) - loss if form == "bound" else loss


def _check_infonce_options(temperature: float, form: str) -> None:
    base.check_positive("temperature", temperature)
    check_choice("form", form, get_args(InfoNCEForm))


class InfoNCE(ViewMetric, function=infonce, check=_check_infonce_options, number=_infonce):
    """:func:`infonce` of views 0 and 1 of each text, per layer.

    Options are those of the function and of :class:`SampleMetric`. The loss grows with the number of texts.
    """


def dime(
    first: Tensor,
    second: Tensor,
    *,
    alpha: float = 1.0,
    permutations: int = 10,
    seed: int = 0,
    unit: bool = True,
    method: Method = "auto",
) -> Tensor:
    r"""Return the difference of matrix entropies of two views of each text, in nats.

    .. math::
        \mathbb{E}_\Pi\, S_\alpha(K_x \circ \Pi K_y \Pi^\top) - S_\alpha(K_x \circ K_y)

    with :math:`K_x = X X^\top`, :math:`\circ` the elementwise product and :math:`\Pi` a random permutation of texts. It
    is a kernel measure of the views' dependence (Skean et al., 2023).

    Args:
        first: one view of each text, shape ``(N, D)``, two texts or more.
        second: another view of the same texts, shape ``(N, E)``.
        alpha: order of the entropy, ``> 0``; with ``2`` no eigenvalues are needed.
        permutations: number of random permutations.
        seed: seed of the permutations.
        unit: scale vectors to unit length, so that each kernel has a diagonal of ones, as matrix entropy assumes.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Scalar, at most ``log(N)``; 0 for independent views, and negative if a permutation fits better than the true
        pairs. NaN if the views hold NaN or infinity.

    Example:
        >>> dime(torch.ones(4, 2), torch.eye(4))  # one view is the same for every text
        tensor(0.)
    """
    _check_dime_options(alpha, permutations)
    check_pair(first, second)
    number = _dime(first, second, alpha=alpha, permutations=permutations, seed=seed, unit=unit, method=method)
    return number.to(result_dtype(first))


def _dime(
    first: Tensor, second: Tensor, *, alpha: float, permutations: int, seed: int, unit: bool, method: Method
) -> Tensor:
    """Return the difference of entropies of two views, each ``(*, N, D)``: shape ``(*)``."""
    orders = _orders(first.shape[-2], permutations, seed).to(first.device, non_blocking=True)
    shuffled = _kernel(second, unit)[..., orders[:, :, None], orders[:, None, :]]
    entropies = spectral_entropy(_kernel(first, unit).unsqueeze(-3) * shuffled, alpha=alpha, method=method, check=False)
    return entropies[..., 1:].mean(dim=-1) - entropies[..., 0]


def _kernel(rows: Tensor, unit: bool) -> Tensor:
    rows = unit_rows(precise(rows)) if unit else precise(rows)
    return products(rows, rows)


def _orders(count: int, permutations: int, seed: int) -> Tensor:
    """Return the identity and then random permutations, shape ``(1 + permutations, count)``."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = [torch.randperm(count, generator=generator) for _ in range(permutations)]
    return torch.stack([torch.arange(count), *shuffled])


def _check_dime_options(alpha: float, permutations: int) -> None:
    base.check_positive("alpha", alpha)
    check_count("permutations", permutations)


class DiME(ViewMetric, function=dime, check=_check_dime_options, number=_dime):
    """:func:`dime` of views 0 and 1 of each text, per layer.

    The most expensive metric: it finds ``permutations + 1`` spectra of the sample's size per layer. Options are those
    of the function and of :class:`SampleMetric`; both use ``seed``.
    """

    def _temporaries(self, views: int, texts: int) -> int:  # noqa: ARG002
        return (int(self.options["permutations"]) + 1) * texts**2


def lidar(views: Tensor, *, delta: float = 1e-4, exponential: bool = False, method: Method = "auto") -> Tensor:
    r"""Return the entropy of the spectrum of linear discriminant analysis with each text as a class, in nats.

    .. math::
        S_1\bigl(S_w^{-1/2} S_b S_w^{-1/2}\bigr), \quad
        S_b = \frac{1}{N-1} \sum_i (\mu_i - \mu)(\mu_i - \mu)^\top, \quad
        S_w = \frac{1}{N(V-1)} \sum_{i,v} (x_{iv} - \mu_i)(x_{iv} - \mu_i)^\top + \delta I

    with :math:`\mu_i` the mean of text i's views and :math:`\mu` the mean of those. Thilak et al. (2024) define LiDAR
    as :math:`\exp S_1`, with a small constant added to each share as in RankMe; ``exponential=True``, or
    ``make_metrics("exp_lidar", …)``, returns that without the constant. "Layer by Layer" plots the entropy.

    Args:
        views: V views of N texts, shape ``(V, N, D)``, two or more of each.
        delta: added to the within-text scatter, ``> 0``; in the units of the vectors, squared.
        exponential: return exp of the entropy, between 1 and ``min(N - 1, D)``: exp-LiDAR.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Scalar, between ``0`` and ``log(min(N - 1, D))``; ``0`` if all texts have the same mean. NaN if the views hold
        NaN or infinity, or are so large that ``delta`` is lost in their rounding.

    Example:
        >>> lidar(torch.eye(4).expand(2, 4, 4))  # four orthogonal texts span three dimensions: log 3
        tensor(1.0986)
    """
    _check_delta(delta)
    if views.ndim != 3 or min(views.shape[:2]) < 2:
        raise OptionError(
            f"`views` must be (V, N, D) with two or more views and texts, but got {tuple(views.shape)}: "
            "the scatter within a text needs two views, and the scatter between texts two texts."
        )
    return _lidar(*precise(views), delta=delta, exponential=exponential, method=method).to(result_dtype(views))


def _lidar(*all_views: Tensor, delta: float, exponential: bool, method: Method) -> Tensor:
    """Return LiDAR of views, each ``(*, N, D)``: shape ``(*)``."""
    views = torch.stack(all_views, dim=-3)
    num_views, texts = views.shape[-3:-1]
    means = views.mean(dim=-3, keepdim=True)
    within = (views - means).flatten(-3, -2) / (texts * (num_views - 1)) ** 0.5
    means = means.squeeze(-3)
    between = (means - means.mean(dim=-2, keepdim=True)) / (texts - 1) ** 0.5
    with base.full_precision(views.device):
        scatter = within.mT @ within
        scatter.diagonal(dim1=-2, dim2=-1).add_(delta)
        # With S_w = C C', the spectrum of C^-1 S_b C^-T is that of S_w^-1/2 S_b S_w^-1/2.
        # Not `cholesky`, which waits for the GPU to check that the factor exists.
        factor, failed = torch.linalg.cholesky_ex(scatter)
        whitened = torch.linalg.solve_triangular(factor, between.mT, upper=False).mT
    entropy = spectral_entropy(base.smaller_gram(whitened), method=method, check=False)
    return torch.where(failed == 0, entropy.exp() if exponential else entropy, torch.nan)


def _check_delta(delta: float) -> None:
    base.check_positive("delta", delta)  # or the scatter has no inverse


class LiDAR(ViewMetric, function=lidar, check=_check_delta, number=_lidar):
    """:func:`lidar` of all views of each text, per layer.

    ``views`` is the number of views of each text, 2 or more; the other options are those of the function and of
    :class:`SampleMetric`. ``max_samples`` is half of the other metrics' default because there are many views.
    """

    def __init__(self, layers: Sequence[int], *, views: int = 16, max_samples: int = 500, **options: Any) -> None:
        super().__init__(layers, max_samples=max_samples, **options)
        self.views = check_count("views", views, minimum=2)


def alignment(first: Tensor, second: Tensor, *, center: bool = True) -> Tensor:
    r"""Return the mean cosine between the vectors of each text and of a shortened copy of it.

    .. math::
        \frac{1}{N} \sum_i \cos(x_i - \bar x, y_i - \bar x)

    With unit vectors :math:`u` and :math:`v` of these differences it is :math:`1 - \frac{1}{2N} \sum_i \lVert u_i -
    v_i \rVert^2`, which falls as the alignment loss of Wang & Isola (2020) rises.

    Args:
        first: one row per text, shape ``(N, D)``, two texts or more.
        second: rows of copies of the same texts, shape ``(N, D)``, such as without a quarter of their words.
        center: subtract the mean of the texts from both, which removes common components.

    Returns:
        Scalar, between ``-1`` and ``1``. A row that equals the mean has cosine 0. NaN if the rows hold NaN or infinity.

    Example:
        >>> texts = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> alignment(texts, texts + torch.tensor([0.0, 1.0]))  # each copy is turned by 45 degrees
        tensor(0.7071)
    """
    check_pair(first, second, same_width=True)
    return _alignment(first, second, center=center).to(result_dtype(first))


def _alignment(first: Tensor, second: Tensor, *, center: bool) -> Tensor:
    """Return the mean cosine of texts and copies, each ``(*, N, D)``: shape ``(*)``."""
    mean = precise(first).mean(dim=-2, keepdim=True) * center
    rows = precise(torch.cat([first, second], dim=-2)) - mean
    rows = rows * base.row_scale(base.lengths(rows), base.lengths(mean), None, unit=True).unsqueeze(-1)
    x, y = rows.chunk(2, dim=-2)
    return (x * y).sum(dim=-1).mean(dim=-1)


class Alignment(ViewMetric, function=alignment, number=_alignment):
    """:func:`alignment` of each text, view 0, and its shortened copy, view 1, per layer.

    Options are those of the function and of :class:`SampleMetric`.
    """

    kind: ClassVar[Kind] = "copies"


def uniformity(embeddings: Tensor, *, t: float = 2.0, center: bool = True) -> Tensor:
    r"""Return the logarithm of the mean Gaussian potential of all pairs of texts on the unit sphere.

    .. math::
        \log \frac{2}{N(N-1)} \sum_{i < j} \exp(-t \lVert u_i - u_j \rVert^2), \qquad
        u_i = \frac{z_i - \bar z}{\lVert z_i - \bar z \rVert}

    (Wang & Isola, 2020, who do not subtract the mean.)

    Args:
        embeddings: one row per text, shape ``(N, D)``, two texts or more.
        t: scale of the squared distances, ``> 0``.
        center: subtract the mean of the rows, before they are scaled to unit length.

    Returns:
        Scalar, between ``-4 t`` and ``0``; ``0`` for equal rows, about ``-2 t`` for independent directions in many
        dimensions. A row that equals the mean stays zero. NaN if the rows hold NaN or infinity.

    Example:
        >>> uniformity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), uniformity(torch.ones(3, 2))
        (tensor(-8.), tensor(0.))
    """
    _check_t(t)
    base.check_at_least(2, len(embeddings), "Rows of `embeddings`")
    return _uniformity(embeddings, t=t, center=center).to(result_dtype(embeddings))


def _uniformity(embeddings: Tensor, *, t: float, center: bool) -> Tensor:
    """Return the uniformity of sets of rows ``(*, N, D)``: shape ``(*)``."""
    rows = base.prepared(embeddings, None, center=center, unit=True)
    squares = rows.square().sum(dim=-1)
    distances = squares.unsqueeze(-1) + squares.unsqueeze(-2) - 2 * products(rows, rows)
    potentials = -t * distances.clamp(min=0.0)
    potentials.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)  # a text is no pair with itself
    texts = rows.shape[-2]
    return potentials.flatten(-2).logsumexp(dim=-1) - math.log(texts * (texts - 1))


def _check_t(t: float) -> None:
    base.check_positive("t", t)


class Uniformity(PooledSampleMetric, function=uniformity, check=_check_t, number=_uniformity):
    """:func:`uniformity` of one vector per text, per layer.

    Options are those of the function and of :class:`SampleMetric`.
    """


def cka(first: Tensor, second: Tensor, *, unbiased: bool = False) -> Tensor:
    r"""Return the linear centered kernel alignment of two layers' or models' vectors of the same texts.

    .. math::
        \frac{\operatorname{HSIC}(K, L)}{\sqrt{\operatorname{HSIC}(K, K) \operatorname{HSIC}(L, L)}}, \qquad
        K = X X^\top, \; L = Y Y^\top, \; \operatorname{HSIC}(K, L) = \operatorname{tr}(K H L H)

    (Kornblith et al., 2019), or with the unbiased estimate of HSIC (Nguyen et al., 2021), which does not rise towards 1
    if there are fewer texts than dimensions.

    Args:
        first: one row per text, shape ``(N, D)``, two texts or more; four for ``unbiased``.
        second: rows of the same texts, shape ``(N, E)``.
        unbiased: use the unbiased estimate.

    Returns:
        Scalar, between ``0`` and ``1`` (unbiased: at most ``1``, may be below ``0``); ``0`` if either set is
        constant. NaN if the rows hold NaN or infinity.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> cka(rows, 3 * rows.flip(1) + 5)
        tensor(1.)
    """
    check_pair(first, second, least=4 if unbiased else 2)
    return cka_matrix(first[None], second[None], unbiased=unbiased)[0, 0]


def cka_matrix(first: Tensor, second: Tensor, *, unbiased: bool = False) -> Tensor:
    """Return the :func:`cka` of every layer of one model with every layer of another.

    Each layer's Gram matrix is computed once and stays in memory.

    Args:
        first: vectors of N texts at L layers, shape ``(L, N, D)``, two texts or more; four for ``unbiased``.
        second: vectors of the same texts at L' layers, shape ``(L', N, D')``.
        unbiased: use the unbiased estimate.

    Returns:
        Shape ``(L, L')``.

    Example:
        >>> layers = torch.stack([torch.eye(3), torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])])
        >>> cka_matrix(layers, layers)
        tensor([[1.0000, 0.7071],
                [0.7071, 1.0000]])
    """
    if first.ndim != 3 or second.ndim != 3 or first.shape[1] != second.shape[1]:
        raise OptionError(
            f"`first` and `second` must be (L, N, D) and (L', N, D') of the same N texts, "
            f"but got {tuple(first.shape)} and {tuple(second.shape)}."
        )
    hsic = _unbiased_hsic if unbiased else _hsic
    first_grams = [_centered_gram(precise(rows)) for rows in first]
    second_grams = [_centered_gram(precise(rows)) for rows in second]
    first_norms = torch.stack([hsic(gram, gram) for gram in first_grams])
    second_norms = torch.stack([hsic(gram, gram) for gram in second_grams])
    norms = torch.outer(first_norms, second_norms)
    cross = torch.stack([torch.stack([hsic(x, y) for y in second_grams]) for x in first_grams])
    # NaN is unequal to 0 and stays NaN.
    return torch.where(norms == 0, 0.0, cross / norms.sqrt()).to(result_dtype(first))


def _centered_gram(rows: Tensor) -> Tensor:
    rounding = 32 * torch.finfo(rows.dtype).eps * base.lengths(rows).amax()
    rows = rows - rows.mean(dim=0)
    rows = torch.where((base.lengths(rows) <= rounding).unsqueeze(-1), 0.0, rows)
    gram = products(rows, rows)
    # Only ratios matter: this scale keeps the sums of squares from overflow and underflow.
    trace = gram.trace()
    return gram / torch.where(trace == 0, 1.0, trace)


def _hsic(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum()


def _unbiased_hsic(first: Tensor, second: Tensor) -> Tensor:
    """Return HSIC without the bias of the diagonal (Song et al., 2012, equation 5), up to a factor that cancels."""
    n = len(first)
    first, second = (gram - torch.diag(gram.diagonal()) for gram in (first, second))
    sums = first.sum() * second.sum() / ((n - 1) * (n - 2))
    crossed = 2 * (first.sum(dim=0) * second.sum(dim=0)).sum() / (n - 2)
    return (first * second).sum() + sums - crossed


class CKA(PairMetric, function=cka, number=cka):
    """:func:`cka` between each layer's vectors and those of the previous layer, or of one fixed layer.

    For two models, call :func:`cka`. Options are those of the function and of :class:`PairMetric`.
    """

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.least = 4 if self.options["unbiased"] else 2


Distance: TypeAlias = Literal["cosine", "euclidean"]


def neighbor_overlap(first: Tensor, second: Tensor, *, k: int = 10, distance: Distance = "cosine") -> Tensor:
    r"""Return the mean share of each text's k nearest texts that two sets of vectors have in common.

    .. math::
        \frac{1}{N k} \sum_i \bigl| \mathcal{N}_k^X(i) \cap \mathcal{N}_k^Y(i) \bigr|

    (Doimo et al., 2020). Of texts at the same distance, the first one counts as nearest.

    Args:
        first: one row per text, shape ``(N, D)``, more than ``k`` texts.
        second: rows of the same texts, shape ``(N, E)``.
        k: number of neighbors, 1 or more.
        distance: ``"cosine"``, in which a zero vector has cosine 0 with all others, or ``"euclidean"``.

    Returns:
        Scalar, between ``0`` and ``1``; ``k / (N - 1)`` for independent vectors. NaN if the rows hold NaN or
        infinity.

    Example:
        >>> rows = torch.eye(4) + torch.arange(4.0)
        >>> neighbor_overlap(rows, 2 * rows, k=1)
        tensor(1.)
    """
    _check_neighbor_options(k, distance)
    check_pair(first, second, least=k + 1)
    near = _neighbors(precise(first), k, distance) & _neighbors(precise(second), k, distance)
    share = near.sum().double() / (len(first) * k)
    return torch.where(torch.isfinite(first.sum() + second.sum()), share, torch.nan).to(result_dtype(first))


def _neighbors(rows: Tensor, k: int, distance: Distance) -> Tensor:
    """Return True where text j is among the k nearest of text i, shape ``(N, N)``."""
    rows = unit_rows(rows) if distance == "cosine" else rows - rows.mean(dim=0)
    far = -products(rows, rows) if distance == "cosine" else torch.cdist(rows, rows)
    far.fill_diagonal_(torch.inf)
    order = far.argsort(dim=-1, stable=True)[:, :k]
    return torch.zeros_like(far, dtype=torch.bool).scatter_(1, order, True)


def _check_neighbor_options(k: int, distance: str) -> None:
    check_count("k", k)
    check_choice("distance", distance, get_args(Distance))


class NeighborOverlap(PairMetric, function=neighbor_overlap, check=_check_neighbor_options, number=neighbor_overlap):
    """:func:`neighbor_overlap` between each layer's vectors and those of the previous layer, or of one fixed layer.

    Options are those of the function and of :class:`PairMetric`. The value depends on the number of texts.
    """

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.least = int(self.options["k"]) + 1
