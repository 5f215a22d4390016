"""The corpus of the training record: a byte-level BPE of 8192 tokens, the novels as one array of token ids, its two parts.

``python -m benchmarks.pretraining.corpus OUT`` makes, from ``MIDLAYER_DATA`` or ``--texts``, all that ``run.py`` reads: the tokenizer, the ids,
the texts to measure with their views, and the tasks, shortened. A GPU machine needs that folder and no other data.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.data import data_root

DATA = data_root()
VOCAB = 8192
SPECIAL = ("[PAD]", "[EOS]", "[MASK]", "[BOS]")
PAD, EOS, MASK, BOS = range(4)
STRETCH = 25_600  # tokens; every hundredth stretch is held out, so that no author is only trained on or only held out


def train_tokenizer(texts: list[str], vocab: int = VOCAB) -> Any:
    """Return a byte-level BPE tokenizer trained on ``texts``; it adds nothing around a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return wrapped(made)


def wrapped(tokenizer: Any) -> Any:
    """Return a tokenizer as transformers has them."""
    from transformers import PreTrainedTokenizerFast

    pad, eos, mask, bos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, mask_token=mask, bos_token=bos, model_max_length=256
    )


def encode(texts: list[str], tokenizer: Any) -> np.ndarray[Any, Any]:
    """Return the ids of all texts one after the other, 16 bits each."""
    pieces = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array(piece.ids, dtype=np.uint16) for piece in pieces])


def paragraphs(text: str, size: int = 20_000) -> list[str]:
    """Return a text in portions of about ``size`` characters that end with a line."""
    portions, start = [], 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        portions.append(text[start:end])
        start = end
    return portions


def parts(tokens: Tensor, stretch: int = STRETCH) -> tuple[Tensor, Tensor]:
    """Return the ids to train on and the ids held out, every hundredth stretch (the last of each hundred).

    Example:
        >>> train, held = parts(torch.arange(200), stretch=1)
        >>> len(train), held.tolist()
        (198, [99, 199])
    """
    held = (torch.arange(len(tokens), device=tokens.device) // stretch) % 100 == 99
    return tokens[~held], tokens[held]


@dataclass(frozen=True)
class Windows:
    """Batches of windows of ``length + 1`` ids, in an order that ``seed`` alone decides; one epoch follows another.

    Attributes:
        tokens: all ids, on the device that trains.
        steps: number of batches.
        batch: windows in a batch.
        length: ids that a model reads; the window has one more, the last one's target.
        seed: of the order. Each epoch starts its windows at another offset.
    """

    tokens: Tensor
    steps: int
    batch: int = 256
    length: int = 256
    seed: int = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        within = torch.arange(self.length + 1, device=self.tokens.device)
        starts = torch.empty(0, dtype=torch.long)
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            while len(starts) < self.batch:
                starts = torch.cat([starts, self._epoch(generator)])
            now, starts = starts[: self.batch], starts[self.batch :]
            yield self.tokens[now.to(self.tokens.device)[:, None] + within].long()

    def _epoch(self, generator: torch.Generator) -> Tensor:
        offset = int(torch.randint(self.length, (), generator=generator))
        number = (len(self.tokens) - offset - 1) // self.length
        return offset + self.length * torch.randperm(number, generator=generator)


def passages(held: np.ndarray[Any, Any], tokenizer: Any, *, number: int, tokens: int = 128) -> list[str]:
    """Return passages of the held-out part at equal distances, from a word's start, about ``tokens`` tokens each."""
    starts = np.linspace(0, len(held) - 2 * tokens, number).astype(int)
    texts = [tokenizer.decode(held[start : start + tokens].tolist()) for start in starts]
    return [" ".join(text.split(" ")[1:-1]).strip() for text in texts]


def write_tokens(path: Path, tokens: np.ndarray[Any, Any]) -> None:
    """Write ids compressed, two bytes each, the high one first."""
    path.write_bytes(lzma.compress(tokens.astype(">u2").tobytes(), preset=6))


def read_tokens(path: Path) -> np.ndarray[Any, Any]:
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype=">u2").astype(np.int32)


def read_tokenizer(folder: Path, *, bos: bool = False) -> Any:
    """Return the tokenizer, which puts ``[BOS]`` before every text or adds nothing."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if bos:
        made.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", BOS)])
    return wrapped(made)


def read_texts(path: Path, characters: int | None = None) -> list[str]:
    """Return a plain text, or one compressed by ``xz``, in portions."""
    with lzma.open(path, "rt", encoding="utf8") if path.suffix == ".xz" else path.open(encoding="utf8") as file:
        return paragraphs(file.read(characters))


def main(words: list[str] | None = None) -> None:
    from benchmarks.quality.real_tasks import shortened
    from midlayer_encoders.metrics.text_views import augment

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, default=DATA / "corpora" / "fiction_en.txt.xz", help="plain, or .xz")
    parser.add_argument("--characters", type=int, default=None, help="of the corpus, all by default")
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--rows", type=int, default=1000, help="of each task's file")
    parser.add_argument("--probes", type=int, default=200)
    given = parser.parse_args(words)
    stretch = STRETCH if given.characters is None else 2560
    if not given.texts.is_file():
        raise FileNotFoundError(
            f"{given.texts} is not there: give a text of your own by `--texts`, or set MIDLAYER_DATA to the folder with "
            "`corpora` and `tasks`."
        )
    given.out.mkdir(parents=True, exist_ok=True)
    texts = read_texts(given.texts, given.characters)
    tokenizer = train_tokenizer(texts, given.vocab)
    tokenizer.backend_tokenizer.save(str(given.out / "tokenizer.json"))
    tokens = encode(texts, tokenizer)
    write_tokens(given.out / "tokens.xz", tokens)
    train, held = parts(torch.from_numpy(tokens.astype(np.int32)), stretch)
    print(f"{len(train):,} tokens to train on, {len(held):,} held out")
    probes = passages(held.numpy(), tokenizer, number=given.probes)
    views = augment(probes, views=4, seed=0)
    (given.out / "probes.json").write_text(json.dumps({"texts": probes, "views": views, "stretch": stretch}))
    shutil.rmtree(given.out / "tasks", ignore_errors=True)
    (given.out / "tasks").mkdir()
    if (DATA / "tasks").is_dir():
        for task in shortened(given.out / "tasks", given.rows):
            if task.parent != given.out / "tasks":
                shutil.copytree(task, given.out / "tasks" / task.name)
    else:
        print("No tasks: MIDLAYER_DATA names no folder with `tasks`. Runs will be measured, and not scored.")


if __name__ == "__main__":
    main()
