"""Digests and names of an encoder in results and on its model card, derived from its spec."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData

from midlayer_encoders._types import EncoderSpec, Precision, content_digest
from midlayer_encoders.encoder.description import Description, processors, vocabulary
from midlayer_encoders.encoder.digests import weights_digest
from midlayer_encoders.encoder.options import option_names
from midlayer_encoders.encoder.prompting import prompting_settings
from midlayer_encoders.reading.locks import turn

#: Generation of the package's own numerics: a change that alters the vectors of unchanged files raises it.
NUMERICS = 3
_MAX_NAME = 120  # characters; file systems allow 255 bytes, and mteb appends to names


def encoder_spec(encoder: Any) -> EncoderSpec:
    """Return everything that changes an encoder's vectors and scores."""
    modules: Any = [[type(module).__name__, getattr(module, "get_config_dict", dict)()] for module in encoder]
    prompts = sorted((name, text or "") for name, text in encoder.prompts.items())
    options = encoder.options
    return EncoderSpec(
        model=encoder.results_name,
        **options.spec_fields(),
        layer=encoder.layer,
        num_layers=encoder.num_layers,
        norm=encoder.norm,
        pooling=encoder.pooling,
        max_length=encoder.max_seq_length,
        dtype=str(encoder.dtype).removeprefix("torch."),
        prompts=(*prompts, ("", encoder.default_prompt_name or "")),
        adapters=tuple(base_name(adapter) for adapter in options.adapters),
        truncate_dim=encoder.truncate_dim,
        modules=json.dumps(modules, sort_keys=True, default=str),
        weights_digest=weights_digest(encoder),
        similarity=encoder.similarity_fn_name,
        prompting=prompting_settings(options),
        parts=part_digests(encoder),
    )


def mteb_encoder(encoder: Any) -> Any:
    """Return an encoder for mteb; see ``LayerEncoder.for_mteb``."""
    from mteb.models import SentenceTransformerEncoderWrapper

    wrapped = SentenceTransformerEncoderWrapper(encoder, target_sampling_rate=encoder.sampling_rate)
    sizes = [(weight.numel(), weight.element_size()) for weight in encoder.parameters()]
    update = {
        "modalities": encoder.media,
        "n_parameters": sum(count for count, _ in sizes),
        "memory_usage_mb": round(sum(count * size for count, size in sizes) / 2**20, 1),
    }
    wrapped.mteb_model_meta = wrapped.mteb_model_meta.model_copy(update=update)
    return wrapped


def part_digests(encoder: Any) -> tuple[tuple[str, str], ...]:
    """Return the name and digest of each part of an encoder that changes its vectors, besides options and weights.

    To add a part, add a line to ``parts``: a value that :class:`Description` describes.

    Args:
        encoder: its first module has ``model`` and ``processor``.
    """
    describe = Description(encoder)
    config: Any = getattr(encoder.transformer, "config", None)
    with turn(encoder.transformer):  # without the hooks of another thread's pass
        now = dict.fromkeys(encoder.loaded, "gone") | describe.parts()
    parts: dict[str, Any] = {
        "attention": getattr(config, "_attn_implementation", None),
        "tokenizer": [vocabulary(processor) for processor in processors(encoder)],
        "code": [describe.code(), describe.hooks(torch.nn.modules.module, "_global")],
        "memory": {path: part for path, part in now.items() if encoder.loaded.get(path) != part},
        "files": [encoder.files, *(getattr(encoder.options, name) for name in option_names("vectors"))],
        "numerics": NUMERICS,
    }
    return tuple((name, content_digest(json.dumps(describe(value), sort_keys=True))) for name, value in parts.items())


def base_name(model: str, file: str | None = None) -> str:
    """Return a model's name on the hub, or ``local/`` and the name of its folder or file.

    Example:
        >>> base_name("EleutherAI/pythia-410m"), base_name("/")
        ('EleutherAI/pythia-410m', 'local/model')
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    if file is not None:
        return f"local/{Path(file).stem}"
    return "local/" + (re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name) or "model")


def result_name(spec: EncoderSpec) -> str:
    """Return the model and layer as the name of results; the revision distinguishes all other options."""
    return f"{spec.model[:_MAX_NAME]}-layer-{spec.layer_label}"


def result_revision(spec: EncoderSpec) -> str:
    """Return the revision of results, which is readable and unique to the spec."""
    parts = [spec.revision or "default", spec.place_label, f"norm-{spec.norm}", spec.pooling]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))  # mteb loses results of names with a slash
    return f"{readable[:_MAX_NAME]}-{spec.digest}"


def mteb_line(spec: EncoderSpec, *, stock: bool = False) -> str:
    """Return the statement that names a folder's ``model`` for mteb, which reads the name from no file.

    Args:
        spec: of the encoder.
        stock: whether the folder contains the encoder's stock form, which gives other vectors.
    """
    revision = f"{result_revision(spec)}{'-stock' if stock else ''}"
    fields = "model.model_card_data.model_name, model.model_card_data.base_model_revision"
    return f"{fields} = {result_name(spec)!r}, {revision!r}"


def _from_spec(name: str, describe: Callable[[EncoderSpec], str], doc: str) -> Any:
    """Return a property that describes the spec of the current state of the encoder, unless it is set."""

    def read(data: CardData) -> str | None:
        spec = getattr(data.model, "spec", None)
        return vars(data).get(name) or (None if spec is None else describe(spec))

    def write(data: CardData, value: str | None) -> None:
        data.__dict__[name] = value

    return property(read, write, doc=doc)


class CardData(SentenceTransformerModelCardData):
    """Card data whose name and revision, under which mteb saves results, follow the current state of the encoder.

    Attributes:
        precision: with which its vectors are stored, for the code on the card: a folder does not quantize.
    """

    precision: Precision = "float32"

    model_name = _from_spec("_model_name", result_name, "The model's name and the layer.")
    base_model_revision = _from_spec(
        "_base_model_revision", result_revision, "Distinguishes encoders that differ in any option or weight."
    )
    # The spec would read every weight. The base class's guess is ignored.
    base_model = property(lambda self: getattr(self.model, "name", None), lambda _, __: None, doc="The cut model.")
