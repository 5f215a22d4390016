"""What an encoder is called in results and on its card, from the one spec that identifies its vectors."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from midlayer_encoders._types import EncoderSpec

__all__ = ["base_name", "model_card", "result_name", "result_revision", "weights_digest"]

_CHUNK = 1 << 20
_LONGEST = 120  # characters of a name; file systems stop at 255 bytes, and mteb adds to it


def weights_digest(module: nn.Module) -> str:
    """Return twelve hexadecimal digits that change whenever a weight does, the same on every device.

    Each tensor is read as integers where it lies and summed with weights that differ by position, modulo
    :math:`2^{64}`, so one pass over memory is all it costs.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = weights_digest(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(2)
        >>> before == weights_digest(layer)
        False
    """
    digest = hashlib.blake2b(digest_size=6)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(str(_checksum(tensor)).encode())
    return digest.hexdigest()


def _checksum(tensor: Tensor) -> int:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().flatten().view(integers)
    positions = torch.arange(1, min(_CHUNK, max(flat.numel(), 1)) + 1, device=flat.device) * 2654435761 + 12345
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        total = total * 6364136223846793005 + number + (chunk.long() * positions[: chunk.numel()]).sum()
    return int(total)


def base_name(model: str, gguf_file: str | None = None) -> str:
    """Return a model's name on the hub, or ``local/`` and the name of its folder or GGUF file, wherever it lies.

    Example:
        >>> base_name("EleutherAI/pythia-410m"), base_name("/")
        ('EleutherAI/pythia-410m', 'local/model')
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    if gguf_file is not None:
        return f"local/{Path(gguf_file).stem}"
    return "local/" + (re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name) or "model")


def result_name(spec: EncoderSpec) -> str:
    """Return the name under which results are filed: the model's, and the layer.

    The revision, not the name, tells apart encoders that differ in anything else.
    """
    return f"{spec.model[:_LONGEST]}-layer-{spec.layer}"


def result_revision(spec: EncoderSpec) -> str:
    """Return the revision under which results are filed: readable, and different for every spec."""
    words = [spec.revision or "default", f"layer-{spec.layer}-of-{spec.num_layers}", f"norm-{spec.norm}", spec.pooling]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words))  # a slash would lose the results
    return f"{readable[:_LONGEST]}-{spec.digest}"


def model_card(spec: EncoderSpec, *, parameters: int, trained: bool) -> str:
    """Return the README of an exported encoder: which layer of what it is, and how to load it."""
    named = "" if spec.model.startswith("local/") else f"base_model: {spec.model}\n"
    states = (
        "with the model's own final norm applied" if spec.norm == "final" else "raw, without the model's final norm"
    )
    rows = {
        "model": spec.model,
        "revision": spec.revision or "default",
        "layer": f"{spec.layer} of {spec.num_layers} (0 = embeddings)",
        "norm": f"`{spec.norm}`: states {states}",
        "pooling": f"`{spec.pooling}`",
        "longest text": f"{spec.max_length} tokens" if spec.max_length else "as the model takes",
        "dtype": f"`{spec.dtype}`",
        "parameters": f"{parameters:,}",
        "attention": "bidirectional, the causal mask is off" if spec.bidirectional else "as in the model",
        "adapters": ", ".join(spec.adapters) or "none",
        "chat template": "applied to every text" if spec.chat_template else "not used",
        "weights": f"`{spec.weights}`" + (", trained further after the cut" if trained else ", as in the model"),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "---\n"
        f"{named}library_name: sentence-transformers\npipeline_tag: sentence-similarity\n"
        "tags: [sentence-transformers, sentence-similarity, feature-extraction, dense, intermediate-layer]\n"
        "---\n\n"
        f"# Layer {spec.layer} of {spec.model}\n\n"
        f"{spec.model} without the {spec.num_layers - spec.layer} blocks after layer {spec.layer} of "
        f"{spec.num_layers}. The folder holds sentence-transformers' own modules only:\n\n"
        "```python\n"
        "from sentence_transformers import SentenceTransformer\n\n"
        'model = SentenceTransformer("path/to/this/folder")\n'
        'embeddings = model.encode(["a text", "another text"])\n'
        "```\n\n"
        f"| | |\n|---|---|\n{table}\n\nCut with midlayer_encoders.\n"
    )
