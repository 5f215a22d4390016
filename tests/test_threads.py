"""One model used by eight threads at once: every result is, to the bit, that of a thread alone."""

from __future__ import annotations

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
from tests.families import tiny
from tests.grouped import sweep
from tests.others_warnings import MTEB
from tests.tasks.rows import ROWS, SENTENCES, write
from tests.tiny_folders import tokenizer

Folder = Callable[[str], str]

pytestmark = MTEB

# Of many lengths, most longer than the 64 tokens that the models take: what a tokenizer truncates and pads to is a state
# of it, and a text that another call left whole would show.
TEXTS = [text[: 8 + 5 * number] for number, text in enumerate(SENTENCES[:16])]


def from_files(folder: Folder) -> LayerEncoder:
    return LayerEncoder(folder("GPTNeoX"), -1, device="cpu")


def raw(folder: Folder) -> LayerEncoder:
    """Return an encoder that reads ``hidden_states``, by hooks that transformers installs."""
    return LayerEncoder(folder("Llama"), -1, norm="none", device="cpu")


def in_memory(_: Folder) -> LayerEncoder:
    """Return an encoder whose own forward pass hooks its blocks."""
    return LayerEncoder.from_module(tiny("Llama"), -1, processor=tokenizer(), medium="text", device="cpu")


def encoded(encoder: LayerEncoder, _: Path) -> Any:
    return encoder.encode(TEXTS, batch_size=3).tobytes()


def measured(encoder: LayerEncoder, _: Path) -> Any:
    return measure(encoder, TEXTS, metrics=["prompt_entropy", "infonce"], token_budget=256).rows()


def selected(encoder: LayerEncoder, _: Path) -> Any:
    chosen = select_layer(encoder, TEXTS, [number % 2 for number in range(len(TEXTS))])
    return chosen.layer, chosen.frame.rows()


def swept(encoder: LayerEncoder, folder: Path) -> Any:
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


CALLS: dict[str, tuple[Callable[[LayerEncoder, Path], Any], int]] = {  # and how often, to fill the time of a sweep
    "encode": (encoded, 4), "measure": (measured, 1), "select": (selected, 1), "sweep": (swept, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    "make", [from_files, pytest.param(in_memory, marks=pytest.mark.slow), pytest.param(raw, marks=pytest.mark.slow)]
)
def test_eight_threads_get_what_one_gets(
    make: Callable[[Folder], LayerEncoder], tiny_folder: Folder, tmp_path: Path
) -> None:
    """Two threads for each call, of two encoders over one model, so that every pair of calls overlaps."""
    encoder = make(tiny_folder)
    other = copy.copy(encoder)
    assert other is not encoder
    assert other.transformer is encoder.transformer
    start = Barrier(2 * len(CALLS))

    def results(name: str, which: LayerEncoder, number: int, times: int) -> list[Any]:
        found = []
        for again in range(times):
            folder = tmp_path / f"{name}-{number}-{again}"
            folder.mkdir()
            found.append(CALLS[name][0](which, folder))
        return found

    def beside_others(name: str, which: LayerEncoder, number: int) -> list[Any]:
        start.wait()
        return results(name, which, number, CALLS[name][1])

    expected = {name: results(name, encoder, 0, 1)[0] for name in CALLS}
    with ThreadPoolExecutor(2 * len(CALLS)) as threads:
        made = [
            (name, threads.submit(beside_others, name, which, number))
            for name in CALLS
            for number, which in enumerate((encoder, other), start=1)
        ]
    for name, future in made:
        wrong = [result != expected[name] for result in future.result()]
        assert not any(wrong), f"{sum(wrong)} of {len(wrong)} results of {name} beside other threads differ"


def test_a_progress_callback_may_encode(tiny_folder: Folder, tmp_path: Path) -> None:
    """It is called in the thread that reads the model, while other threads wait for it."""
    encoder = from_files(tiny_folder)
    alone = encoder.encode(TEXTS[-2:]).tobytes()
    expected = measured(encoder, tmp_path)
    seen: list[bytes] = []

    def progress(*_: Any) -> None:
        seen.append(encoder.encode(TEXTS[-2:]).tobytes())

    def again() -> Any:
        return measure(encoder, TEXTS, metrics=["prompt_entropy", "infonce"], token_budget=256, progress=progress)

    with ThreadPoolExecutor(2) as threads:
        frames = [threads.submit(again), threads.submit(again)]
    assert [frame.result().rows() for frame in frames] == [expected, expected]
    assert set(seen) == {alone}


def test_encoders_of_two_models_may_share_a_tokenizer() -> None:
    shared = tokenizer()
    encoders = [
        LayerEncoder.from_module(tiny("Llama"), layer, processor=shared, medium="text", device="cpu")
        for layer in (1, 2)
    ]  # fmt: skip
    expected = [encoder.encode(TEXTS, batch_size=1).tobytes() for encoder in encoders]
    start = Barrier(4)

    def run(number: int) -> list[Any]:
        start.wait()
        if number < 2:
            return [encoders[number].encode(TEXTS, batch_size=1).tobytes() == expected[number] for _ in range(3)]
        return [count_tokens(encoders[0], TEXTS) == counts for _ in range(100)]

    counts = count_tokens(encoders[0], TEXTS)
    with ThreadPoolExecutor(4) as threads:
        assert all(map(all, threads.map(run, range(4))))


@pytest.mark.parametrize("make", [from_files, raw])
def test_a_copy_made_beside_a_pass_is_whole_and_has_no_hooks_of_it(
    make: Callable[[Folder], LayerEncoder], tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = make(tiny_folder)
    expected = encoder.encode(TEXTS[-2:]).tobytes()
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(measured, encoder, tmp_path)
        copies = [copy.deepcopy(encoder) for _ in range(5)]
        assert not beside.done()
    for one in copies:
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules())
        assert one.transformer is not encoder.transformer
        assert one.encode(TEXTS[-2:]).tobytes() == expected


@pytest.mark.slow
def test_a_pool_started_beside_a_pass_encodes_the_same(tiny_folder: Folder, tmp_path: Path) -> None:
    """Workers get a pickled encoder, and hooks of a pass cannot be pickled."""
    encoder = raw(tiny_folder)
    expected = encoder.encode(TEXTS, batch_size=3)
    start, stop = Barrier(2), Event()

    def measure_on() -> None:
        start.wait()
        while not stop.is_set():
            measured(encoder, tmp_path)

    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(measure_on)
        start.wait()
        try:
            pool = encoder.start_multi_process_pool(["cpu", "cpu"])
            found = encoder.encode(TEXTS, batch_size=3, pool=pool, chunk_size=6)
            encoder.stop_multi_process_pool(pool)
        finally:
            stop.set()
        beside.result()
    np.testing.assert_allclose(found, expected, atol=1e-6)  # other batches
