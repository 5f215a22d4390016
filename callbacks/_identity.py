"""What the values of each metric depend on besides the weights: a resumed run keeps values only where it is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.callbacks._inputs import Batch
from midlayer_encoders.callbacks._measurement import LABEL_ACCURACY, Measurement

__all__ = ["Identities", "identities"]

Identities = dict[str, dict[str, Any]]
"""By metric, what its values depend on: strings, numbers and lists of them."""


def identities(measurement: Measurement) -> Identities:
    """Return what each metric depends on, and no more: the values of a token metric do not change with ``pooling``."""
    settings = measurement.settings
    rows, count = _rows(measurement.batches), measurement.count
    inputs, *views = [_digest(rows[start : start + count]) for start in range(0, len(rows), count)]
    place = {"module": measurement.module, "blocks": measurement.anatomy.blocks}
    vectors = {"norm": settings.norm, "pooling": settings.pooling}
    found: Identities = {}
    for name, metric in settings.make_metrics(measurement.layers).items():
        if metric.kind == "views":
            found[name] = {**place, **vectors, "views": views[: int(getattr(metric, "views", 0))]}
        else:
            found[name] = {**place, **(vectors if metric.kind == "pooled" else {}), "inputs": inputs}
        if metric.needs_previous:
            found[name]["layers"] = list(measurement.layers)
    if measurement.labels is not None:
        labels = _digest([repr(measurement.labels.tolist()).encode()])
        found[LABEL_ACCURACY] = {**place, **vectors, "inputs": inputs, "labels": labels, "seed": settings.seed}
    return found


def _digest(rows: Sequence[bytes]) -> str:
    made = hashlib.sha256()
    for row in rows:
        made.update(hashlib.sha256(row).digest())
    return made.hexdigest()[:16]


def _rows(batches: Sequence[Batch]) -> list[bytes]:
    """Return each input, then each view of it, in their order and without padding, which depends on the batches."""
    rows: dict[int, bytes] = {}
    for batch in batches:
        for row, position in enumerate(batch.positions):
            rows[position] = _row_bytes({name: value[row] for name, value in sorted(batch.inputs.items())})
    return [rows[position] for position in sorted(rows)]


def _row_bytes(inputs: dict[str, Tensor]) -> bytes:
    mask = inputs.get("attention_mask")
    parts = b""
    for name, value in inputs.items():
        if mask is not None and value.shape[:1] == mask.shape:
            value = value[mask.bool()]
        raw = value.reshape(-1).contiguous().view(torch.uint8)  # NumPy has no bfloat16
        parts += f"{name} {value.dtype} {tuple(value.shape)} ".encode() + raw.numpy().tobytes()
    return parts
