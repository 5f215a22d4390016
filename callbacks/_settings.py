"""How each metric of a probe is measured: two values share a name only where this is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.callbacks._inputs import Batch
from midlayer_encoders.callbacks._probe import LABEL_ACCURACY, Probe
from midlayer_encoders.measuring import make_for_views

__all__ = ["Settings", "probe_settings"]

Settings = dict[str, dict[str, Any]]
"""What the values of each metric depend on besides the weights: strings, numbers and lists of them."""


def probe_settings(probe: Probe, module: str) -> Settings:
    """Return what each metric of ``probe`` depends on, and no more: token metrics do not know of ``pooling``.

    Args:
        probe: what is measured.
        module: path of the transformer in what is trained.
    """
    inputs, *views = [_digest(_rows(batches)) for batches in probe.passes]
    place = {"module": module, "blocks": probe.anatomy.blocks}
    vectors = {"norm": probe.norm, "pooling": probe.pooling}
    found: Settings = {}
    for name, metric in (make_for_views(probe.metrics, probe.layers, probe.views) if probe.metrics else {}).items():
        if metric.kind == "views":
            found[name] = {**place, **vectors, "views": views[: int(getattr(metric, "views", 0))]}
        else:
            found[name] = {**place, **(vectors if metric.kind == "pooled" else {}), "inputs": inputs}
        if metric.needs_previous:
            found[name]["layers"] = list(probe.layers)
    if probe.labels is not None:
        labels = _digest([repr(probe.labels.tolist()).encode()])
        found[LABEL_ACCURACY] = {**place, **vectors, "inputs": inputs, "labels": labels, "seed": probe.seed}
    return found


def _digest(rows: Sequence[bytes]) -> str:
    made = hashlib.sha256()
    for row in rows:
        made.update(hashlib.sha256(row).digest())
    return made.hexdigest()[:16]


def _rows(batches: Sequence[Batch]) -> list[bytes]:
    """Return each input, in the order of the whole list and without its padding, which depends on the batches."""
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
