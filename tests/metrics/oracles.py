"""Literal definitions in float64, by the name of each metric: one prompt, one pair, one number at a time."""

import itertools
import math

import numpy as np
import torch
from torch import Tensor


def entropy_of_shares(shares: list[float], alpha: float) -> float:
    """Renyi entropy of numbers that add up to one."""
    if alpha == 1.0:
        return -sum(share * math.log(share) for share in shares if share > 0)
    return math.log(sum(share**alpha for share in shares if share > 0)) / (1 - alpha)


def spectrum(rows: Tensor) -> list[float]:
    """Eigenvalues of Z Z', by singular values of Z."""
    return [float(sigma) ** 2 for sigma in np.linalg.svd(rows.double().numpy(), compute_uv=False)]


def matrix_entropy(rows: Tensor, alpha: float = 1.0, normalization: str = "raw") -> Tensor:
    """Matrix entropy of rows ``(N, D)``."""
    values = spectrum(rows)
    if sum(values) == 0:
        return torch.tensor(0.0, dtype=torch.float64)
    n, d = map(math.log, rows.shape)
    divisor = {"raw": 1.0, "maxEntropy": min(n, d), "logN": n, "logD": d, "logNlogD": n * d}[normalization]
    shares = [share for share in (value / sum(values) for value in values) if share > 1e-14]
    return torch.tensor(entropy_of_shares(shares, alpha) / divisor, dtype=torch.float64)


def centered(rows: Tensor) -> Tensor:
    """Rows minus their mean."""
    return rows - sum(row for row in rows) / len(rows)


def unit_length(rows: Tensor) -> Tensor:
    """Rows scaled to unit length."""
    return torch.stack([row / row.norm() for row in rows])


def prepare_texts(rows: Tensor, *, center: bool, unit: bool) -> Tensor:
    """Vectors of texts: unit length comes before centering."""
    rows = unit_length(rows) if unit else rows
    return centered(rows) if center else rows


def prepare_tokens(rows: Tensor, *, center: bool, unit: bool) -> Tensor:
    """States of tokens: centering comes before unit length."""
    rows = centered(rows) if center else rows
    return unit_length(rows) if unit else rows


def dataset_entropy(rows: Tensor, *, center: bool = False, unit: bool = False, **options: object) -> Tensor:
    """Matrix entropy of vectors of texts."""
    return matrix_entropy(prepare_texts(rows, center=center, unit=unit), **options)  # type: ignore[arg-type]


def prompt_entropy(rows: Tensor, *, center: bool = True, unit: bool = True, **options: object) -> Tensor:
    """Matrix entropy of states of tokens."""
    return matrix_entropy(prepare_tokens(rows, center=center, unit=unit), **options)  # type: ignore[arg-type]


def rank_of_shares(rows: Tensor, epsilon: float) -> Tensor:
    """Exp of the entropy of singular values as shares of their sum (Roy & Vetterli, 2007; epsilon: Garrido et al., 2023)."""
    sigma = np.linalg.svd(rows.double().numpy(), compute_uv=False)
    return torch.tensor(math.exp(entropy_of_shares((sigma / sigma.sum() + epsilon).tolist(), 1.0)), dtype=torch.float64)


def effective_rank(rows: Tensor, *, center: bool = False, unit: bool = False, epsilon: float = 0.0) -> Tensor:
    """Effective rank of vectors of texts."""
    return rank_of_shares(prepare_texts(rows, center=center, unit=unit), epsilon)


def prompt_effective_rank(rows: Tensor, *, center: bool = False, unit: bool = False) -> Tensor:
    """Effective rank of states of tokens."""
    return rank_of_shares(prepare_tokens(rows, center=center, unit=unit), 0.0)


def alpha_req(rows: Tensor, *, first: int, last: int = 100, weighted: bool = True, center: bool = True) -> Tensor:
    """Weighted least squares of log eigenvalue on minus log rank, rank 1 being the largest."""
    values = [value for value in spectrum(centered(rows) if center else rows) if value > 1e-12]
    ranks = range(first, min(last, len(values)) + 1)
    root = np.array([(1 / rank if weighted else 1.0) ** 0.5 for rank in ranks])
    design = np.array([[-np.log(rank), 1.0] for rank in ranks]) * root[:, None]
    target = np.array([np.log(values[rank - 1]) for rank in ranks]) * root
    return torch.tensor(np.linalg.lstsq(design, target, rcond=None)[0][0], dtype=torch.float64)


