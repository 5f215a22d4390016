"""Requirements on every metric of the registry."""

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from midlayer_encoders.errors import LayerIndexError, MidlayerError, NotFiniteError, OptionError
from midlayer_encoders.metrics import METRICS, TooFewTextsError
from tests.metrics.feeding import corpus, feed, make, value

TOKENS = [name for name, metric in METRICS.items() if metric.kind == "tokens"]
ROWS = ["dataset_entropy", "effective_rank", "anisotropy", "alpha_req", "logdet_entropy"]
SAMPLES = ["infonce", "lidar", "dime", "intrinsic_dimension", "cka", "neighbor_overlap", "half_match"]
SAMPLES += ["alignment", "uniformity"]
FIRST_IS_NAN = ["block_influence", "cka", "neighbor_overlap"]
COMPARING = [*FIRST_IS_NAN, "infonce", "lidar", "dime", "alignment"]


@pytest.mark.parametrize("name", METRICS)
def test_one_finite_float64_value_per_layer(name: str) -> None:
    values = value(name, corpus(seed=2))
    assert values.shape == (3,)
    assert values.dtype == torch.float64
    assert torch.isfinite(values).tolist() == [name not in FIRST_IS_NAN, True, True]
    assert len(set(values[1:].tolist())) == 2, "layers with different states have different values"
    assert make(name, [0, 1]).needs_previous == (name in FIRST_IS_NAN)


