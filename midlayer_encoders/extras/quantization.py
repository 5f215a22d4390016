"""Weights that bitsandbytes quantizes while a model is loaded."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from midlayer_encoders._types import Quantization
from midlayer_encoders.errors import OptionError

_CURE = "pip install 'midlayer-encoders[quantization]', or leave it out."


def quantized_options(quantization: Quantization, options: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return options of ``from_pretrained`` that load a model with quantized linear layers.

    Args:
        quantization: ``"4bit"`` (NF4) or ``"8bit"``.
        options: other options, with ``dtype`` and ``device_map``.
        config: config of the model, whose dtype the computations have unless ``options`` name another.

    Raises:
        OptionError: if bitsandbytes is missing or does not support the device, or if the files are quantized already.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise OptionError("`quantization` must be None for a model whose files are quantized already.")
    try:
        import accelerate  # noqa: F401
        import bitsandbytes
    except ImportError as reason:
        raise OptionError(f"`quantization` needs {reason.name}, which is not installed: {_CURE}") from reason
    from transformers import BitsAndBytesConfig

    device = str(options["device_map"]).partition(":")[0]
    supported = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if device in ("cpu", "mps", "xpu") and device not in supported:
        raise OptionError(
            f"`quantization` must be None on {device!r}, which bitsandbytes {bitsandbytes.__version__} does not "
            f"support ({', '.join(sorted(supported))}). Pass another `device`, or {_CURE}"
        )
    if quantization == "8bit":  # it logs each product whose inputs are not float16
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        settings: dict[str, Any] = {"load_in_8bit": True}
    else:
        dtype = options["dtype"] if isinstance(options["dtype"], torch.dtype) else getattr(config, "dtype", None)
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(**settings)}


def is_quantized(model: Any) -> bool:
    """Return whether the weights of a model are quantized."""
    return getattr(model, "hf_quantizer", None) is not None