def logdet_entropy(rows: Tensor, *, epsilon: float = 0.5, center: bool = False, unit: bool = True) -> Tensor:
    """Half the log determinant of I + D / (N eps^2) Z Z'."""
    rows = prepare_texts(rows, center=center, unit=unit)
    n, d = rows.shape
    return 0.5 * torch.logdet(torch.eye(n, dtype=torch.float64) + d / (n * epsilon**2) * rows @ rows.T)


def cosine(first: Tensor, second: Tensor) -> float:
    """Cosine of the angle between two vectors."""
    return float(first @ second / (first.norm() * second.norm()))


def anisotropy(rows: Tensor) -> Tensor:
    """Mean cosine over all ordered pairs of different texts."""
    return mean([cosine(a, b) for a, b in itertools.permutations(rows, 2)])


def mean(values: list[float]) -> Tensor:
    """Mean of numbers; NaN of none."""
    return torch.tensor(sum(values) / len(values) if values else math.nan, dtype=torch.float64)


def curvature(path: Tensor, *, step: int = 1) -> Tensor:
    """Mean angle between a difference and the next one, in radians."""
    angles = []
    for k in range(len(path) - 2 * step):
        before, after = path[k + step] - path[k], path[k + 2 * step] - path[k + step]
        if before.norm() > 0 and after.norm() > 0:
            angles.append(math.acos(max(-1.0, min(1.0, cosine(before, after)))))
    return mean(angles)


def first_token_share(path: Tensor) -> Tensor:
    """The squared length of the first token over the sum of all."""
    squares = [float(token @ token) for token in path]
    return torch.tensor(squares[0] / sum(squares), dtype=torch.float64)


def block_influence(before: Tensor, after: Tensor) -> Tensor:
    """One minus the mean cosine of a token's states before and after."""
    return 1 - mean([cosine(a, b) for a, b in zip(before, after, strict=True) if a.norm() > 0 and b.norm() > 0])


def intrinsic_dimension(rows: Tensor, *, discard: float = 0.1) -> Tensor:
    """Slope through the origin of -log(1 - F) over log mu, excluding the largest ratios of neighbor distances."""
    logs = []
    for i, row in enumerate(rows):
        first, second = sorted(float((row - other).norm()) for j, other in enumerate(rows) if j != i)[:2]
        logs.append(math.log(second / first))
    kept = sorted(logs)[: min(int(len(logs) * (1 - discard)), len(logs) - 1)]
    heights = [-math.log(1 - i / len(logs)) for i in range(1, len(kept) + 1)]
    slope = np.linalg.lstsq(np.array(kept)[:, None], np.array(heights), rcond=None)[0][0]
    return torch.tensor(slope, dtype=torch.float64)


def hsic(k: Tensor, l: Tensor) -> Tensor:
    """tr(K H L H), with H the centering matrix."""
    n = len(k)
    centering = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)
    return torch.trace(k @ centering @ l @ centering)


def unbiased_hsic(k: Tensor, l: Tensor) -> Tensor:
    """The U-statistic of HSIC: the mean over all four different texts (Song et al., 2012, equation 4)."""
    k_of, l_of = k.tolist(), l.tolist()
    quadruples = itertools.permutations(range(len(k)), 4)
    return mean([k_of[i][j] * (l_of[i][j] + l_of[q][r] - 2 * l_of[i][q]) for i, j, q, r in quadruples])


def cka(x: Tensor, y: Tensor, *, unbiased: bool = False) -> Tensor:
    """HSIC of both over the root of the product of their own."""
    of = unbiased_hsic if unbiased else hsic
    k, l = x @ x.T, y @ y.T
    return of(k, l) / (of(k, k) * of(l, l)).sqrt()


