"""The cost of all layers of image and audio models, compared with one pass of sentence-transformers to the last layer.

Writes ``benchmarks/results/media.md``. CPU time of one thread in alternating rounds, to reduce the effect of
other load. Images are decoded in memory, and both use the same processor.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "media.md"


def write_vit(folder: Path, blocks: int, width: int, size: int, patch: int) -> None:
    import torch
    import transformers as tf

    torch.manual_seed(0)
    config = tf.ViTConfig(
        hidden_size=width, num_hidden_layers=blocks, num_attention_heads=width // 64, intermediate_size=4 * width,
        image_size=size, patch_size=patch,
    )  # fmt: skip
    tf.ViTModel(config).save_pretrained(folder)
    tf.ViTImageProcessor(size={"height": size, "width": size}).save_pretrained(folder)


def write_wav2vec2(folder: Path, blocks: int, width: int) -> None:
    import torch
    import transformers as tf

    torch.manual_seed(0)
    config = tf.Wav2Vec2Config(
        hidden_size=width, num_hidden_layers=blocks, num_attention_heads=width // 64, intermediate_size=4 * width,
        conv_dim=(width,) * 7,
    )  # fmt: skip
    tf.Wav2Vec2Model(config).save_pretrained(folder)
    tf.Wav2Vec2FeatureExtractor().save_pretrained(folder)


def images(count: int, size: int) -> list[Any]:
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    return [Image.fromarray(draw.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(count)]


def waveforms(count: int, seconds: float) -> list[Any]:
    import numpy as np

    draw = np.random.default_rng(0)
    length = int(16000 * seconds)
    return [{"array": draw.standard_normal(length).astype(np.float32), "sampling_rate": 16000} for _ in range(count)]


def processor_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def row(name: str, folder: Path, items: list[Any], rounds: int, batch: int) -> str:
    from sentence_transformers import SentenceTransformer

    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.reading.reader import layer_reader

    encoder = LayerEncoder(str(folder), -1, device="cpu")
    encoder.save_pretrained(str(folder / "plain"))
    plain = SentenceTransformer(str(folder / "plain"), device="cpu")
    reader = layer_reader(encoder, layers="all")
    batches = [list(range(start, min(start + batch, len(items)))) for start in range(0, len(items), batch)]
    ways: dict[str, Callable[[], object]] = {
        "all": lambda: list(reader.embed(items, batches)),
        "last": lambda: plain.encode(items, batch_size=batch, show_progress_bar=False),
        "ours": lambda: encoder.encode(items, batch_size=batch, show_progress_bar=False),
    }
    for run in ways.values():
        run()
    taken = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            taken[way].append(processor_seconds(run))
    ratios = [a / b for a, b in zip(taken["all"], taken["last"], strict=True)]
    layers = encoder.num_layers + 1
    return (
        f"| {name} | {layers} | {min(taken['last']):.2f} | {min(taken['all']) / min(taken['last']):.3f} | "
        f"{statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} | "
        f"{min(taken['ours']) / min(taken['last']):.3f} |"
    )


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# All layers of image and audio models, compared with one pass to the last layer", "",
        f"`python benchmarks/media.py --rounds {given.rounds}`: random models, float32, one thread, CPU time,",
        f"{given.rounds} alternating rounds. `last` is plain sentence-transformers over the whole model.", "",
        "| model | layers | last, s | all / last, fastest rounds | median of rounds | range | our last layer / last |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        write_vit(Path(folder, "small"), 12, 192, 224, 16)
        lines.append(
            row(
                "ViT, 12 blocks of 192, 64 images of 224 x 224",
                Path(folder, "small"),
                images(64, 224),
                given.rounds,
                16,
            )
        )
        write_vit(Path(folder, "tiny"), 12, 192, 32, 4)
        lines.append(
            row("ViT, 12 blocks of 192, 256 images of 32 x 32", Path(folder, "tiny"), images(256, 32), given.rounds, 32)
        )
        write_wav2vec2(Path(folder, "waveform"), 12, 192)
        lines.append(
            row(
                "Wav2Vec2, 12 blocks of 192, 32 waveforms of 2 s",
                Path(folder, "waveform"),
                waveforms(32, 2.0),
                given.rounds,
                8,
            )
        )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
