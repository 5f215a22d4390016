"""What an encoder is called in results and on its card, from the one spec that identifies its vectors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCardData
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData
from torch import Tensor, nn

from midlayer_encoders._types import EncoderSpec

__all__ = [
    "CardData",
    "base_name",
    "model_card",
    "processor_name",
    "result_name",
    "result_revision",
    "weights_digest",
]

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
    # Eight bytes are read as two integers: the low bits of round numbers are zero, and a sum modulo 2^64 of such
    # multiples of 2^52 would lose some of them.
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    flat = tensor.detach().contiguous().flatten().view(integers)
    positions = torch.arange(1, min(_CHUNK, max(flat.numel(), 1)) + 1, device=flat.device) * 2654435761 + 12345
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        total = total * 6364136223846793005 + number + (chunk.long() * positions[: chunk.numel()]).sum()
    return int(total)


def processor_name(processor: Any) -> str:
    """Return what a processor is called and a digest of its settings; of a function of the caller's, its name alone.

    Example:
        >>> processor_name(len)
        'builtins.len'
    """
    kind = processor if hasattr(processor, "__qualname__") else type(processor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if hasattr(processor, "backend_tokenizer"):
        settings = json.loads(processor.backend_tokenizer.to_str())
        settings |= {"truncation": processor.model_max_length, "padding": None}  # the last call's, otherwise
    elif hasattr(processor, "to_dict"):
        settings = processor.to_dict()
    else:
        return name
    words = json.dumps(settings, sort_keys=True, default=str)
    return f"{name} {hashlib.blake2b(words.encode(), digest_size=6).hexdigest()}"


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
    return f"{spec.model[:_LONGEST]}-layer-{_layer_words(spec)}"


def _layer_words(spec: EncoderSpec) -> str:
    """Return the layer, those that are combined, ``8-12-16``, or that of each tower: ``text-6-image-9``."""
    if spec.mixture:
        return "-".join(str(layer) for layer, _ in spec.mixture)
    one = str(spec.layer) if spec.site == "block" else f"{spec.layer}-{spec.site}"
    return "-".join(f"{name}-{layer}" for name, layer in spec.tower_layers) or one


def _mixture_words(spec: EncoderSpec) -> str:
    """Return the layers that are combined, and their shares."""
    if all(share == 1 for _, share in spec.mixture):
        return "vectors side by side of layers " + ", ".join(str(layer) for layer, _ in spec.mixture)
    return "mean of layers " + ", ".join(f"{layer} ({share:.3g})" for layer, share in spec.mixture)


def result_revision(spec: EncoderSpec) -> str:
    """Return the revision under which results are filed: readable, and different for every spec."""
    layer = f"layer-{_layer_words(spec)}" if spec.tower_layers else f"layer-{_layer_words(spec)}-of-{spec.num_layers}"
    tower = [spec.tower] if spec.tower else []
    words = [spec.revision or "default", *tower, layer, f"norm-{spec.norm}", spec.pooling]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words))  # a slash would lose the results
    return f"{readable[:_LONGEST]}-{spec.digest}"


_EXAMPLES = {
    "text": 'embeddings = model.encode(["a text", "another text"])',
    "image": 'images = model.encode(["a photo.jpg", "another.png"])',
    "audio": 'waveforms = model.encode([{"array": samples, "sampling_rate": 16000}], batch_size=1)',
}
# What sentence-transformers itself puts the repository's name in place of, when a folder is loaded and then pushed.
_FOLDER = "sentence_transformers_model_id"
# mteb calls every model that was loaded from a folder by one name, under which it would read the results of another.
_NAMED_FOR_MTEB = """
mteb files results under the model's name, which a folder cannot hold. Before this one is evaluated:

