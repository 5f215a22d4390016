"""Finds the transformer inside a module that is being trained."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from midlayer_encoders.errors import AnatomyError

__all__ = ["accepted_inputs", "find_backbone", "has_backbone", "main_input", "model_name", "module_path"]


def find_backbone(root: nn.Module, path: str = "auto") -> nn.Module:
    """Return the transformer inside ``root``.

    Args:
        root: a LightningModule, a SentenceTransformer, or the model itself.
        path: of the transformer within ``root``; ``"auto"`` takes the one Hugging Face model there is.

    Raises:
        AnatomyError: none or several were found, with what was seen.
    """
    if path != "auto":
        try:
            return root.get_submodule(path)
        except AttributeError:
            raise AnatomyError(
                f"`module` must be the path of a module in {type(root).__name__}, but it has no {path!r}. "
                f"Its transformers are: {_listed(_candidates(root)) or 'none'}."
            ) from None
    found = _candidates(root)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise AnatomyError(
            f"{type(root).__name__} holds {len(found)} transformers: {_listed(found)}. "
            "Pass the path of one as `module`."
        )
    lists: dict[str, nn.Module] = {
        name: module for name, module in root.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    raise AnatomyError(
        f"{type(root).__name__} holds no Hugging Face model. Its lists of modules are: {_listed(lists) or 'none'}. "
        "Pass the path of the transformer as `module` and of its list of blocks, within it, as `blocks`."
    )


def has_backbone(root: nn.Module) -> bool:
    """Return whether ``root`` holds any Hugging Face model yet."""
    return bool(_candidates(root))


def _candidates(root: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost Hugging Face models by path; a compiled or wrapped one is found inside its wrapper."""
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found[name] = module
    return found


def _listed(modules: dict[str, nn.Module]) -> str:
    return ", ".join(f"{name!r} ({type(module).__name__})" for name, module in modules.items())


def accepted_inputs(model: nn.Module) -> set[str] | None:
    """Return the names that the model's forward takes; ``None`` where it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) and not _config(model):
        return None
    return {parameter.name for parameter in parameters}


def main_input(model: nn.Module) -> str:
    """Return the name of the model's first input, such as ``input_ids`` or ``pixel_values``."""
    first = next(iter(inspect.signature(model.forward).parameters), "input_ids")
    return str(getattr(model, "main_input_name", first))


def model_name(model: nn.Module) -> str:
    """Return what the frame calls the model: its name on the hub, or its class."""
    return str(getattr(_config(model), "name_or_path", "") or type(model).__name__)


def module_path(root: nn.Module, model: nn.Module) -> str:
    """Return the path of ``model`` in ``root``, the same whether or not something on the way is compiled."""
    path = next(name for name, module in root.named_modules() if module is model)
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)
