"""``export_for``: one function for every target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from midlayer_encoders.errors import OptionError
from midlayer_encoders.export._comparison import Exported
from midlayer_encoders.export.gguf import export_gguf
from midlayer_encoders.export.onnx import export_onnx
from midlayer_encoders.export.openvino import export_openvino
from midlayer_encoders.export.serving import export_served
from midlayer_encoders.validation import check_choice, check_effect, check_flag, check_path

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["TARGETS", "Exported", "Target", "check_out", "export_for"]

Target: TypeAlias = Literal["sentence-transformers", "vllm", "tei", "onnx", "openvino", "gguf"]
TARGETS: tuple[Target, ...] = get_args(Target)
"""What an encoder can be written for."""


def export_for(
    encoder: LayerEncoder,
    target: Target,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    int8: bool = False,
    optimize: bool = False,
) -> Exported:
    """Write an encoder for an engine, compare what the engine makes of it with the encoder, and return both.

    The folder is written beside its place and renamed once it is whole and compared: an error leaves nothing there.

    Args:
        encoder: what to write.
        target: ``"sentence-transformers"`` (as ``save_pretrained``), ``"vllm"`` or ``"tei"`` (the same folder, without
            what vLLM or text-embeddings-inference would drop or read otherwise), ``"onnx"`` or ``"openvino"`` (a graph
            from tokens, or pixels, to vectors), or ``"gguf"`` (for llama.cpp: the GGUF file that the encoder was read
            from, cut, or its weights of a Llama-type model in 16 bits).
        folder: where to write; new or empty.
        overwrite: write into a folder that is not empty.
        int8: with ``"onnx"``, write a second graph whose weights are 8-bit integers; with ``"gguf"``, write weights
            in 8 bits (Q8_0) instead of 16.
        optimize: with ``"onnx"``, write another graph as onnxruntime makes it when it loads the first.

    Raises:
        CutError: the engine cannot express this encoder, or gives other vectors.
        MidlayerError: a package is missing; the message says how to install it.
    """
    check_choice("target", target, TARGETS)
    check_path("folder", folder)
    home = Path(folder)
    check_out(home, check_flag("overwrite", overwrite))
    check_flag("int8", int8)
    check_flag("optimize", optimize)
    if target == "onnx":
        return export_onnx(encoder, home, int8=int8, optimize=optimize)
    check_effect(export_for, f"with target={target!r}: it is about 'onnx'", optimize=optimize)
    if target == "gguf":
        return export_gguf(encoder, home, int8=int8)
    check_effect(export_for, f"with target={target!r}: it is about 'onnx' and 'gguf'", int8=int8)
    if target == "openvino":
        return export_openvino(encoder, home)
    if target in ("vllm", "tei"):
        return export_served(encoder, home, target)
    return Exported("sentence-transformers", home, files=encoder.save_files(str(home)))


def check_out(folder: Path, overwrite: bool, argument: str = "folder", cure: str = "overwrite=True") -> None:
    """Raise where a folder holds something already, unless it may be written into."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not overwrite):
        raise OptionError(
            f"`{argument}` must be a new or empty folder, but {folder} is not. Name another, or pass {cure}."
        )