class Costly(TorchDispatchMode):
    """Counts matrix products, decompositions, and reads of a number that would synchronize with a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if name in ("mm", "bmm", "_linalg_eigh", "linalg_cholesky_ex", "_local_scalar_dense", "nonzero"):
            self.count[name] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*ROWS[:3], ROWS[4], "infonce", "lidar", "dime", "half_match", "uniformity"])
def test_layers_are_computed_together(name: str) -> None:
    counts = []
    for layers in (2, 9):
        metric = feed(make(name, range(layers)), corpus(layers=layers), [torch.arange(13)])
        with Costly() as costly:
            metric.compute()
        counts.append(costly.count)
    assert counts[0] == counts[1]
    assert counts[0].total() > 0


@pytest.mark.parametrize("name", METRICS)
def test_single_layer_gives_a_vector_of_one(name: str) -> None:
    metric = feed(make(name, [7]), corpus(layers=1), [torch.arange(13)])
    assert metric.compute().shape == metric.compute().shape == (1,)
    assert metric.compute().isnan().item() == (name in FIRST_IS_NAN)


@pytest.mark.parametrize("name", METRICS)
def test_batch_split_and_order_do_not_matter(name: str) -> None:
    texts = corpus()
    shuffled = torch.randperm(13, generator=torch.Generator().manual_seed(1)).split(4)
    expected = value(name, texts)
    if name in SAMPLES:
        assert torch.equal(value(name, texts, shuffled)[1:], expected[1:]), "sorted by index: bitwise equal"
    torch.testing.assert_close(value(name, texts, shuffled), expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [(4, 0), (0, 4), (2, 3)])
@pytest.mark.parametrize("name", TOKENS)
def test_padding_does_not_matter(name: str, padding: tuple[int, int], dtype: torch.dtype) -> None:
    texts = corpus().to(dtype)
    batches = torch.arange(13).split(5)
    expected = value(name, texts, batches)
    torch.testing.assert_close(
        value(name, texts.padded(*padding), batches), expected, rtol=1e-6, atol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("name", sorted(set(TOKENS) - {"matrix_entropy", "half_match"}))
def test_batch_value_is_the_mean_of_its_texts(name: str) -> None:
    texts = corpus()
    separate = [value(name, texts, [torch.tensor([text])]) for text in range(13)]
    torch.testing.assert_close(value(name, texts), torch.stack(separate).mean(dim=0), equal_nan=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@pytest.mark.parametrize("name", METRICS)
def test_half_precision_only_rounds_the_input(name: str, dtype: torch.dtype, tolerance: float) -> None:
    texts = corpus(texts=40, width=16, tokens=9)
    half = value(name, texts.to(dtype))
    same = value(name, texts.to(dtype).to(torch.float32))
    torch.testing.assert_close(half, same, rtol=1e-9, atol=1e-9, equal_nan=True)
    if name not in ("neighbor_overlap", "half_match"):  # counts: one neighbor at a tie moves them by 1 / (N k)
        expected = value(name, texts)
        torch.testing.assert_close(half, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", METRICS)
def test_nan_and_infinity_error_names_the_layer(name: str, bad: float) -> None:
    texts = corpus()
    texts.states[1, 4, 1, 2] = bad
    texts.pooled[1, 4, 2] = bad
    texts.views[1, 1, 4, 2] = bad
    metric = feed(make(name, [10, 20, 30]), texts, torch.arange(13).split(4))
    with pytest.raises(NotFiniteError, match=r"of layer (20|30) is .* hold NaN or infinity"):
        metric.compute()


@pytest.mark.parametrize("name", TOKENS)
def test_nan_in_the_padding_is_ignored(name: str) -> None:
    texts = corpus()
    expected = value(name, texts)
    texts.states[:, ~texts.mask] = torch.nan
    torch.testing.assert_close(value(name, texts), expected, equal_nan=True)


@pytest.mark.parametrize("name", METRICS)
def test_zero_vectors_and_repeated_texts_have_a_value(name: str) -> None:
    texts = corpus()
    texts.mask[3] = texts.mask[2]
    for tensor in (texts.states, texts.pooled, texts.views.transpose(1, 2)):
        tensor[:, 3] = tensor[:, 2]
        tensor[:, 5] = 0.0
    assert torch.isfinite(value(name, texts)[1:]).all()


@pytest.mark.parametrize("name", METRICS)
def test_no_text_is_an_error(name: str) -> None:
    with pytest.warns(UserWarning, match="before the ``update``"), pytest.raises(TooFewTextsError, match="layer"):
        make(name, [0, 1]).compute()


@pytest.mark.parametrize(
    "name", [*sorted(set(COMPARING) - {"block_influence"}), "anisotropy", "alpha_req", "half_match", "uniformity"]
)
def test_one_text_is_an_error_for_metrics_that_compare_texts(name: str) -> None:
    metric = feed(make(name, range(3)), corpus(texts=1), [torch.arange(1)])
    with pytest.raises(TooFewTextsError, match="must be at least"):
        metric.compute()


@pytest.mark.parametrize("name", METRICS)
def test_unknown_layer_and_invalid_shapes_are_refused(name: str) -> None:
    texts, metric = corpus(), make(name, [1, 2])
    with pytest.raises(LayerIndexError, match=r"one of the metric's layers \[1, 2\], but got 3"):
        metric._position(3)
    wrong = {
        "tokens": lambda: metric.update(texts.states[0], texts.mask.int(), layer=1),
        "pooled": lambda: metric.update(texts.pooled[0], index=torch.arange(1), layer=1),
        "views": lambda: metric.update(texts.views[0, 0], view=0, index=torch.arange(1), layer=1),
    }
    wrong["copies"] = wrong["views"]
    with pytest.raises(OptionError, match="must be"):
        wrong[metric.kind]()


@pytest.mark.parametrize("name", METRICS)
def test_reset_and_pickle(name: str) -> None:
    texts = corpus()
    metric = feed(make(name, range(3)), texts, [torch.arange(13)])
    expected = metric.compute()
    copy = pickle.loads(pickle.dumps(metric))
    torch.testing.assert_close(copy.compute(), expected, rtol=0, atol=0, equal_nan=True)
    metric.reset()
    torch.testing.assert_close(
        feed(metric, texts, [torch.arange(13)]).compute(), expected, rtol=0, atol=0, equal_nan=True
    )


def test_calling_a_metric_is_refused() -> None:
    metric = make("anisotropy", [0])
    with pytest.raises(MidlayerError, match="Anisotropy must not be called: call `update` for each layer, then"):
        metric(torch.ones(2, 3), layer=0)
    assert metric.update_count == 0


@pytest.mark.parametrize("name", METRICS)
def test_autocast_does_not_change_a_metric(name: str) -> None:
    texts = corpus().to(torch.float32)
    expected = value(name, texts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(value(name, texts), expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("layers", [[], [1, 1]])
def test_layers_must_be_distinct(layers: list[int]) -> None:
    with pytest.raises(OptionError, match="different layer numbers"):
        make("curvature", layers)
