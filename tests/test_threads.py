"""One model used by eight threads at once: every result is bitwise that of a single thread."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from midlayer_encoders import LayerEncoder, measure, select_layer
from midlayer_encoders.reading.batches import count_tokens
from tests.support.families import tiny
from tests.support.grouped import sweep
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder, tokenizer
from tests.tasks.rows import ROWS, SENTENCES, write

pytestmark = MTEB

# Of many lengths, most longer than the models' 64 tokens: truncation and padding are state of a tokenizer, so a text
# left untruncated by another call would be detected.
TEXTS = [text[: 8 + 5 * number] for number, text in enumerate(SENTENCES[:16])]


def from_files(folder: Folder) -> LayerEncoder:
    return LayerEncoder(folder("GPTNeoX"), -1, device="cpu")


def raw_from_files(folder: Folder) -> LayerEncoder:
    """Return an encoder that reads ``hidden_states`` through hooks of transformers."""
    return LayerEncoder(folder("Llama"), -1, norm="none", device="cpu")


def in_memory(_: Folder) -> LayerEncoder:
    """Return an encoder whose own forward pass hooks its blocks."""
    return LayerEncoder.from_module(tiny("Llama"), -1, processor=tokenizer(), medium="text", device="cpu")


def run_encode(encoder: LayerEncoder, _: Path) -> Any:
    return encoder.encode(TEXTS, batch_size=3).tobytes()


def run_measure(encoder: LayerEncoder, _: Path) -> Any:
    return measure(encoder, TEXTS, metrics=["prompt_entropy", "infonce"], token_budget=256).rows()


def run_select(encoder: LayerEncoder, _: Path) -> Any:
    selection = select_layer(encoder, TEXTS, [number % 2 for number in range(len(TEXTS))])
    return selection.layer, selection.frame.rows()


def run_sweep(encoder: LayerEncoder, folder: Path) -> Any:
    task = write(folder / "near.jsonl", ROWS["STS"][:10])
    result = sweep(
        encoder, task, layers=[1, -1], out=folder / "out", workers=1, baselines=False, token_budget=256
    )  # fmt: skip
    assert not result.failures
    return result.frame.rows(), sorted(map(_content, folder.rglob("*.safetensors")))  # file names differ between runs


def _content(path: Path) -> list[Any]:
    """Return the metadata and tensors of a shard; safetensors writes the metadata in any order."""
    with safe_open(path, framework="numpy") as file:
        names = file.keys()
        return [sorted(file.metadata().items()), *((name, file.get_tensor(name).tobytes()) for name in names)]


CALLS: dict[str, tuple[Callable[[LayerEncoder, Path], Any], int]] = {  # and the number of repetitions, to take as long as a sweep
    "encode": (run_encode, 4), "measure": (run_measure, 1), "select": (run_select, 1), "sweep": (run_sweep, 1),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [from_files, pytest.param(in_memory, marks=pytest.mark.slow), pytest.param(raw_from_files, marks=pytest.mark.slow)],
)
def test_eight_threads_get_the_results_of_one(
    make: Callable[[Folder], LayerEncoder], tiny_folder: Folder, tmp_path: Path
) -> None:
    """Two threads for each call, with two encoders over one model, so that every pair of calls overlaps."""
    encoder = make(tiny_folder)
    shallow_copy = copy.copy(encoder)
    assert shallow_copy is not encoder
    assert shallow_copy.transformer is encoder.transformer
    start = Barrier(2 * len(CALLS))

    def run_calls(name: str, thread_encoder: LayerEncoder, number: int, times: int) -> list[Any]:
        outputs = []
        for repetition in range(times):
            folder = tmp_path / f"{name}-{number}-{repetition}"
            folder.mkdir()
            outputs.append(CALLS[name][0](thread_encoder, folder))
        return outputs

    def run_concurrently(name: str, thread_encoder: LayerEncoder, number: int) -> list[Any]:
        start.wait()
        return run_calls(name, thread_encoder, number, CALLS[name][1])

    expected = {name: run_calls(name, encoder, 0, 1)[0] for name in CALLS}
    with ThreadPoolExecutor(2 * len(CALLS)) as threads:
        futures = [
            (name, threads.submit(run_concurrently, name, thread_encoder, number))
            for name in CALLS
            for number, thread_encoder in enumerate((encoder, shallow_copy), start=1)
        ]
    for name, future in futures:
        differences = [result != expected[name] for result in future.result()]
        assert not any(differences), (
            f"{sum(differences)} of {len(differences)} results of {name} differ with other threads"
        )


@pytest.mark.long
def test_progress_callback_may_encode(tiny_folder: Folder, tmp_path: Path) -> None:
    """It is called in the thread that runs the model, while other threads wait for it."""
    encoder = from_files(tiny_folder)
    expected_vectors = encoder.encode(TEXTS[-2:]).tobytes()
    expected = run_measure(encoder, tmp_path)
    vectors: list[bytes] = []

    def progress(*_: Any) -> None:
        vectors.append(encoder.encode(TEXTS[-2:]).tobytes())

    def run_again() -> Any:
        return measure(encoder, TEXTS, metrics=["prompt_entropy", "infonce"], token_budget=256, progress=progress)

    with ThreadPoolExecutor(2) as threads:
        frames = [threads.submit(run_again), threads.submit(run_again)]
    assert [frame.result().rows() for frame in frames] == [expected, expected]
    assert set(vectors) == {expected_vectors}


@pytest.mark.long
def test_encoders_of_two_models_may_share_a_tokenizer() -> None:
    shared = tokenizer()
    encoders = [
        LayerEncoder.from_module(tiny("Llama"), layer, processor=shared, medium="text", device="cpu")
        for layer in (1, 2)
    ]  # fmt: skip
    expected = [encoder.encode(TEXTS, batch_size=1).tobytes() for encoder in encoders]
    start = Barrier(4)

    def check_results(number: int) -> list[Any]:
        start.wait()
        if number < 2:
            return [encoders[number].encode(TEXTS, batch_size=1).tobytes() == expected[number] for _ in range(3)]
        return [count_tokens(encoders[0], TEXTS) == counts for _ in range(100)]

    counts = count_tokens(encoders[0], TEXTS)
    with ThreadPoolExecutor(4) as threads:
        assert all(map(all, threads.map(check_results, range(4))))


@pytest.mark.long
@pytest.mark.parametrize("make", [from_files, raw_from_files])
def test_copy_during_a_pass_is_complete_and_has_no_hooks(
    make: Callable[[Folder], LayerEncoder], tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = make(tiny_folder)
    expected = encoder.encode(TEXTS[-2:]).tobytes()
    with ThreadPoolExecutor(1) as threads:
        measurement = threads.submit(run_measure, encoder, tmp_path)
        copies = [copy.deepcopy(encoder) for _ in range(5)]
        assert not measurement.done()
    for encoder_copy in copies:
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in encoder_copy.modules())
        assert encoder_copy.transformer is not encoder.transformer
        assert encoder_copy.encode(TEXTS[-2:]).tobytes() == expected


@pytest.mark.slow
def test_pool_started_during_a_pass_encodes_the_same(tiny_folder: Folder, tmp_path: Path) -> None:
    """Workers get a pickled encoder, and the hooks of a pass cannot be pickled."""
    encoder = raw_from_files(tiny_folder)
    expected = encoder.encode(TEXTS, batch_size=3)
    start, stop = Barrier(2), Event()

    def measure_repeatedly() -> None:
        start.wait()
        while not stop.is_set():
            run_measure(encoder, tmp_path)

    with ThreadPoolExecutor(1) as threads:
        measurement = threads.submit(measure_repeatedly)
        start.wait()
        try:
            pool = encoder.start_multi_process_pool(["cpu", "cpu"])
            vectors = encoder.encode(TEXTS, batch_size=3, pool=pool, chunk_size=6)
            encoder.stop_multi_process_pool(pool)
        finally:
            stop.set()
        measurement.result()
    np.testing.assert_allclose(vectors, expected, atol=1e-6)  # other batches
