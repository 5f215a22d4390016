"""PEFT adapters merged into a model's weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from midlayer_encoders.errors import MidlayerError, ModelNotFoundError, OptionError
from midlayer_encoders.models.hub import local_only

__all__ = ["merge_adapters"]

_ROOT = "base_model.model."  # what PEFT writes before the names of a model's modules


def merge_adapters(model: nn.Module, adapters: Sequence[str]) -> nn.Module:
    """Return ``model`` with PEFT adapters merged into its weights, in order.

    An adapter of a language model with its head names the modules below a prefix (``model.layers…``), which the model
    without a head does not have: it is held at that prefix while the adapter is merged. What an adapter adds to a head,
    or to another tower, makes no state and is passed over.

    Raises:
        OptionError: where an adapter adds inputs instead of changing weights.
        ModelNotFoundError: where a weight of an adapter has no place in the model, or one that it needs is missing;
            PEFT itself would pass over the one, and leave the other to chance.
    """
    try:
        import peft
    except ImportError as reason:
        raise MidlayerError("`adapters` need the peft package: pip install 'midlayer-encoders[adapters]'.") from reason
    for adapter in adapters:
        local_only(adapter, filename="adapter_config.json")
        config = peft.PeftConfig.from_pretrained(adapter)
        if config.is_prompt_learning:
            raise OptionError(
                f"`adapters` must change weights, but {adapter!r} is of the kind {config.peft_type.value}, which adds "
                "tokens to every input. Merge it by other means, or leave it out."
            )
        names = [name.removeprefix(_ROOT) for name in peft.load_peft_weights(adapter, device="cpu")]
        prefix = _prefix(names, model)
        try:
            wrapped = peft.PeftModel(_below(model, prefix), config)
            told = wrapped.load_adapter(adapter, "default")
        except (ValueError, RuntimeError, KeyError) as reason:
            raise ModelNotFoundError(
                f"The adapter {adapter!r} does not fit {type(model).__name__}: {' '.join(str(reason).split())[:400]}"
            ) from reason
        own = f"{_ROOT}{prefix}." if prefix else _ROOT
        astray = [key for key in told.unexpected_keys if key.startswith(own)]
        if astray or told.missing_keys:
            raise ModelNotFoundError(
                f"The adapter {adapter!r} is not of {type(model).__name__}: "
                + (f"{len(astray)} of its weights have no place there" if astray else "it lacks weights of its own")
                + f", as {(astray or told.missing_keys)[0]!r}. It was made for another model."
            )
        wrapped.merge_and_unload()
    return model


def _prefix(names: Iterable[str], model: nn.Module) -> str:
    """Return the path at which an adapter expects a model: most of the modules that it names are there then."""
    known = {path for path, _ in model.named_modules() if path}
    found: dict[str, int] = {"": 0}
    for name in names:
        steps = name.split(".")
        for start in range(len(steps)):
            rest = steps[start:]
            if any(".".join(rest[:end]) in known for end in range(2, len(rest))):
                prefix = ".".join(steps[:start])
                found[prefix] = found.get(prefix, 0) + 1
                break
    return max(found, key=lambda prefix: found[prefix])


def _below(model: nn.Module, prefix: str) -> nn.Module:
    """Return a module that holds ``model`` at a path."""
    config: Any = getattr(model, "config", None)
    for name in reversed(prefix.split(".") if prefix else []):
        above = nn.Module()
        above.add_module(name, model)
        above.config = config
        model = above
    return model
