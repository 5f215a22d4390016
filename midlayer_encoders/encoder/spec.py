"""Digests and names of an encoder in results and on its model card, derived from its spec."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData
from torch import Tensor, nn

from midlayer_encoders._types import EncoderSpec, content_digest

_CHUNK = 1 << 20
_MAX_NAME = 120  # characters; file systems allow 255 bytes, and mteb appends to names


def weights_digest(module: nn.Module) -> str:
    """Return twelve hexadecimal digits that identify the weights on every device.

    The integers of each tensor are summed on its device with weights by position, modulo :math:`2^{64}`, in one pass
    over memory.

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
    # Eight bytes are read as two integers: the low bits of round numbers are zero, and a sum of such multiples of 2^52
    # modulo 2^64 would lose information.
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    flat = tensor.detach().contiguous().flatten().view(integers)
    positions = torch.arange(1, min(_CHUNK, max(flat.numel(), 1)) + 1, device=flat.device) * 2654435761 + 12345
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        total = total * 6364136223846793005 + number + (chunk.long() * positions[: chunk.numel()]).sum()
    return int(total)


def processor_name(processor: Any) -> str:
    """Return the name of a processor and a digest of its settings, or only the name of a plain function.

    Example:
        >>> processor_name(len)
        'builtins.len'
    """
    named = processor if hasattr(processor, "__qualname__") else type(processor)
    name = f"{named.__module__}.{named.__qualname__}"
    if hasattr(processor, "backend_tokenizer"):
        settings = json.loads(processor.backend_tokenizer.to_str())
        settings |= {"truncation": processor.model_max_length, "padding": None}  # which depend on the last call
    elif hasattr(processor, "to_dict"):
        settings = processor.to_dict()
    else:
        return name
    return f"{name} {content_digest(json.dumps(settings, sort_keys=True, default=str))}"


def base_name(model: str, gguf_file: str | None = None) -> str:
    """Return a model's name on the hub, or ``local/`` and the name of its folder or GGUF file.

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
    """Return the model and layer as the name of results; the revision distinguishes all other options."""
    return f"{spec.model[:_MAX_NAME]}-layer-{layer_label(spec)}"


def layer_label(spec: EncoderSpec) -> str:
    """Return the layer, the combined layers (``8-12-16``), or those of the towers (``text-6-image-9``)."""
    if spec.mixture:
        return "-".join(str(layer) for layer, _ in spec.mixture)
    label = str(spec.layer) if spec.site == "block" else f"{spec.layer}-{spec.site}"
    return "-".join(f"{name}-{layer}" for name, layer in spec.tower_layers) or label


def result_revision(spec: EncoderSpec) -> str:
    """Return the revision of results, which is readable and unique to the spec."""
    layer = f"layer-{layer_label(spec)}" + ("" if spec.tower_layers else f"-of-{spec.num_layers}")
    tower = [spec.tower] if spec.tower else []
    parts = [spec.revision or "default", *tower, layer, f"norm-{spec.norm}", spec.pooling]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))  # mteb loses results of names with a slash
    return f"{readable[:_MAX_NAME]}-{spec.digest}"


def _ignore(data: CardData, value: Any) -> None:
    """Ignore a value that the base class sets."""


def _from_spec(describe: Callable[[EncoderSpec], str], doc: str) -> Any:
    """Return a property that describes the spec of the current state of the encoder."""

    def read(data: CardData) -> str | None:
        spec = getattr(data.model, "spec", None)
        return None if spec is None else describe(spec)

    return property(read, _ignore, doc=doc)


class CardData(SentenceTransformerModelCardData):
    """Card data whose name and revision, under which mteb saves results, follow the current state of the encoder.

    Attributes:
        scores: results on the card.
        terms: ``license_name`` and ``license_link`` of a license that the hub does not list.
        made_of: name on the hub of the base of a local model.
    """

    scores: Sequence[EvalResult] = ()
    terms: Sequence[tuple[str, str]] = ()
    made_of: str | None = None

    model_name = _from_spec(result_name, "The model's name and the layer.")
    base_model_revision = _from_spec(result_revision, "Distinguishes encoders that differ in any option or weight.")
    # The spec would read every weight.
    base_model = property(lambda self: getattr(self.model, "name", None), _ignore, doc="The model that was cut.")
