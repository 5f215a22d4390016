"""A GGUF file for llama.cpp and what is built on it: another one cut, its weights untouched, or a model's weights."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.export._comparison import (
    Exported,
    cosine,
    needed,
    sample_inputs,
    seeing_a_full_disk,
    versions,
    write_card,
)
from midlayer_encoders.export._gguf_weights import write_gguf
from midlayer_encoders.export._llama import llama_vectors
from midlayer_encoders.files import write_folder
from midlayer_encoders.models.hub import place_of

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["cut_gguf", "export_gguf"]

logger = logging.getLogger(__name__)

FILE = "model.gguf"
_LEAST = 0.999  # cosine: llama.cpp rounds what goes into a product to 8 bits, the encoder reads float32
_LEAST_INT8 = 0.995  # of weights that were rounded too: SmolLM2-135M has 0.9997, and 0.974 with its next layer
_POOLINGS = {"mean": 1, "cls": 2, "last": 3}  # llama.cpp's own numbers
# Whose blocks llama.cpp runs alike however many there are, with what it takes from their number otherwise: it tells
# the 27B models of Gemma by their depth, and scales their attention in another way.
_KNOWN: dict[str, int | None] = {
    "llama": None, "qwen2": None, "qwen3": None, "gemma": None, "gemma2": 46, "gemma3": 62, "bert": None,
}  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d+)\.")


def export_gguf(encoder: LayerEncoder, home: Path, *, int8: bool = False) -> Exported:
    """Write the GGUF file that an encoder was read from without the blocks after its layer, or its weights, and a card.

    llama.cpp is asked for vectors of sample texts where ``xllamacpp`` is installed; it scales them to length 1.

    Args:
        encoder: read from a GGUF file, or of a model like Llama.
        home: folder to write.
        int8: whether weights are written in 8 bits instead of 16; those of a GGUF file stay as they are.
    """
    needed("gguf", "gguf")
    source = _source(encoder)
    if int8 and source is not None:
        raise OptionError("`int8` must be left out for an encoder of a GGUF file, whose weights stay as they are.")
    _refuse(encoder, from_file=source is not None)
    low: float | None = None

    def write(aside: Path) -> None:
        nonlocal low
        aside.mkdir()
        with seeing_a_full_disk(aside):
            if source is None:
                write_gguf(encoder, aside / FILE, pooling=_POOLINGS[encoder.pooling], int8=int8)
            else:
                cut_gguf(source, aside / FILE, encoder.layer, pooling=encoder.pooling)
        low = _compare(encoder, aside / FILE, _LEAST_INT8 if int8 else _LEAST)
        write_card(aside, encoder, "gguf", file=FILE, cosine=low, versions=_versions())

    files = write_folder(home, write, last=("midlayer.json",))
    engine = None if low is None else f"llama.cpp through xllamacpp {versions('xllamacpp')['xllamacpp']}"
    return Exported("gguf", home, engine, None if low is None else 1 - low, files=files)


def _versions() -> dict[str, str]:
    return versions("gguf", *(["xllamacpp"] if importlib.util.find_spec("xllamacpp") else []))


def _source(encoder: LayerEncoder) -> Path | None:
    """Return the GGUF file that an encoder was read from, ``None`` where it was read from others."""
    name = encoder.spec.gguf_file
    if name is None:
        return None
    folder, _ = place_of(encoder.source)
    if (Path(folder) / name).is_file():
        return Path(folder) / name
    from transformers.utils import cached_file

    found = cached_file(folder, name, revision=encoder.options.revision, local_files_only=True)
    return Path(found)


def _refuse(encoder: LayerEncoder, *, from_file: bool) -> None:
    """Raise where llama.cpp would make other vectors of a file."""
    options, why = encoder.options, None
    if encoder.norm == "none":
        why = "llama.cpp always applies the final norm: pass norm='final'"
    elif encoder.mixture:
        why = "llama.cpp returns the vector of one layer: name one"
    elif encoder.layer == 0:
        why = "llama.cpp reads no model without blocks: take layer 1 or a later one"
    elif encoder.pooling not in _POOLINGS:
        why = f"llama.cpp has no pooling {encoder.pooling!r}: pass one of {', '.join(map(repr, _POOLINGS))}"
    elif options.template is not None or options.chat_template:
        why = "a template stands in the tokenizer, and a GGUF file has no place for it: put it around texts yourself"
    elif not encoder.counting.all:
        why = "llama.cpp pools every token: leave out `skip_first` and `template_tokens`"
    elif [name for name in encoder.after_pooling if name != "Normalize"]:
        why = "llama.cpp has nothing after the pooling: leave out `center`, `whiten` and `embed_filter`"
    elif encoder.truncate_dim is not None:
        why = "llama.cpp returns every dimension: leave out `truncate_dim`, and truncate vectors yourself"
    elif encoder.media != ["text"]:
        why = "llama.cpp embeds texts alone"
    elif from_file and (options.bidirectional or options.adapters):
        name = "bidirectional" if options.bidirectional else "adapters"
        why = f"the file is of the model without `{name}`: leave it out"
    elif from_file and "generated_from_trainer" in encoder.model_card_data.tags:
        why = "the encoder was trained after it was read, and the file was not: save it, and export that folder"
    if why is not None:
        raise CutError(f"{encoder.name} as this encoder reads it cannot be a GGUF file: {why}.")


def cut_gguf(source: Path, path: Path, layer: int, *, pooling: str) -> None:
    """Write a GGUF file with the first blocks of another; what stands outside of blocks, and every weight, is the same.

    Args:
        source: a GGUF file of one part.
        path: where to write.
        layer: blocks to keep, at least one.
        pooling: ``"mean"``, ``"cls"`` or ``"last"``.

    Raises:
        CutError: an architecture that is not known to run alike when it is cut.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    arch = _value(reader, "general.architecture")
    depth = int(_value(reader, f"{arch}.block_count") or 0)
    _check_file(reader, source, arch, depth)
    writer = gguf.GGUFWriter(path, arch, endianess=reader.endianess)
    try:
        if (alignment := _value(reader, "general.alignment")) is not None:
            writer.add_custom_alignment(int(alignment))
        ours = {f"{arch}.block_count": layer, f"{arch}.pooling_type": _POOLINGS[pooling]}
        for name, number in ours.items():
            writer.add_uint32(name, number)
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.alignment", *ours):
                continue
            value, kind = field.contents(), field.types[0]
            several = kind == gguf.GGUFValueType.ARRAY
            if several and name.startswith(f"{arch}.") and len(value) == depth:
                value = value[:layer]  # a value for each block
            writer.add_key_value(name, value, kind, sub_type=field.types[-1] if several else None)
        for tensor in reader.tensors:
            block = _BLOCK.match(tensor.name)
            if block is None or int(block[1]) < layer:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _value(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _check_file(reader: Any, source: Path, arch: str | None, depth: int) -> None:
    """Raise unless a file is of an architecture that runs alike when it is cut."""
    if arch not in _KNOWN:
        raise CutError(
            f"{source.name} has the architecture {arch!r}, and which of its parts depend on the depth is not known "
            f"here. Those that can be cut are {', '.join(_KNOWN)}."
        )
    if depth == _KNOWN[arch]:
        raise CutError(
            f"{source.name} has {depth} blocks, by which llama.cpp tells the 27B model of {arch} and scales its "
            "attention: cut, it would be scaled otherwise."
        )
    if (_value(reader, "split.count") or 1) > 1:
        raise CutError(f"{source.name} is one of several parts. Join them first: llama-gguf-split --merge.")


def _length(encoder: LayerEncoder, text: str) -> int:
    return len(encoder.tokenizer(encoder.default_prompt + text, verbose=False)["input_ids"])


def _compare(encoder: LayerEncoder, path: Path, least: float) -> float | None:
    """Return the smallest cosine of llama.cpp's vectors with the encoder's; ``None`` where it is not installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        logger.warning("The file was not run: llama.cpp is not installed (pip install 'midlayer-encoders[gguf]').")
        return None
    # llama.cpp refuses a text that is too long, and truncates none.
    texts, most = sample_inputs(encoder, "text"), encoder.max_seq_length or 512
    texts = [text for text in texts if _length(encoder, text) <= most] or texts[:1]
    theirs = llama_vectors(path, [encoder.default_prompt + text for text in texts])
    low = cosine(encoder.encode(texts, show_progress_bar=False), theirs)
    if low < least:
        raise CutError(
            f"llama.cpp makes other vectors of the file than the encoder: a cosine of {low:.4f}, less than {least}. "
            "It may read the tokenizer otherwise. Nothing was written; use target='sentence-transformers'."
        )
    return low
