import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.metrics import eigen as spectra
from midlayer_encoders.metrics.eigen import METHODS, Method, eigenvalues, spectral_entropy

ORDERS = (0.5, 1.0, 2.0, 3.0, math.inf)

interpreted = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton and TRITON_INTERPRET=1, which runs its kernels on the CPU",
)


def gram(*shape: int, seed: int = 0, width: int = 24) -> Tensor:
    states = torch.randn(*shape, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return states @ states.mT


def eigenvalues_by_definition(matrix: Tensor, size: int) -> np.ndarray:
    actual = np.linalg.eigvalsh(matrix.double().numpy()[:size, :size])[::-1]
    return np.concatenate([np.maximum(actual, 0), np.zeros(len(matrix) - size)])


def entropy_by_definition(matrix: Tensor, size: int, alpha: float) -> float:
    actual = eigenvalues_by_definition(matrix, size)[:size]
    p = actual / actual.sum()
    if alpha == 1:
        return float(-sum(x * math.log(x) for x in p if x > 0))
    if alpha == math.inf:
        return -math.log(max(p))
    return math.log(sum(x**alpha for x in p)) / (1 - alpha)


# --- the definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 5, 33])
def test_eigenvalues_match_numpy(n: int, method: Method) -> None:
    matrices = gram(4, n)
    expected = np.stack([eigenvalues_by_definition(matrix, n) for matrix in matrices])
    if method == "fast" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter takes minutes for it")
    np.testing.assert_allclose(eigenvalues(matrices, method=method), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_rounding_does_not_count_at_low_orders(alpha: float) -> None:
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    large, small = (spectral_entropy(matrix, alpha=alpha) for matrix in (rows @ rows.mT, rows.mT @ rows))
    torch.testing.assert_close(large, small, rtol=1e-12, atol=0)


@pytest.mark.parametrize("alpha", ORDERS)
@pytest.mark.parametrize("width", [3, 24])
def test_entropy_matches_the_definition(alpha: float, width: int) -> None:
    matrices = gram(5, 12, width=width)
    sizes = torch.tensor([12, 1, 7, 2, 11])
    # At 0.5 the definition read aloud counts the rounding of the eigenvalues that a rank of 3 lacks.
    tolerance = 1e-6 if alpha < 1 and width == 3 else 1e-12
    expected = [entropy_by_definition(m, int(s), alpha) for m, s in zip(matrices, sizes, strict=True)]
    np.testing.assert_allclose(spectral_entropy(matrices, sizes, alpha=alpha), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("threads", [1, 2])
def test_mixed_sizes_ignore_values_outside_the_corner(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(spectra, "_INLINE_WORK", 0)
    clean = gram(30, 9)
    sizes = torch.arange(30) % 10
    garbage = clean.clone()
    for matrix, size in zip(garbage, sizes.tolist(), strict=True):
        matrix[size:, :] = 1e9
        matrix[:, size:] = -7.0
    expected = np.stack([eigenvalues_by_definition(m, int(s)) for m, s in zip(clean, sizes, strict=True)])
    np.testing.assert_allclose(eigenvalues(garbage, sizes), expected, atol=1e-10)
    for alpha in ORDERS:
        torch.testing.assert_close(
            spectral_entropy(garbage, sizes, alpha=alpha),
            spectral_entropy(clean, sizes, alpha=alpha),
            rtol=0,
            atol=1e-12,
        )


# --- known values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.0, math.inf])
def test_known_entropies(alpha: float) -> None:
    one_direction = torch.outer(torch.arange(1.0, 7.0), torch.arange(1.0, 7.0))
    identity, nothing = torch.eye(6), torch.zeros(6, 6)
    actual = spectral_entropy(torch.stack([one_direction, identity, nothing]), alpha=alpha)
    torch.testing.assert_close(actual, torch.tensor([0, math.log(6), 0], dtype=torch.float64), rtol=0, atol=1e-7)


def test_size_zero_has_no_eigenvalues() -> None:
    sizes = torch.tensor([0, 2])
    assert eigenvalues(gram(2, 3), sizes)[0].tolist() == [0, 0, 0]
    for alpha in ORDERS:
        assert spectral_entropy(gram(2, 3), sizes, alpha=alpha)[0] == 0


def test_high_order_is_near_its_limit() -> None:
    matrix = gram(40)
    limit = float(spectral_entropy(matrix, alpha=math.inf))
    assert float(spectral_entropy(matrix, alpha=5000)) == pytest.approx(limit, rel=1e-3)


def test_noise_below_zero_is_zero() -> None:
    values = eigenvalues(gram(8, 20, width=2))
    assert (values >= 0).all()
    assert (values.diff(dim=-1) <= 0).all()


# --- shapes and dtypes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0)])
def test_any_batch_shape(shape: tuple[int, ...]) -> None:
    matrices = gram(*shape, 5)
    sizes = torch.full(shape, 4)
    assert eigenvalues(matrices, sizes).shape == (*shape, 5)
    for alpha in ORDERS:
        actual = spectral_entropy(matrices, sizes, alpha=alpha)
        assert actual.shape == shape
        assert actual.dtype == torch.float64
    if shape == (2, 3):
        for i, j in product(range(2), range(3)):
            torch.testing.assert_close(eigenvalues(matrices, sizes)[i, j], eigenvalues(matrices[i, j], sizes[i, j]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_half_precision_is_promoted(dtype: torch.dtype, alpha: float) -> None:
    matrices = (gram(3, 8) / 24).to(dtype)
    actual = spectral_entropy(matrices, alpha=alpha)
    torch.testing.assert_close(actual, spectral_entropy(matrices.double(), alpha=alpha), rtol=0, atol=1e-12)


def test_arguments_are_unchanged_and_no_gradient_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(spectra, "_INLINE_WORK", 0)
    matrices = gram(3, 6).requires_grad_()
    before = matrices.detach().clone()
    assert not eigenvalues(matrices).requires_grad
    assert not spectral_entropy(matrices, alpha=2).requires_grad
    assert torch.equal(matrices, before)
    with torch.inference_mode():  # which other threads are not in
        torch.testing.assert_close(eigenvalues(gram(3, 6)), eigenvalues(before))


# --- properties -----------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**16)
rows = st.integers(1, 12)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, n=rows, width=rows)
def test_entropy_does_not_increase_with_the_order(seed: int, n: int, width: int) -> None:
    matrix = gram(n, seed=seed, width=width)
    stacked = torch.stack([spectral_entropy(matrix, alpha=a) for a in (0.5, 1.0, 1.5, 2.0, 3.0, 10.0, math.inf)])
    assert (stacked.diff() <= 1e-9).all()
    assert stacked.min() >= 0
    assert stacked[1:].max() <= math.log(min(n, width)) + 1e-9


@settings(deadline=None, max_examples=40)
@given(seed=seeds, n=rows, exponent=st.integers(-12, 12), alpha=st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_scale_and_order_of_the_rows_do_not_matter(seed: int, n: int, exponent: int, alpha: float) -> None:
    matrix = gram(n, seed=seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    changed = 10.0**exponent * matrix[order][:, order]
    actual, expected = spectral_entropy(changed, alpha=alpha), spectral_entropy(matrix, alpha=alpha)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@settings(deadline=None, max_examples=20)
@given(seed=seeds, split=st.integers(0, 6))
def test_batches_may_be_split(seed: int, split: int) -> None:
    matrices, sizes = gram(6, 5, seed=seed), torch.tensor([5, 4, 3, 5, 1, 2])
    halves = [spectral_entropy(matrices[part], sizes[part]) for part in (slice(None, split), slice(split, None))]
    torch.testing.assert_close(torch.cat(halves), spectral_entropy(matrices, sizes), rtol=0, atol=1e-12)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("alpha", ORDERS)
def test_nonfinite_matrix_is_named(bad: float, alpha: float) -> None:
    matrices = gram(2, 3, 4)
    matrices[1, 2, 0, 3] = matrices[1, 2, 3, 0] = bad
    with pytest.raises(NotFiniteError, match=r"`matrices\[1, 2\]` must be finite, but holds NaN or infinity"):
        spectral_entropy(matrices, alpha=alpha)
    unchecked = spectral_entropy(matrices, alpha=alpha, check=False)
    assert unchecked[1, 2].isnan()
    assert int(unchecked.isnan().sum()) == 1
    fits = torch.full((2, 3), 3)  # The corner is sound, whatever lies outside.
    assert spectral_entropy(matrices, fits, alpha=alpha).isfinite().all()


def test_eigenvalues_of_a_matrix_that_is_not_finite() -> None:
    with pytest.raises(NotFiniteError, match="`matrices` must be finite"):
        eigenvalues(torch.full((2, 2), math.nan))
    with pytest.raises(NotFiniteError, match=r"`matrices\[1\]`"):
        eigenvalues(torch.tensor([[[1.0]], [[math.inf]]]))


@pytest.mark.parametrize("wrong", [-1, 5])
@pytest.mark.parametrize("alpha", ORDERS)
def test_sizes_must_fit(wrong: int, alpha: float) -> None:
    with pytest.raises(OptionError, match=rf"`sizes` must be in \[0, 4\], the rows of `matrices`, but got {wrong}"):
        spectral_entropy(gram(2, 4), torch.tensor([4, wrong]), alpha=alpha)


def test_invalid_calls_are_refused() -> None:
    matrices = gram(2, 4)
    with pytest.raises(
        OptionError, match=r"`matrices` must have the shape \(\*, n, n\) with n >= 1, but got \(2, 4, 3\)"
    ):
        eigenvalues(matrices[..., :3])
    with pytest.raises(OptionError, match=r"`matrices` must be real floating point, but got torch.int64"):
        eigenvalues(torch.eye(3, dtype=torch.int64))
    with pytest.raises(OptionError, match=r"`sizes` must be integers, one for each matrix, of shape \(2,\), but got"):
        eigenvalues(matrices, torch.tensor([4]))
    with pytest.raises(OptionError, match=r"`sizes` must be integers.* but got torch.float32"):
        eigenvalues(matrices, torch.tensor([4.0, 4.0]))
    for alpha in (0.0, -1.0, math.nan):
        with pytest.raises(OptionError, match="`alpha` must be greater than 0"):
            spectral_entropy(matrices, alpha=alpha)
    for alpha in (1.0, 2.0):
        with pytest.raises(OptionError, match=r"`method` must be one of .* Did you mean 'exact'\?"):
            spectral_entropy(matrices, alpha=alpha, method="exakt")  # type: ignore[arg-type]


# --- without a GPU, without Triton ----------------------------------------------------------------------------------


def test_importing_has_no_side_effects() -> None:
    code = (
        "import sys, midlayer_encoders.metrics.eigen as s; assert 'triton' not in sys.modules; s.torch.manual_seed(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fast_is_exact_where_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    matrices = gram(3, 7)
    assert torch.equal(eigenvalues(matrices, method="fast"), eigenvalues(matrices, method="exact"))


# --- the kernels, in Triton's interpreter: `TRITON_INTERPRET=1 pytest -m triton` -------------------------------------


def massive(*shape: int) -> Tensor:
    """Return Gram matrices of states whose second token is a thousand times the others."""
    states = torch.randn(*shape, 30, generator=torch.Generator().manual_seed(1))
    states[..., 1, :] *= 1000
    return states @ states.mT


def hard_matrices(n: int) -> dict[str, Tensor]:
    return {
        "normal": gram(n).float(),
        "massive": massive(n),
        "low rank": gram(n, width=3).float(),
        "equal": torch.ones(n, n),
        "identity": torch.eye(n),
        "blocks": torch.kron(torch.eye(n // 2), torch.ones(2, 2)),
    }


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("kind", hard_matrices(2))
def test_kernels_hold_the_bound(kind: str) -> None:
    n = 12
    matrix = hard_matrices(n)[kind]
    matrices, sizes = torch.stack([matrix] * 2), torch.tensor([n, n - 3])
    actual = eigenvalues(matrices, sizes, method="fast")
    expected = np.stack([eigenvalues_by_definition(matrix, int(size)) for size in sizes])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * float(matrix.trace()))
    entropy = spectral_entropy(matrices, sizes, method="fast")
    np.testing.assert_allclose(entropy, [entropy_by_definition(matrix, int(s), 1) for s in sizes], rtol=0, atol=1e-5)


def assert_as_exact_as_lapack(matrices: Tensor, sizes: Tensor, actual: Tensor) -> None:
    """Compare float64 eigenvalues with numpy's, relative to the largest one."""
    n = matrices.shape[-1]
    for matrix, size, values in zip(matrices, sizes.tolist(), actual, strict=True):
        expected = eigenvalues_by_definition(matrix, size)
        rounding = n * np.finfo(np.float64).eps * max(expected[0], np.finfo(np.float64).tiny)
        np.testing.assert_allclose(values, expected, rtol=0, atol=rounding)
        assert (values[size:] == 0).all()


@pytest.mark.gpu
@interpreted
def test_kernels_in_float64_are_as_exact_as_lapack() -> None:
    from midlayer_encoders.extras.kernels.spectra import eigenvalues_by_kernels

    n = 12
    common = gram(1, n).double() + 1e8  # all tokens share a direction
    tokens = gram(5, width=7)[torch.arange(n) % 5][:, torch.arange(n) % 5]
    hard = [matrix.double() for matrix in hard_matrices(n).values()]
    graded = torch.outer(10.0 ** -torch.arange(n), 10.0 ** -torch.arange(n)).double() * gram(n)
    matrices = torch.stack([*hard, common[0], tokens, graded, gram(n), gram(n), gram(n), gram(n), torch.zeros(n, n)])
    sizes = torch.tensor([n] * 9 + [9, 2, 1, 0, n], dtype=torch.int32)
    actual = eigenvalues_by_kernels(matrices, sizes, torch.float64)
    assert actual.dtype == torch.float64
    assert_as_exact_as_lapack(matrices, sizes, actual)
    assert eigenvalues_by_kernels(matrices[:0], sizes[:0], torch.float64).shape == (0, n)


@pytest.mark.gpu
@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_kernels_in_float64_return_nan_for_invalid_matrices_and_sizes() -> None:
    from midlayer_encoders.extras.kernels.spectra import eigenvalues_by_kernels

    matrices = gram(6, 5)
    matrices[1, 2, 4] = matrices[1, 4, 2] = math.nan
    matrices[3, 0, 0] = math.inf
    matrices[5, 4] = matrices[5, :, 4] = math.nan  # outside the corner
    sizes = torch.tensor([5, 5, -1, 5, 6, 4], dtype=torch.int32)
    actual = eigenvalues_by_kernels(matrices, sizes, torch.float64)
    assert actual.sum(-1).isnan().tolist() == [False, True, True, True, True, False]
    assert_as_exact_as_lapack(matrices[[0]], sizes[[0]], actual[[0]])


def test_exact_takes_the_kernels_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available() or find_spec("triton") is None:
        monkeypatch.setattr(spectra, "kernels_run_on", lambda *_: True)
        matrices = gram(2, 6)  # on a CPU
        assert torch.equal(eigenvalues(matrices, method="exact"), spectra._exact(matrices, torch.tensor([6, 6])))
        return
    for n in (6, 100, 300):
        matrices, sizes = massive(3, n).double(), torch.tensor([n, n - 2, 1])
        actual = eigenvalues(matrices.cuda(), sizes, method="exact").cpu()
        assert_as_exact_as_lapack(matrices, sizes, actual)
        with spectra.without_kernels():
            assert not torch.equal(eigenvalues(matrices.cuda(), sizes, method="exact").cpu(), actual)


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_kernels_take_any_dtype_and_strides(dtype: torch.dtype) -> None:
    matrices = (gram(2, 14) / 24).to(dtype)[:, 2:9, 2:9]
    sizes = torch.tensor([7, 4])
    expected = spectral_entropy(matrices, sizes, method="exact")
    torch.testing.assert_close(spectral_entropy(matrices, sizes, method="fast"), expected, rtol=0, atol=1e-5)
    transposed = matrices.mT
    torch.testing.assert_close(spectral_entropy(transposed, sizes, method="fast"), expected, rtol=0, atol=1e-5)


@pytest.mark.gpu
@interpreted
def test_kernels_can_be_disabled() -> None:
    matrices = torch.ones(1, 6, 6) + 1e-4 * gram(1, 6).float()
    with spectra.without_kernels():
        assert not spectra.kernels_enabled()
        assert torch.equal(eigenvalues(matrices), eigenvalues(matrices, method="exact"))
        assert not torch.equal(eigenvalues(matrices, method="fast"), eigenvalues(matrices)), "asked for by name"
    assert spectra.kernels_enabled()


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_in_every_stage(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from midlayer_encoders.extras.kernels import spectra as _triton
    from midlayer_encoders.extras.kernels.spectra import eigenvalues_by_kernels

    for table in (_triton._BAND_OPTIONS, _triton._CHASE_OPTIONS):
        options: dict[int, tuple[int, ...]] = table[dtype]  # type: ignore[assignment]
        monkeypatch.setitem(options, 64, options[128])  # fewer rows than any matrix that is reduced to a band
    matrices, sizes = massive(3, 40).to(dtype), torch.tensor([40, 33, 1], dtype=torch.int32)
    expected = np.stack([eigenvalues_by_definition(m, int(s)) for m, s in zip(matrices, sizes, strict=True)])
    trace = matrices.diagonal(dim1=-2, dim2=-1).sum(-1).max().item()
    for register_rows in (32, 128):  # 40 rows through the band, and through the registers alone
        actual = eigenvalues_by_kernels(matrices, sizes, dtype, register_rows=register_rows)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * trace)
        assert (actual[2, 1:] == 0).all()
        if dtype == torch.float64:
            assert_as_exact_as_lapack(matrices, sizes, actual)


@pytest.mark.gpu
@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_kernels_do_not_hide_invalid_matrices() -> None:
    matrices = gram(5, 6).float()
    matrices[1, 2, 4] = matrices[1, 4, 2] = math.nan
    matrices[3, 5, 5] = math.inf
    with pytest.raises(NotFiniteError, match=r"`matrices\[1\]` must be finite"):
        spectral_entropy(matrices, method="fast")
    unchecked = spectral_entropy(matrices, method="fast", check=False)
    assert unchecked.isnan().tolist() == [False, True, False, True, False]
    assert spectral_entropy(torch.zeros(1, 6, 6), method="fast").tolist() == [0]
    for wrong in (-1, 7):
        with pytest.raises(OptionError, match=rf"`sizes` must be in \[0, 6\].* but got {wrong}"):
            eigenvalues(gram(2, 6).float(), torch.tensor([6, wrong]), method="fast")


@pytest.mark.gpu
@interpreted
def test_kernels_leave_large_matrices_to_the_exact_method(monkeypatch: pytest.MonkeyPatch) -> None:
    from midlayer_encoders.extras.kernels import spectra as _spectra_triton

    monkeypatch.setattr(_spectra_triton, "MAX_SIZE", 5)
    monkeypatch.setattr(_spectra_triton, "_SCRATCH_NUMBERS", 1)  # One matrix at a time.
    matrices, sizes = gram(4, 8), torch.tensor([8, 3, 5, 6])
    actual = eigenvalues(matrices, sizes, method="fast")
    expected = eigenvalues(matrices, sizes, method="exact")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert torch.equal(actual[[0, 3]], expected[[0, 3]])


def test_threads_stay_and_take_one_core_each_and_the_process_keeps_its_number() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    spectra._threads.cache_clear()  # tests before this one had their own number of threads
    try:
        matrices = gram(160, 32)
        expected = np.stack([eigenvalues_by_definition(each, 32) for each in matrices])
        np.testing.assert_allclose(eigenvalues(matrices, method="exact"), expected, atol=1e-10)
        pool = spectra._threads(2)
        assert [each for each in threading.enumerate() if each.name.startswith("midlayer spectra")]

        def number() -> Tensor:
            torch.ones(10**6).exp()
            return torch.tensor(torch.get_num_threads())

        assert {int(pool.submit(number).result()) for _ in range(8)} == {1}
        with ThreadPoolExecutor(1) as other_item:
            assert (torch.get_num_threads(), other_item.submit(torch.get_num_threads).result()) == (2, 2)
        spectra._threads.cache_clear()  # as in a process that was forked, which has none of these threads
        assert spectra._threads(2) is not pool
        np.testing.assert_allclose(eigenvalues(matrices, method="exact"), expected, atol=1e-10)
    finally:
        torch.set_num_threads(before)
