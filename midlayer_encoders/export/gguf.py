"""Export GGUF files for llama.cpp: cut an existing file, or write an encoder's weights."""

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np

from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.export import _comparison
from midlayer_encoders.export._comparison import ENGINE_POOLINGS, Exported
from midlayer_encoders.export._engines import engine_vectors
from midlayer_encoders.export._gguf_weights import gguf_writer, write_gguf
from midlayer_encoders.files import write_folder
from midlayer_encoders.models.hub import model_location

logger = logging.getLogger(__name__)

_FILE = "model.gguf"
_MIN_COSINE = 0.999  # llama.cpp multiplies 8-bit activations, the encoder float32
_MIN_COSINE_INT8 = 0.995  # SmolLM2-135M has 0.9997, and 0.974 with its next layer
_POOLING_NUMBERS = {name: number for number, name in enumerate(ENGINE_POOLINGS, start=1)}  # llama.cpp's enum
_CUT_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "bert")
# llama.cpp recognizes Gemma's 27B models by their depth and scales their attention differently.
_DEPTH_OF_27B = {"gemma2": 46, "gemma3": 62}
_BLOCK = re.compile(r"blk\.(\d+)\.")


def export_gguf(encoder: LayerEncoder, folder: Path, *, int8: bool = False) -> Exported:
    """Cut the GGUF file that an encoder was read from, or write the encoder's weights, and add a card.

    If ``xllamacpp`` is installed, the vectors of sample texts are compared.

    Args:
        encoder: an encoder read from a GGUF file, or of a Llama-type model.
        folder: output folder.
        int8: write weights in 8 bits instead of 16; not for an encoder that was read from a GGUF file.
    """
    _comparison.require_packages("gguf", "gguf")
    source = _source_file(encoder)
    if int8 and source is not None:
        raise OptionError("`int8` must be left out for an encoder read from a GGUF file, whose weights do not change.")
    obstacle = _obstacle(encoder, from_file=source is not None)
    if obstacle is not None:
        raise CutError(f"llama.cpp cannot run this encoder of {encoder.name}: {obstacle}.")
    min_cosine: float | None = None

    def write(staging: Path) -> None:
        nonlocal min_cosine
        staging.mkdir()
        path = staging / _FILE
        if source is None:
            write_gguf(encoder, path, pooling=_POOLING_NUMBERS[encoder.pooling], int8=int8)
        else:
            cut_gguf(source, path, encoder.layer, pooling=encoder.pooling)
        min_cosine = _compare(encoder, path, _MIN_COSINE_INT8 if int8 else _MIN_COSINE)
        packages = _comparison.versions("gguf", *(["xllamacpp"] if _has_llama() else []))
        _comparison.write_card(staging, encoder, "gguf", file=_FILE, cosine=min_cosine, versions=packages)

    files = write_folder(folder, write, last=(_comparison.CARD,))
    if min_cosine is None:
        return Exported("gguf", folder, files=files)
    engine = f"llama.cpp through xllamacpp {_comparison.versions('xllamacpp')['xllamacpp']}"
    return Exported("gguf", folder, engine, 1 - min_cosine, files=files)


def _has_llama() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def _source_file(encoder: LayerEncoder) -> Path | None:
    """Return the GGUF file that an encoder was read from, if any."""
    name = encoder.spec.gguf_file
    if name is None:
        return None
    folder, _ = model_location(encoder.source)
    if (Path(folder) / name).is_file():
        return Path(folder) / name
    from transformers.utils import cached_file

    options = encoder.options
    return Path(
        cached_file(folder, name, revision=options.revision, cache_dir=options.cache_folder, local_files_only=True)
    )


