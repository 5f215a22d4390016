"""Probes: how well a small classifier on each frozen layer tells labeled examples apart, all layers together."""

from __future__ import annotations

from midlayer_encoders.probing.heads import AttentiveProbes, LinearProbes
from midlayer_encoders.probing.nearest import nearest_classes
from midlayer_encoders.probing.probe import probe, probe_tokens
from midlayer_encoders.probing.probe_result import ProbeResult
from midlayer_encoders.probing.settings import ProbeTraining
from midlayer_encoders.probing.splits import Split, split_examples, wilson
from midlayer_encoders.probing.tokens import KeptTokens, LiveTokens

__all__ = [
    "AttentiveProbes",
    "KeptTokens",
    "LinearProbes",
    "LiveTokens",
    "ProbeResult",
    "ProbeTraining",
    "Split",
    "nearest_classes",
    "probe",
    "probe_tokens",
    "split_examples",
    "wilson",
]