def neighbor_overlap(first: Tensor, second: Tensor, *, k: int) -> Tensor:
    """The mean share of each text's k nearest neighbors that both sets have in common."""

    def nearest(rows: Tensor, i: int) -> set[int]:
        return set(sorted((j for j in range(len(rows)) if j != i), key=lambda j: -cosine(rows[i], rows[j]))[:k])

    return mean([len(nearest(first, i) & nearest(second, i)) / k for i in range(len(first))])


def half_match(first: Tensor, second: Tensor, *, center: bool = True) -> Tensor:
    """For each half, count the halves that are nearer than its other half, and those equally near."""
    sides = [centered(side) for side in (first, second)] if center else [first, second]
    ranks = []
    for here, there in (sides, sides[::-1]):
        for i, half in enumerate(here):
            scores = [cosine(half, other) for other in there]
            before = sum(score > scores[i] + 1e-12 for score in scores)
            beside = sum(abs(score - scores[i]) <= 1e-12 for score in scores) - 1
            ranks.append(1 / (1 + before + beside / 2))
    return mean(ranks)


def uniformity(rows: Tensor, *, t: float = 2.0, center: bool = True) -> Tensor:
    """Log of the mean potential of one pair after the other."""
    unit = unit_length(centered(rows) if center else rows)
    return mean([math.exp(-t * float((a - b).square().sum())) for a, b in itertools.combinations(unit, 2)]).log()


def alignment(texts: Tensor, copies: Tensor, *, center: bool = True) -> Tensor:
    """Average the cosine of one text after the other, both minus the mean of the texts."""
    shift = texts.mean(dim=0) if center else 0.0
    return mean([cosine(text - shift, copy - shift) for text, copy in zip(texts, copies, strict=True)])


def infonce(first: Tensor, second: Tensor, *, temperature: float = 0.1) -> Tensor:
    """SimCLR: each of the 2N views is matched with its partner among the 2N - 1 others."""
    views = [*first, *second]
    losses = []
    for i, view in enumerate(views):
        scores = [math.exp(cosine(view, other) / temperature) for other in views]
        losses.append(-math.log(scores[(i + len(first)) % len(views)] / (sum(scores) - scores[i])))
    return mean(losses)


def lidar(views: Tensor, *, delta: float = 1e-4, exponential: bool = False) -> Tensor:
    """Scatter between and within texts, the inverse square root by eigenvectors, and the entropy of the result."""
    x = views.double().numpy()
    v, n, d = x.shape
    means = [sum(x[j, i] for j in range(v)) / v for i in range(n)]
    grand = sum(means) / n
    between = sum(np.outer(mean - grand, mean - grand) for mean in means) / (n - 1)
    differences = (x[j, i] - means[i] for i in range(n) for j in range(v))
    within = sum(np.outer(difference, difference) for difference in differences) / (n * (v - 1)) + delta * np.eye(d)
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    shares = np.clip(np.linalg.eigvalsh(root @ between @ root), 0, None)
    entropy = entropy_of_shares((shares / shares.sum()).tolist(), 1.0)
    return torch.tensor(math.exp(entropy) if exponential else entropy, dtype=torch.float64)


def dime(
    first: Tensor, second: Tensor, *, alpha: float = 1.0, permutations: int = 10, seed: int = 0, unit: bool = True
) -> Tensor:
    """The mean entropy of the product of kernels with shuffled texts, minus that of the true pairing."""

    def kernel_entropy(kernel: Tensor) -> float:
        values = torch.linalg.eigvalsh(kernel).clamp(min=0)
        return entropy_of_shares((values / values.sum()).tolist(), alpha)

    if unit:
        first, second = unit_length(first), unit_length(second)
    generator = torch.Generator().manual_seed(seed)
    x, y = first @ first.T, second @ second.T
    shuffled = []
    for _ in range(permutations):
        permutation = torch.eye(len(first), dtype=torch.float64)[torch.randperm(len(first), generator=generator)]
        shuffled.append(kernel_entropy(x * (permutation @ y @ permutation.T)))
    return mean(shuffled) - kernel_entropy(x * y)


def random_rows(n: int, d: int, seed: int = 0) -> Tensor:
    """Normal rows ``(n, d)`` in float64."""
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_rotation(d: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix ``(d, d)`` in float64."""
    rotation: Tensor = torch.linalg.qr(random_rows(d, d, seed + 100)).Q
    return rotation
