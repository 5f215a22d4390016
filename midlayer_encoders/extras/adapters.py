"""PEFT adapters, merged into the weights of a model before its cut."""

from collections.abc import Sequence

from torch import nn

from midlayer_encoders.errors import MidlayerError, ModelNotFoundError, OptionError
from midlayer_encoders.models.anatomy import prefix_counts
from midlayer_encoders.models.hub import local_only

_ROOT = "base_model.model."  # PEFT's prefix for the names of a model's modules


def merge_adapters(model: nn.Module, adapters: Sequence[str]) -> nn.Module:
    """Return ``model`` with PEFT adapters merged into its weights, in order.

    An adapter for a model with a head names modules below a prefix (``model.layers…``) that the model without a head
    lacks; a temporary wrapper holds the model at that prefix. Adapter weights of a head or another part are ignored.

    Raises:
        OptionError: if an adapter adds inputs instead of changing weights.
        ModelNotFoundError: if a weight of an adapter has no place in the model, or the adapter lacks one. PEFT itself
            would ignore the former and initialize the latter at random.
    """
    try:
        import peft
    except ImportError as reason:
        raise MidlayerError("`adapters` need the peft package: pip install 'midlayer-encoders[adapters]'.") from reason
    name = type(model).__name__
    modules = tuple(f"{path}." for path, _ in model.named_modules() if "." in path)
    for adapter in adapters:
        local_only(adapter, filename="adapter_config.json")
        config = peft.PeftConfig.from_pretrained(adapter)
        if config.is_prompt_learning:
            raise OptionError(
                f"`adapters` must change weights, but {adapter!r} is a {config.peft_type.value} adapter, which adds "
                "tokens to each input. Remove it."
            )
        keys = [key.removeprefix(_ROOT) for key in peft.load_peft_weights(adapter, device="cpu")]
        counts = prefix_counts(keys, lambda rest: rest.startswith(modules))
        prefix = max(counts, key=counts.__getitem__, default="")
        try:
            wrapped = peft.PeftModel(_wrapped_at(model, prefix), config)
            report = wrapped.load_adapter(adapter, "default")
        except (ValueError, RuntimeError, KeyError) as reason:
            cause = " ".join(str(reason).split())[:400]
            raise ModelNotFoundError(f"The adapter {adapter!r} does not fit {name}: {cause}") from reason
        model_keys = f"{_ROOT}{prefix}." if prefix else _ROOT
        unexpected = [key for key in report.unexpected_keys if key.startswith(model_keys)]
        if unexpected or report.missing_keys:
            problem = f"{len(unexpected)} of its weights have no place there" if unexpected else "it lacks weights"
            key = (unexpected or report.missing_keys)[0]
            raise ModelNotFoundError(f"The adapter {adapter!r} is not of {name}: {problem}, such as {key!r}.")
        wrapped.merge_and_unload()
    return model


def _wrapped_at(model: nn.Module, prefix: str) -> nn.Module:
    """Return a module that holds ``model`` at a path."""
    config = getattr(model, "config", None)
    for name in reversed(prefix.split(".") if prefix else []):
        parent = nn.Module()
        parent.add_module(name, model)
        parent.config = config  # type: ignore[assignment]
        model = parent
    return model
