"""Size of the vocabulary, and its special tokens with their ids."""

from __future__ import annotations

VOCAB = 8192
SPECIAL = ("[PAD]", "[EOS]", "[MASK]", "[BOS]")
PAD, EOS, MASK, BOS = range(4)
