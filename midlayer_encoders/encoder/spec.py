"""Digests and names of an encoder in results and on its model card, derived from its spec."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from midlayer_encoders._types import EncoderSpec, Precision, content_digest

#: Generation of the package's own numerics: a change that alters the vectors of unchanged files raises it.
NUMERICS = 2
_CHUNK = 1 << 20
_MAX_NAME = 120  # characters; file systems allow 255 bytes, and mteb appends to names
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SETTINGS = (bool, int, float, str, FunctionType, BuiltinFunctionType)
_TOKENIZER_SETTINGS = (
    "model_max_length", "truncation_side", "padding_side", "special_tokens_map", "model_input_names", "chat_template",
)  # fmt: skip
# Settings that differ between copies of a model, only act in training or in a head, or are elsewhere in the spec.
_WITHOUT_EFFECT = {
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "training",
    "processor_class", "is_local", "local_files_only", "vocab_file", "tokenizer_file", "merges_file", "use_cache",
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "initializer_range",
}  # fmt: skip


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


# --- everything else that changes a vector ----------------------------------------------------------------------------


def part_digests(first: Any) -> tuple[tuple[str, str], ...]:
    """Return the name and digest of each part of an encoder that changes its vectors, besides options and weights.

    To add a part, add a line to ``parts``: a value of dictionaries, lists and scalars. Modules after the first one need
    no part: the spec has their ``get_config_dict`` in ``modules`` and their tensors in ``weights_digest``.

    Args:
        first: the first module, with ``model`` and ``processor``.
    """
    model = first.model
    classes = sorted({type(module) for module in model.modules()}, key=str)
    sources = [source for source in map(_source, classes) if source is not None]
    parts: dict[str, Any] = {
        "config": _changed_settings(model.config) if hasattr(model, "config") else None,
        "processor": _processor_state(first.processor),
        "code": sources,
        "numerics": NUMERICS,
    }
    return tuple((name, _digest(value)) for name, value in parts.items())


def structure_digest(module: nn.Module) -> str:
    """Return a digest of the classes of a module in memory and of their settings, which no config describes."""
    settings = [
        [path, {name: value for name, value in vars(part).items() if isinstance(value, _SETTINGS)}]
        for path, part in module.named_modules()
    ]
    return _digest([str(module), settings])


def _digest(value: Any) -> str:
    return content_digest(json.dumps(_plain(value), sort_keys=True))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, without names of places and releases, and equal in every process."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items() if name not in _WITHOUT_EFFECT}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, np.ndarray | Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else _ADDRESS.sub("", str(value))


def _changed_settings(config: Any) -> Any:
    """Return the settings that differ from the defaults of the config's class.

    The complete dictionary gains fields with new releases of transformers, which change no vector.
    """
    try:
        defaults = type(config)().to_dict()
    except Exception:  # a class in a model's own code may need arguments
        defaults = {}
    attention = getattr(config, "_attn_implementation", None)
    return [type(config).__qualname__, attention, _difference(config.to_dict(), defaults)]


def _difference(settings: Any, defaults: Any) -> Any:
    if not isinstance(settings, dict) or not isinstance(defaults, dict):
        return settings
    changed = [name for name in settings if name not in defaults or settings[name] != defaults[name]]
    return {name: _difference(settings[name], defaults.get(name)) for name in changed}


def _processor_state(processor: Any) -> Any:
    """Return the state of a tokenizer, an image or audio processor, a processor that holds several, or a function."""
    if isinstance(processor, PreTrainedTokenizerBase):
        return [{name: getattr(processor, name, None) for name in _TOKENIZER_SETTINGS}, _vocabulary(processor)]
    kind = type(processor).__qualname__
    if isinstance(processor, ProcessorMixin):
        components = {name: _processor_state(getattr(processor, name)) for name in processor.get_attributes()}
        return [kind, processor.to_dict(), processor.chat_template, components]
    if hasattr(processor, "to_dict"):
        return [kind, processor.to_dict()]
    cells = getattr(processor, "__closure__", None) or ()
    function = processor if hasattr(processor, "__qualname__") else type(processor)
    return [processor, _source(function), [cell.cell_contents for cell in cells]]


def _vocabulary(tokenizer: Any) -> Any:
    """Return the vocabulary and all steps from a text to its tokens."""
    if hasattr(tokenizer, "backend_tokenizer"):
        state = tokenizer.backend_tokenizer.to_str()
        return content_digest(state[state.index('"added_tokens":') :], 16)  # after the padding of the last call
    with TemporaryDirectory() as folder:
        files = sorted(map(Path, tokenizer.save_vocabulary(folder, filename_prefix=None)))
        contents = [content_digest(path.read_bytes(), 16) for path in files]
    return [type(tokenizer).__qualname__, contents, str(tokenizer.added_tokens_decoder), tokenizer.init_kwargs]


def _source(code: Any) -> Any:
    """Return the source of a class or function, or ``None`` if it is in an installed package.

    All files of a model's own code count, because they can import each other.
    """
    module = sys.modules.get(code.__module__)
    file = getattr(module, "__file__", None)
    package = code.__module__.partition(".")[0]
    if package == "transformers_modules":
        return [path.read_text() for path in sorted(Path(str(file)).parent.glob("*.py"))]
    if package in ("builtins", "midlayer_encoders") or "site-packages" in str(file):
        return None
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # typed at a prompt
        body = getattr(code, "forward", code).__code__
        return [body.co_code.hex(), str(body.co_names), str(body.co_consts)]


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
    """Return the layer, or those of the towers (``text-6-image-9``)."""
    return "-".join(f"{name}-{layer}" for name, layer in spec.tower_layers) or str(spec.layer)


def result_revision(spec: EncoderSpec) -> str:
    """Return the revision of results, which is readable and unique to the spec."""
    layer = f"layer-{layer_label(spec)}" + ("" if spec.tower_layers else f"-of-{spec.num_layers}")
    tower = [spec.tower] if spec.tower else []
    parts = [spec.revision or "default", *tower, layer, f"norm-{spec.norm}", spec.pooling]
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
