"""The embedder fills the store while the model runs: every error is raised, and no thread is left behind."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import Stage
from midlayer_encoders.arguments import check_budget
from midlayer_encoders.errors import DiskFullError, NotFiniteError, OptionError
from midlayer_encoders.reading.batches import TextInputs, tokens_that_fit
from midlayer_encoders.reading.reader import Passed
from midlayer_encoders.sweeping.embedder import Embedder
from midlayer_encoders.sweeping.store import EmbeddingStore, text_key
from tests.support.families import DEPTH, WIDTH
from tests.support.tiny_folders import Folder

TEXTS = [f"text number {number} of some" + " more" * (number % 7) for number in range(40)]
KEYS = [text_key(text) for text in TEXTS]
BUDGET = 130  # ten batches and more


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("midlayer-")]


@pytest.fixture
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


def open_store(folder: Path, **options: Any) -> EmbeddingStore:
    return EmbeddingStore(folder, key="test", layers=range(DEPTH + 1), dim=WIDTH, **options)


def embed(encoder: LayerEncoder, folder: Path, **options: Any) -> EmbeddingStore:
    store = open_store(folder)
    Embedder(encoder, store, **{"token_budget": BUDGET, **options})(TEXTS, KEYS, "")
    return store


def stored_vectors(store: EmbeddingStore) -> list[np.ndarray[Any, Any]]:
    return [store.read(layer, KEYS) for layer in range(DEPTH + 1)]


@pytest.mark.long
def test_every_layer_matches_its_encoder_in_input_order(
    encoder: LayerEncoder, tiny_folder: Folder, tmp_path: Path
) -> None:
    vectors = stored_vectors(embed(encoder, tmp_path))
    for layer in (0, 2, DEPTH):
        expected = LayerEncoder(tiny_folder("Llama"), layer, device="cpu").encode(TEXTS)
        np.testing.assert_allclose(vectors[layer], expected, rtol=1e-4, atol=1e-5)
    repeated = stored_vectors(embed(encoder, tmp_path / "again"))
    assert all(np.array_equal(actual, repeated_layer) for actual, repeated_layer in zip(vectors, repeated, strict=True))


def tokenizer_raises(_: LayerEncoder, patch: pytest.MonkeyPatch) -> None:
    plain, calls = TextInputs.__call__, iter(range(1000))

    def failing(self: TextInputs, inputs: Any) -> Any:
        if next(calls) == 8:
            raise LookupError("an odd text")
        return plain(self, inputs)

    patch.setattr(TextInputs, "__call__", failing)


def model_raises(encoder: LayerEncoder, patch: pytest.MonkeyPatch) -> None:
    block, plain, calls = encoder.transformer.layers[1], encoder.transformer.layers[1].forward, iter(range(1000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("a broken kernel")
        return plain(*args, **kwargs)

    patch.setattr(block, "forward", failing)


def gives_nan(encoder: LayerEncoder, patch: pytest.MonkeyPatch) -> None:
    block, plain, calls = encoder.transformer.layers[1], encoder.transformer.layers[1].forward, iter(range(1000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        return output * torch.nan if next(calls) == 3 else output

    patch.setattr(block, "forward", failing)


def disk_fills(_: LayerEncoder, patch: pytest.MonkeyPatch) -> None:
    plain, calls = EmbeddingStore.write, iter(range(1000))

    def failing(self: EmbeddingStore, *args: Any, **kwargs: Any) -> None:
        if next(calls) == 3:
            raise DiskFullError("no room")
        plain(self, *args, **kwargs)

    patch.setattr(EmbeddingStore, "write", failing)


def progress_raises(_: LayerEncoder, patch: pytest.MonkeyPatch) -> None:
    plain = Stage.step

    def failing(self: Stage, count: int = 1) -> None:
        plain(self, count)
        if self.done > 10:
            raise KeyboardInterrupt

    patch.setattr(Stage, "step", failing)


def interrupted(_: LayerEncoder, patch: pytest.MonkeyPatch) -> None:
    plain, calls = Embedder._write, iter(range(1000))

    def failing(self: Embedder, passed: Passed, *args: Any) -> int:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, passed, *args)

    patch.setattr(Embedder, "_write", failing)


@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [
        (tokenizer_raises, LookupError, "an odd text"),
        (model_raises, RuntimeError, "a broken kernel"),
        (gives_nan, NotFiniteError, r"Layer 2 gives NaN or infinity for 'text number"),
        (disk_fills, DiskFullError, "no room"),
        pytest.param(progress_raises, KeyboardInterrupt, None, marks=pytest.mark.slow),
        (interrupted, KeyboardInterrupt, None),
    ],
)
def test_error_in_any_stage_is_raised_and_the_rest_is_embedded_later(
    fail: Callable[[LayerEncoder, pytest.MonkeyPatch], None],
    error: type[BaseException],
    message: str | None,
    encoder: LayerEncoder,
    tmp_path: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail(encoder, patch)
        with pytest.raises(error, match=message) as raised:
            embed(encoder, tmp_path)
        # While the traceback, and therefore every frame in it, is still referenced:
        assert raised.value is not None
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("midlayer-")]
    missing = open_store(tmp_path).missing(KEYS)
    assert 0 < len(missing) < len(KEYS)
    passed: list[int] = []
    hook = encoder.transformer.layers[0].register_forward_hook(lambda _, __, output: passed.append(len(output)))
    resumed = stored_vectors(embed(encoder, tmp_path))
    hook.remove()
    assert len(missing) <= sum(passed) < len(missing) + 12, "stored texts are not embedded again"
    uninterrupted = stored_vectors(embed(encoder, tmp_path / "whole"))
    assert all(np.array_equal(actual, expected) for actual, expected in zip(resumed, uninterrupted, strict=True)), (
        "bitwise"
    )


def test_full_disk_raises(encoder: LayerEncoder, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(1_000_000))
    with pytest.raises(DiskFullError, match=rf"The disk of {small_disk} is full"):
        embed(encoder, small_disk)
    (small_disk / "filler").unlink()
    assert not embed(encoder, small_disk).missing(KEYS)


def test_slow_disk_delays_the_forward_passes(encoder: LayerEncoder, tmp_path: Path, monkeypatch: Any) -> None:
    """Only a few batches are in memory at a time."""
    started, written, max_pending = [], [], 0
    plain = EmbeddingStore.write

    def slow(self: EmbeddingStore, *args: Any, **kwargs: Any) -> None:
        nonlocal max_pending
        threading.Event().wait(0.01)
        plain(self, *args, **kwargs)
        written.append(1)
        max_pending = max(max_pending, len(started) - len(written))

    monkeypatch.setattr(EmbeddingStore, "write", slow)
    hook = encoder.transformer.register_forward_hook(lambda *_: started.append(1))
    embed(encoder, tmp_path, token_budget=40)
    hook.remove()
    assert len(written) > 15
    assert max_pending <= 3


def test_auto_token_budget_depends_on_free_memory(encoder: LayerEncoder, tmp_path: Path, monkeypatch: Any) -> None:
    store = open_store(tmp_path)
    assert Embedder(encoder, store).tokens == 4096
    assert Embedder(encoder, store, token_budget=77).tokens == 77
    free = {"bytes": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free["bytes"], 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(LayerEncoder, "device", torch.device("cuda"))
    budgets = []
    for free["bytes"] in (0, 2**24, 2**26, 2**28, 2**40):
        budgets.append(tokens_that_fit(encoder))
    assert budgets == sorted(budgets)
    assert budgets[0] == 1024
    assert budgets[-1] == 65536
    assert all(tokens & (tokens - 1) == 0 for tokens in budgets)
    with pytest.raises(OptionError, match="`token_budget` must be a positive number of tokens"):
        check_budget("many")  # type: ignore[arg-type]
    assert check_budget("auto") == "auto"
