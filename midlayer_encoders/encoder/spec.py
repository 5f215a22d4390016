"""Digests and names of an encoder in results, and its model card, derived from its spec."""

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
    text = json.dumps(settings, sort_keys=True, default=str)
    return f"{name} {hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


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
    return f"{spec.model[:_MAX_NAME]}-layer-{_layer_label(spec)}"


def _layer_label(spec: EncoderSpec) -> str:
    """Return the layer, the combined layers (``8-12-16``), or those of the towers (``text-6-image-9``)."""
    if spec.mixture:
        return "-".join(str(layer) for layer, _ in spec.mixture)
    label = str(spec.layer) if spec.site == "block" else f"{spec.layer}-{spec.site}"
    return "-".join(f"{name}-{layer}" for name, layer in spec.tower_layers) or label


def _mixture_label(spec: EncoderSpec) -> str:
    """Return the combined layers and their weights."""
    if all(share == 1 for _, share in spec.mixture):
        return "concatenated vectors of layers " + ", ".join(str(layer) for layer, _ in spec.mixture)
    return "mean of layers " + ", ".join(f"{layer} ({share:.3g})" for layer, share in spec.mixture)


def result_revision(spec: EncoderSpec) -> str:
    """Return the revision of results, which is readable and unique to the spec."""
    layer = f"layer-{_layer_label(spec)}" + ("" if spec.tower_layers else f"-of-{spec.num_layers}")
    tower = [spec.tower] if spec.tower else []
    parts = [spec.revision or "default", *tower, layer, f"norm-{spec.norm}", spec.pooling]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))  # mteb loses results of names with a slash
    return f"{readable[:_MAX_NAME]}-{spec.digest}"


_EXAMPLES = {
    "text": 'embeddings = model.encode(["a text", "another text"])',
    "image": 'images = model.encode(["a photo.jpg", "another.png"])',
    "audio": 'waveforms = model.encode([{"array": samples, "sampling_rate": 16000}], batch_size=1)',
}
# sentence-transformers replaces this placeholder by the repository when it pushes a folder.
_FOLDER = "sentence_transformers_model_id"
# mteb gives all models from folders the same name and would mix up their results.
_NAMED_FOR_MTEB = """
mteb saves results under the model's name, which a folder does not store. Before evaluation, set:

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
    remote_code: bool = False,
    data: CardData | None = None,
) -> str:
    """Return the README of an exported encoder.

    Args:
        spec: spec of the encoder.
        parameters: number of parameters.
        trained: whether it was trained after the cut.
        media: media of its inputs.
        repository: repository on the hub; ``None`` for a folder.
        branch: branch of the repository; ``None`` for the main one.
        remote_code: whether the model runs code from the hub.
        data: license, languages, scores, and the base of a local model.
    """
    base = (data.made_of if data else None) if spec.model.startswith("local/") else spec.model
    base_line = f"base_model: {base}\n" if base else ""
    states = "with the model's final norm" if spec.norm == "final" else "raw, without the model's final norm"
    layer = _layer_label(spec) if spec.tower_layers else f"{spec.layer} of {spec.num_layers}"
    combined = f"{_mixture_label(spec)} of {spec.num_layers}" if spec.mixture else layer
    complete = f"the {spec.tower} tower of {spec.model}" if spec.tower else spec.model
    arguments = f'"{repository or _FOLDER}"' + (f', revision="{branch}"' if branch else "")
    arguments += ", trust_remote_code=True" if remote_code else ""
    for_mteb = "" if repository else _NAMED_FOR_MTEB.format(name=result_name(spec), revision=result_revision(spec))
    examples = "\n".join(_EXAMPLES[medium] for medium in media)
    rows = {
        "model": spec.model,
        "revision": spec.revision or "default",
        "layer": f"{combined} (0 = embeddings)",
        "norm": f"`{spec.norm}`: states {states}",
        "pooling": f"`{spec.pooling}`",
        "longest text": f"{spec.max_length} tokens" if spec.max_length else "the model's limit",
        "dtype": f"`{spec.dtype}`",
        "parameters": f"{parameters:,}",
        "attention": "bidirectional, without the causal mask" if spec.bidirectional else "as in the model",
        "adapters": ", ".join(spec.adapters) or "none",
        "chat template": "applied to every text" if spec.chat_template else "not used",
        **_recipe_rows(spec),
        "similarity": f"`{spec.similarity}`",
        "weights": f"`{spec.weights_digest}`" + (", trained further after the cut" if trained else ", as in the model"),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "---\n"
        f"{base_line}library_name: sentence-transformers\npipeline_tag: sentence-similarity\n"
        "tags: [sentence-transformers, sentence-similarity, feature-extraction, dense, intermediate-layer]\n"
        f"{_metadata_lines(data, repository) if data else ''}"
        "---\n\n"
        f"# Layer {_layer_label(spec)} of {spec.model}\n\n"
        f"{repository or 'This folder'} is {complete} without the blocks after layer {layer}, as plain "
        "sentence-transformers modules:\n\n"
        "```python\n"
        "from sentence_transformers import SentenceTransformer\n\n"
        f"model = SentenceTransformer({arguments})\n"
        f"{examples}\n"
        f"```\n{for_mteb}\n"
        f"| | |\n|---|---|\n{table}\n\n{_score_table(data) if data else ''}Cut with midlayer_encoders.\n"
    )


def _recipe_rows(spec: EncoderSpec) -> dict[str, str]:
    """Return the template and the modules after the pooling, if any."""
    template = json.loads(spec.prompting)["template"] if spec.prompting else None
    modules = [name for name, _ in json.loads(spec.modules or "[]")[2:] if name in ("Dense", "Normalize")]
    rows = {"template": f"`{template}`".replace("|", "\\|")} if template else {}
    return rows | ({"after the pooling": ", ".join(modules)} if modules else {})


def _metadata_lines(data: CardData, repository: str | None) -> str:
    """Return the optional lines of metadata: license, languages, scores."""
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
    """Return a table of the scores, times 100."""
    if not data.scores:
        return ""
    rows = "\n".join(f"| {score.dataset_name} | {score.metric_type} | {score.metric_value} |" for score in data.scores)
    return f"## Scores\nMain scores of this layer, times 100.\n\n| task | metric | score |\n|---|---|---|\n{rows}\n\n"


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

    def _spec(self) -> Any:
        return getattr(self.model, "spec", None)

    def _ignored(self, value: Any) -> None:
        """Ignore a value that the base class sets."""

    model_name = property(
        lambda self: result_name(spec) if (spec := self._spec()) is not None else None,
        _ignored,
        doc="The model's name and the layer.",
    )
    base_model_revision = property(
        lambda self: result_revision(spec) if (spec := self._spec()) is not None else None,
        _ignored,
        doc="Distinguishes encoders that differ in any option or weight.",
    )
    # The spec would read every weight.
    base_model = property(lambda self: getattr(self.model, "name", None), _ignored, doc="The model that was cut.")
