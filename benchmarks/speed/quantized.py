"""4- and 8-bit encoders of a model: every layer compared with the uncut quantized model, memory and speed.

``python -m benchmarks.speed.quantized FOLDER --out OUT`` writes ``quantized_cuda.md`` on a GPU with bitsandbytes, or
``quantized_cpu.md`` with ``--device cpu``.
"""

from __future__ import annotations

import argparse
import gc
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel

from benchmarks.pages import table
from benchmarks.timing import device_name, fastest
from midlayer_encoders import LayerEncoder
from midlayer_encoders.models.load import keep_weights_unchanged

WORDS = [
    "a",
    "man",
    "is",
    "playing",
    "the",
    "guitar",
    "while",
    "two",
    "dogs",
    "run",
    "over",
    "green",
    "grass",
    "near",
    "an",
    "old",
    "house",
    "and",
    "some",
    "people",
    "watch",
]
BATCH = 32
COLUMNS = (
    "weights", "largest difference", "mean difference", "cosine", "MB, all blocks", "MB, half", "peak MB while encoding",
    "sentences/s, all blocks", "sentences/s, half",
)  # fmt: skip


def sentences(count: int) -> list[str]:
    """Return sentences as long as those of STSBenchmark, 5 to 20 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 20))) for _ in range(count)]


@torch.no_grad()
def vectors_of_uncut(
    folder: str, config: Any, dtype: torch.dtype, device: str, features: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the mean of the hidden states of every layer of the uncut model, after its final norm."""
    options = {} if config is None else {"quantization_config": config}
    model = AutoModel.from_pretrained(folder, dtype=dtype, device_map=device, **options).eval()
    keep_weights_unchanged(model)
    norm = next((getattr(model, name) for name in ("norm", "ln_f", "final_layer_norm") if hasattr(model, name)), None)
    inputs = {name: value.to(device) for name, value in features.items()}
    output = model(**inputs, output_hidden_states=True)
    weights = inputs["attention_mask"][..., None].float()
    *earlier, _ = output.hidden_states
    states = [*(earlier if norm is None else map(norm, earlier)), output.last_hidden_state]
    return [((layer.float() * weights).sum(1) / weights.sum(1)).cpu() for layer in states]


def free() -> None:
    """Return unused memory of the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def size_of(encoder: LayerEncoder) -> float:
    """Return the bytes of an encoder's weights in MB."""
    tensors = [*encoder.state_dict().values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def encode_seconds(encoder: LayerEncoder, texts: list[str]) -> float:
    """Return the fastest of three rounds."""
    return fastest(lambda: encoder.encode(texts, batch_size=BATCH, show_progress_bar=False), 3)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--texts", type=int, default=2758)  # the sentences of STSBenchmark's 1,379 test pairs
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    texts = sentences(args.texts)
    sample = texts[:BATCH]
    rows, layer_rows = [], []
    plain: list[np.ndarray] = []
    for quantization in (None, "8bit", "4bit"):
        free()
        options: dict[str, Any] = {"dtype": args.dtype, "device": args.device, "quantization": quantization}
        whole = LayerEncoder(args.folder, -1, **options)
        depth = whole.num_layers
        config = getattr(whole.transformer.config, "quantization_config", None)
        whole_size = size_of(whole)
        features = whole.host_inputs(sample)
        free()
        whole_seconds = encode_seconds(whole, texts)
        peak = torch.cuda.max_memory_allocated() / 1e6 if args.device.startswith("cuda") else float("nan")
        del whole
        free()
        expected = vectors_of_uncut(args.folder, config, dtype, args.device, features)
        differences, cosines = [], []
        for layer in range(depth + 1):
            free()
            encoder = LayerEncoder(args.folder, layer, **options)
            vectors = encoder.encode(sample, batch_size=BATCH, convert_to_tensor=True).float().cpu()
            differences.append(float((vectors - expected[layer]).norm() / expected[layer].norm()))
            if quantization is None:
                plain.append(vectors.numpy())
            reference = torch.from_numpy(plain[layer])
            cosines.append(float(torch.nn.functional.cosine_similarity(vectors, reference).min()))
            if layer == depth // 2:
                half_size, half_seconds = size_of(encoder), encode_seconds(encoder, texts)
            del encoder
        name = quantization or args.dtype
        rates = [args.texts / seconds for seconds in (whole_seconds, half_seconds)]
        rows.append([
            name, f"{max(differences):.1e}", f"{np.mean(differences):.1e}", f"{min(cosines):.3f}", f"{whole_size:.1f}",
            f"{half_size:.1f}", *(f"{number:.0f}" for number in (peak, *rates)),
        ])  # fmt: skip
        layer_rows.append([name, *(f"{difference:.1e}" for difference in differences)])
        print(*rows[-1], flush=True)
    kind = args.device.partition(":")[0]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "bitsandbytes"))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"quantized_{kind}.md"
    path.write_text(
        f"""# Quantized encoders on a {"GPU" if kind == "cuda" else "CPU"}

{Path(args.folder).name}, {depth} blocks, {args.dtype}, on {device_name(args.device)}; {versions}. Made with
`python -m benchmarks.speed.quantized FOLDER --device {kind}`.

*Difference*: norm of the difference from the uncut model with the same quantization, divided by the norm of its vectors
(mean of the tokens after the final norm, {BATCH} sentences in one batch), the largest and the mean over the layers.
*Cosine*: the smallest between a quantized vector and that of the same layer without quantization. *Sentences per
second*: {args.texts:,} of 5 to 20 words, in batches of {BATCH}.

{table(COLUMNS, rows)}
Difference by layer:

{table(["weights", *range(depth + 1)], layer_rows)}""",
        encoding="utf8",
    )
    print(path)


if __name__ == "__main__":
    main()