def _obstacle(encoder: LayerEncoder, *, from_file: bool) -> str | None:
    """Return why llama.cpp would produce other vectors, or None."""
    options = encoder.options
    if encoder.norm == "none":
        return "it always applies the final norm: pass norm='final'"
    if (obstacle := _comparison.common_obstacle(encoder)) is not None:
        return obstacle
    if options.template is not None or options.chat_template:
        return "the tokenizer contains a template, which GGUF cannot store: leave it out, and add it to texts yourself"
    if not encoder.counting.all:
        return "it pools all tokens: leave out `skip_first`, `skip_special` and `template_tokens`"
    if not set(encoder.after_pooling) <= {"Normalize"}:
        return "it has no modules after the pooling: leave out `center`"
    if from_file and (options.bidirectional or options.adapters):
        name = "bidirectional" if options.bidirectional else "adapters"
        return f"the file holds the model without `{name}`: leave it out"
    if from_file and "generated_from_trainer" in encoder.model_card_data.tags:
        return "the encoder was trained after loading, but the file was not: save it, and export that folder"
    return None


def cut_gguf(source: Path, path: Path, layer: int, *, pooling: str) -> None:
    """Write a GGUF file with the first blocks of another; the remaining weights are unchanged.

    Args:
        source: a GGUF file in one part.
        path: output file.
        layer: number of blocks, at least one.
        pooling: ``"mean"``, ``"cls"`` or ``"last"``.

    Raises:
        CutError: if a cut file of this architecture would run differently.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    arch = _value(reader, "general.architecture")
    depth = int(_value(reader, f"{arch}.block_count") or 0)
    _verify_file(reader, source, arch, depth)
    replaced = {f"{arch}.block_count": layer, f"{arch}.pooling_type": _POOLING_NUMBERS[pooling]}
    with gguf_writer(path, arch, endianess=reader.endianess) as writer:
        if (alignment := _value(reader, "general.alignment")) is not None:
            writer.add_custom_alignment(int(alignment))
        for name, number in replaced.items():
            writer.add_uint32(name, number)
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.alignment", *replaced):
                continue
            value = field.contents()
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            if is_array and name.startswith(f"{arch}.") and len(value) == depth:
                value = value[:layer]  # one value per block
            writer.add_key_value(name, value, field.types[0], sub_type=field.types[-1] if is_array else None)
        for tensor in reader.tensors:
            block = _BLOCK.match(tensor.name)
            if block is None or int(block[1]) < layer:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)


def _value(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _verify_file(reader: Any, source: Path, arch: str, depth: int) -> None:
    """Verify that a file runs the same after a cut."""
    reason = None
    if arch not in _CUT_ARCHITECTURES:
        reason = f"has the architecture {arch!r}. Supported architectures are {', '.join(_CUT_ARCHITECTURES)}"
    elif depth == _DEPTH_OF_27B.get(arch):
        reason = f"has {depth} blocks, by which llama.cpp recognizes the 27B model of {arch} and scales its attention"
    elif (_value(reader, "split.count") or 1) > 1:
        reason = "is one of several parts. Merge them first: llama-gguf-split --merge"
    if reason is not None:
        raise CutError(f"{source.name} cannot be cut: it {reason}.")


def _compare(encoder: LayerEncoder, path: Path, min_cosine: float) -> float | None:
    """Return the smallest cosine of llama.cpp's vectors with the encoder's, or None if llama.cpp is not installed."""
    if not _has_llama():
        logger.warning("The file was not run: llama.cpp is not installed (pip install 'midlayer-encoders[gguf]').")
        return None
    samples = _comparison.sample_inputs(encoder, "text")
    max_length = encoder.max_seq_length or 512  # llama.cpp rejects longer texts instead of truncating them
    token_ids = encoder.tokenizer([encoder.default_prompt + text for text in samples], verbose=False)["input_ids"]
    texts = [text for text, ids in zip(samples, token_ids, strict=True) if len(ids) <= max_length] or samples[:1]
    try:
        vectors = np.array(engine_vectors("llama", path, [encoder.default_prompt + text for text in texts]))
    except RuntimeError as reason:
        raise CutError(f"llama.cpp does not read the exported file ({reason}). Nothing was written.") from reason
    lowest = _comparison.cosine(encoder.encode(texts, show_progress_bar=False), vectors)
    if lowest < min_cosine:
        raise CutError(
            f"llama.cpp computes other vectors than the encoder (cosine {lowest:.4f}, below {min_cosine}), perhaps "
            "because it tokenizes differently. Nothing was written; use target='sentence-transformers'."
        )
    return lowest
