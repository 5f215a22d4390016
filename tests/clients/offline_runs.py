"""What W&B and MLflow keep of a run on disk, read back."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 2**15


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that were logged in the one offline run in ``folder``, by name."""
    (path,) = folder.rglob("*.wandb")
    rows = [record.history for record in _records(path.read_bytes()) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def _records(data: bytes) -> Iterator[Any]:
    """Yield the records of W&B's file: LevelDB's log format, records cut at blocks, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    place, record = 7, b""
    while place + 7 <= len(data):
        if _BLOCK - place % _BLOCK < 7:  # no room for a header: the rest of the block is empty
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def mlflow_run(uri: str) -> tuple[Any, Any]:
    """Return MLflow's client and the one run that it has."""
    from mlflow import MlflowClient, flush_async_logging

    flush_async_logging()
    tracking = MlflowClient(uri)
    (run,) = [run for each in tracking.search_experiments() for run in tracking.search_runs([each.experiment_id])]
    return tracking, run
