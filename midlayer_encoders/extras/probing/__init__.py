"""Train a small classifier on every frozen layer and score how well each layer separates labeled examples."""

from midlayer_encoders.extras.probing.classifiers import AttentiveProbes, LinearProbes
from midlayer_encoders.extras.probing.probe import Split, probe, probe_tokens, split_examples
from midlayer_encoders.extras.probing.probe_result import ProbeResult, wilson
from midlayer_encoders.extras.probing.token_states import CachedTokens, LiveTokens
from midlayer_encoders.extras.settings import ProbeSettings

__all__ = [
    "AttentiveProbes",
    "CachedTokens",
    "LinearProbes",
    "LiveTokens",
    "ProbeResult",
    "ProbeSettings",
    "Split",
    "probe",
    "probe_tokens",
    "split_examples",
    "wilson",
]