```python
model.model_card_data.model_name = {name!r}
model.model_card_data.base_model_revision = {revision!r}
```
"""


def model_card(
    spec: EncoderSpec,
    *,
    parameters: int,
    trained: bool,
    media: Sequence[str] = ("text",),
    repository: str | None = None,
    branch: str | None = None,
    own_code: bool = False,
    data: CardData | None = None,
) -> str:
    """Return the README of an exported encoder: which layer of what it is, and how to load it.

    Args:
        spec: of the encoder.
        parameters: number of them.
        trained: whether it was trained after the cut.
        media: what it takes.
        repository: on the hub that it is uploaded to; ``None`` for a folder.
        branch: of the repository; ``None`` for the main one.
        own_code: whether the model brings code of its own.
        data: license, languages, scores and, of a local model, the one that it was made of.
    """
    base = (data.made_of if data else None) if spec.model.startswith("local/") else spec.model
    named = f"base_model: {base}\n" if base else ""
    states = (
        "with the model's own final norm applied" if spec.norm == "final" else "raw, without the model's final norm"
    )
    layer = _layer_words(spec) if spec.tower_layers else f"{spec.layer} of {spec.num_layers}"
    used = f"{_mixture_words(spec)} of {spec.num_layers}" if spec.mixture else layer
    whole = f"the {spec.tower} tower of {spec.model}" if spec.tower else spec.model
    place = f'"{repository or _FOLDER}"' + (f', revision="{branch}"' if branch else "")
    place += ", trust_remote_code=True" if own_code else ""
    for_mteb = "" if repository else _NAMED_FOR_MTEB.format(name=result_name(spec), revision=result_revision(spec))
    examples = "\n".join(_EXAMPLES[medium] for medium in media)
    rows = {
        "model": spec.model,
        "revision": spec.revision or "default",
        "layer": f"{used} (0 = embeddings)",
        "norm": f"`{spec.norm}`: states {states}",
        "pooling": f"`{spec.pooling}`",
        "longest text": f"{spec.max_length} tokens" if spec.max_length else "as the model takes",
        "dtype": f"`{spec.dtype}`",
        "parameters": f"{parameters:,}",
        "attention": "bidirectional, the causal mask is off" if spec.bidirectional else "as in the model",
        "adapters": ", ".join(spec.adapters) or "none",
        "chat template": "applied to every text" if spec.chat_template else "not used",
        **_recipe_rows(spec),
        "similarity": f"`{spec.similarity}`",
        "weights": f"`{spec.weights_digest}`" + (", trained further after the cut" if trained else ", as in the model"),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "---\n"
        f"{named}library_name: sentence-transformers\npipeline_tag: sentence-similarity\n"
        "tags: [sentence-transformers, sentence-similarity, feature-extraction, dense, intermediate-layer]\n"
        f"{_more_lines(data, repository) if data else ''}"
        "---\n\n"
        f"# Layer {_layer_words(spec)} of {spec.model}\n\n"
        f"{repository or 'This folder'} is {whole} without the blocks after layer {layer}. It holds "
        "sentence-transformers' own modules only:\n\n"
        "```python\n"
        "from sentence_transformers import SentenceTransformer\n\n"
        f"model = SentenceTransformer({place})\n"
        f"{examples}\n"
        f"```\n{for_mteb}\n"
        f"| | |\n|---|---|\n{table}\n\n{_score_table(data) if data else ''}Cut with midlayer_encoders.\n"
    )


def _recipe_rows(spec: EncoderSpec) -> dict[str, str]:
    """Return what a recipe does to a text and to its vector, where there is one."""
    template = json.loads(spec.prompting)["template"] if spec.prompting else None
    after = [name for name, _ in json.loads(spec.modules or "[]")[2:] if name in ("Dense", "Normalize")]
    rows = {"template": f"`{template}`".replace("|", "\\|")} if template else {}
    return rows | ({"after the pooling": ", ".join(after)} if after else {})


def _more_lines(data: CardData, repository: str | None) -> str:
    """Return the lines of metadata that an encoder has only where someone gave them: license, languages, scores."""
    scores = list(data.scores) or None
    more = ModelCardData(
        language=data.language or None,
        license=data.license,
        **dict(data.terms),
        eval_results=scores,
        model_name=(repository or _FOLDER) if scores else None,
    )
    text: str = more.to_yaml().strip()
    return "" if text in ("", "{}") else f"{text}\n"


def _score_table(data: CardData) -> str:
    """Return the scores as people read them, each times 100."""
    if not data.scores:
        return ""
    rows = "\n".join(f"| {one.dataset_name} | {one.metric_type} | {one.metric_value} |" for one in data.scores)
    return f"## Scores\nMain scores of this layer, times 100.\n\n| task | metric | score |\n|---|---|---|\n{rows}\n\n"


class CardData(SentenceTransformerModelCardData):
    """Card data whose name and revision, by which mteb files results, follow the encoder as it is when asked.

    Attributes:
        scores: what the card lists as results.
        terms: ``license_name`` and ``license_link`` of a license that is not one of the hub's.
        made_of: name on the hub of what a local model was made of.
    """

    scores: Sequence[EvalResult] = ()
    terms: Sequence[tuple[str, str]] = ()
    made_of: str | None = None

    def _spec(self) -> Any:
        return getattr(self.model, "spec", None)

    def _ignored(self, value: Any) -> None:
        """Pass over what the base class would store."""

    model_name = property(
        lambda self: result_name(spec) if (spec := self._spec()) is not None else None,
        _ignored,
        doc="The model's name and the layer.",
    )
    base_model_revision = property(
        lambda self: result_revision(spec) if (spec := self._spec()) is not None else None,
        _ignored,
        doc="What tells apart encoders that differ in anything else.",
    )
    # Without the spec, which reads every weight.
    base_model = property(lambda self: getattr(self.model, "name", None), _ignored, doc="The model that was cut.")
