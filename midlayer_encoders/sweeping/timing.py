"""About how long a sweep takes: a few batches of its own texts are run, and one layer of random vectors is scored."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from midlayer_encoders._types import ReadSite, Stage
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.reading.batches import TokenBudget, batches_of, count_tokens, tokens_that_fit
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.scoring import layer_scores
from midlayer_encoders.sweeping.baselines import MINILM_PARAMETERS, TFIDF, baselines_for
from midlayer_encoders.sweeping.stored_layer import most_texts, num_dims

if TYPE_CHECKING:
    from midlayer_encoders.scoring.recording import Recorded

__all__ = ["Pair", "Timing", "minilm_share", "some_of", "times_longer"]

_COUNTED = 20_000  # texts of a task whose tokens are counted: a sample is as long as the whole
_SHARES = (0.5, 0.9, 0.1, 0.7, 0.3)  # of all tokens: where the batches that are timed stand
_PATIENCE = 15.0  # seconds after which no other batch, or task, is timed
_LARGEST = 1 << 28  # numbers of a layer: scoring is timed on no more

Pair: TypeAlias = tuple[str, str]
"""A prompt and the text that it is put before."""


def some_of(pairs: Sequence[Pair], most: int = _COUNTED) -> list[Pair]:
    """Return a random sample, the same each time, or all where there are no more."""
    return random.Random(0).sample(pairs, most) if len(pairs) > most else list(pairs)


def times_longer(encoder: LayerEncoder, other: LayerEncoder, pairs: Sequence[Pair]) -> float:
    """Return how many times as many tokens a recipe makes of texts."""
    texts = [text for _, text in some_of(pairs, 512)]
    return 1.0 if other is encoder else sum(count_tokens(other, texts)) / sum(count_tokens(encoder, texts))


def minilm_share(encoder: LayerEncoder) -> float:
    """Return the share of a pass that one of MiniLM takes, 0 where it is not compared with."""
    size = sum(parameter.numel() for parameter in encoder.parameters())
    compared = any(
        one.made_for is not TFIDF.made_for and not one.searches for one in baselines_for(encoder, Stage(None, ""))
    )
    return MINILM_PARAMETERS / size if compared else 0.0


@dataclass
class Timing:
    """Times a few batches, and the scoring of a layer."""

    encoder: LayerEncoder
    layers: Sequence[int]
    site: ReadSite
    token_budget: TokenBudget
    stage: Stage
    timed: int = 0

    def embedding(self, pairs: Sequence[Pair]) -> float:
        """Return about how many seconds a pass over texts takes, by batches of theirs that are run."""
        some = some_of(pairs)
        by_prompt: dict[str, list[str]] = {}
        for prompt, text in some:
            by_prompt.setdefault(prompt, []).append(text)
        size = tokens_that_fit(self.encoder) if self.token_budget == "auto" else self.token_budget
        most = most_texts(size, len(self.layers), num_dims(self.encoder, self.encoder.norm))
        plans, padded = dict[str, list[list[int]]](), dict[str, list[tuple[int, int]]]()
        for prompt, texts in by_prompt.items():
            lengths = count_tokens(self.encoder, [prompt + text for text in texts])
            plans[prompt] = batches_of(self.encoder, texts, token_budget=size, max_texts=most, prompt=prompt)
            padded[prompt] = [
                (longest, longest * len(batch))
                for batch in plans[prompt]
                for longest in (max(lengths[place] for place in batch),)
            ]
        largest = max(plans, key=lambda prompt: sum(tokens for _, tokens in padded[prompt]))
        rates = self._rates(by_prompt[largest], plans[largest], padded[largest], largest)
        every = [one for batches in padded.values() for one in batches]
        seconds = sum(tokens * _nearest(rates, longest) for longest, tokens in every)
        return seconds * len(pairs) / len(some)

    def _rates(
        self, texts: Sequence[str], plan: Sequence[Sequence[int]], padded: Sequence[tuple[int, int]], prompt: str
    ) -> dict[int, float]:
        """Return the seconds of a padded token in batches of some lengths."""
        total, passed, middles = sum(tokens for _, tokens in padded), 0, list[float]()
        for _, tokens in padded:
            middles.append((passed + tokens / 2) / total)
            passed += tokens
        # Spread over the tokens, those in the middle first, each once; the shortest goes before, to warm up.
        wanted = [min(range(len(plan)), key=lambda place: abs(middles[place] - share)) for share in _SHARES]
        chosen = list(dict.fromkeys(wanted))
        self.stage.expect(len(chosen))
        reader = layer_reader(self.encoder, layers=self.layers, prompt=prompt, site=self.site)
        rates: dict[int, float] = {}
        order = [plan[-1], *(plan[place] for place in chosen)]
        with closing(reader.passes(texts, order)) as started:
            next(started).vectors()
            begun = start = time.perf_counter()
            for place, passed_on in zip(chosen, started, strict=False):
                passed_on.vectors()
                now = time.perf_counter()
                rates[padded[place][0]] = (now - start) / padded[place][1]
                start = now
                self.timed += 1
                self.stage.step()
                if now - begun > _PATIENCE:
                    self.stage.expect(len(rates) - len(chosen))
                    break
        return rates

    def scoring(self, asked: Sequence[tuple[str, Sequence[Recorded]]]) -> tuple[float, list[str]]:
        """Return the seconds that scoring one layer of all tasks takes, by random vectors, and the tasks left out.

        Args:
            asked: the name of each task and what it asks; nothing where it is left to mteb, which is not timed.
        """
        dim, generator = num_dims(self.encoder, self.encoder.norm), np.random.default_rng(0)
        seconds, left_out = 0.0, list[str]()
        for name, recorded in asked:
            rows = max((len(one.keys) for one in recorded), default=0)
            if not rows or rows * dim > _LARGEST or seconds > _PATIENCE:
                left_out.append(name)
                continue
            self.stage.expect(1)
            for one in recorded:
                vectors = generator.standard_normal((len(one.keys), dim), dtype=np.float32)
                start = time.perf_counter()
                read = partial(_same, vectors)
                layer_scores(one.question, one.keys, [0], read, device=self.encoder.device)
                seconds += time.perf_counter() - start
            self.stage.step()
        return seconds, left_out


def _same(vectors: npt.NDArray[np.float32], *_: object) -> npt.NDArray[np.float32]:
    return vectors


def _nearest(rates: Mapping[int, float], longest: int) -> float:
    return rates[min(rates, key=lambda known: abs(known - longest))]
