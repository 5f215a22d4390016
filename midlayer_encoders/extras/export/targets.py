"""``export_for``: export an encoder for any target."""

import os
from pathlib import Path

from midlayer_encoders.encoder.saving import save_files
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import CutError
from midlayer_encoders.extras.export._comparison import Exported
from midlayer_encoders.extras.export.graphs import export_onnx
from midlayer_encoders.extras.export.llama_cpp import export_gguf
from midlayer_encoders.extras.export.serving import export_vllm
from midlayer_encoders.extras.quantization import is_quantized
from midlayer_encoders.extras.settings import Target, check_arguments
from midlayer_encoders.validation import check_path


def export_for(
    encoder: LayerEncoder,
    target: Target,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    int8: bool = False,
    stock: bool = False,
) -> Exported:
    """Export an encoder for an engine, and compare the engine's vectors with the encoder's.

    The folder is written to a temporary path and renamed after the comparison, so an error leaves nothing behind.

    Args:
        encoder: the encoder.
        target: ``"sentence-transformers"`` (as ``save_pretrained``), ``"vllm"`` (a folder that vLLM loads),
            ``"onnx"`` (a graph from tokens or pixels to vectors),
            or ``"gguf"`` (for llama.cpp: the encoder's GGUF file after a cut, or the weights of a Llama-type model).
        folder: output folder, new or empty.
        overwrite: write into a folder that is not empty.
        int8: with ``"onnx"``, also write a graph with 8-bit weights; with ``"gguf"``, write weights in 8 bits (Q8_0)
            instead of 16.
        stock: with ``"sentence-transformers"`` and the recipe ``word-echo``, write the nearest encoder whose folder
            contains no code.

    Raises:
        CutError: if the engine cannot run this encoder or computes other vectors.
        MidlayerError: if a package is missing; the message contains the install command.
    """
    check_path("folder", folder)
    path = Path(folder)
    check_arguments(target, path, overwrite=overwrite, int8=int8, stock=stock)
    if target != "sentence-transformers" and is_quantized(encoder.transformer):
        raise CutError(
            f"The target {target!r} needs the weights of {encoder.name} as they are in its files, but bitsandbytes "
            "quantized them. Create the encoder without `quantization`; int8=True quantizes 'onnx' and 'gguf'."
        )
    if target == "onnx":
        return export_onnx(encoder, path, int8=int8)
    if target == "gguf":
        return export_gguf(encoder, path, int8=int8)
    if target == "vllm":
        return export_vllm(encoder, path)
    return Exported(target, path, files=save_files(encoder, str(path), stock))
