"""Two processes that share the texts give the same as one process with all texts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import METRICS, PromptEntropy
from tests.metrics.feeding import Corpus, corpus, feed, make
from tests.metrics.test_layer_metric import SAMPLES

SHARDS = {
    "uneven": lambda rank, n: torch.arange(n)[torch.arange(n) % 4 == 1 if rank else torch.arange(n) % 4 != 1],
    "one_empty": lambda rank, n: torch.arange(0 if rank else n),
    "overlapping": lambda rank, n: torch.arange(n)[3:] if rank else torch.arange(n)[:-3],
}
"""The texts of each process. With three quarters of them, one process folds its rows and the other does not."""


def texts() -> Corpus:
    return corpus(texts=1500, layers=2, tokens=9, width=4, views=3).to(torch.float32)


def values(batches: list[Tensor], names: list[str]) -> dict[str, Tensor]:
    """Return every metric, on a sample small enough that each process must drop some texts."""
    actual = {}
    for name in names:
        options = {"max_samples": 40, "seed": 3} if name in SAMPLES else {}
        actual[name] = feed(make(name, [0, 1], **options), texts(), batches).compute()
    return actual


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    actual = {}
    for shard, count in SHARDS.items():
        own_rows = [batch for batch in count(rank, 1500).split(300) if len(batch)]
        actual[shard] = values(own_rows, SAMPLES if shard == "overlapping" else list(METRICS))
    with pytest.raises(OptionError, match="`index` must be given when several processes"):
        make("cka", [0, 1]).update(torch.ones(2, 2), layer=0)
    torch.save(actual, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_give_the_same_as_one(tmp_path: Path) -> None:
    mp.spawn(process, args=(str(tmp_path),), nprocs=2)
    separate = values(list(torch.arange(1500).split(500)), list(METRICS))
    for rank in range(2):
        loaded = torch.load(tmp_path / f"{rank}.pt")
        for shard, numbers in loaded.items():
            for name, number in numbers.items():
                exact = {"rtol": 0.0, "atol": 0.0} if name in SAMPLES else {"rtol": 1e-12, "atol": 1e-13}
                torch.testing.assert_close(
                    number,
                    separate[name],
                    **exact,
                    equal_nan=True,
                    msg=lambda text, name=name, shard=shard: f"{name}, {shard}: {text}",
                )


def test_compute_in_a_group_of_one_process_gathers_nothing(tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("gathered")

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        metric = PromptEntropy([0], dist_sync_fn=fail)
        metric.update(torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool), layer=0)
        assert metric.compute().isfinite().all()
    finally:
        dist.destroy_process_group()
