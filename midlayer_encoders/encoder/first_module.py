"""The first module of an encoder, which prepares inputs and returns the states of a layer.

It is sentence-transformers' module around a cut model, :class:`UncutTransformer` if a cut would change the states, or
:class:`MemoryModule` for a model in memory.
"""

import copy
import itertools
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import Tensor, nn

from midlayer_encoders._types import Norm
from midlayer_encoders.encoder.inputs import WITH_MASK
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.probes import probe_features, token_states
from midlayer_encoders.encoder.saved_folder import SavedFolder
from midlayer_encoders.encoder.sentence_transformers_internals import tokenizer_alone, transformer_around
from midlayer_encoders.errors import MidlayerError, ModelNotFoundError, OptionError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy, most_tokens, suffers_from_padding
from midlayer_encoders.models.cut import Cut
from midlayer_encoders.models.hub import access_options
from midlayer_encoders.models.load import ModelFiles
from midlayer_encoders.reading.capture import bypass_blocks, first_tensor, input_states, watch_layers
from midlayer_encoders.validation import check_count

# The medium of a model by the first argument of its forward pass; its processor may support others, too.
_MEDIA = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}
# Text models that need texts padded to the maximum length: SigLIP pools the last position, and AIMv2's attention is
# causal only on padded batches (transformers 5.17 to 5.22).
_PADDED_ALWAYS = {"siglip", "siglip2", "aimv2", "aimv2_text_model"}
_EMPTY_TOKENS = 2  # tokens beside the special ones in a tokenizer without a vocabulary
_PADDING_ROWS = 1024  # embeddings without a token, which make their number a multiple of a power of two


# --- a model from files ----------------------------------------------------------------------------------------------


def transformer_module(
    files: ModelFiles, loaded: Any, cut: Cut, options: EncoderOptions, saved: SavedFolder
) -> Transformer:
    """Return the module that prepares inputs and returns the layer's states, or the vectors of the model's heads."""
    config, model = loaded.config, files.tokenizer
    source = {name: files.options[name] for name in ("revision", "trust_remote_code")}
    try:
        processor_options = saved.keywords("processor_kwargs") | access_options()
        processor_options |= _processor_options(model, loaded, source, options.max_length)
        processor_options |= options.processor_kwargs or {}
        if cut.heads:
            processor_options.pop("model_input_names", None)  # the processor decides about the mask
        with tokenizer_alone(model, processor_options) if cut.language else nullcontext(model) as folder:
            module = transformer_around(loaded, folder, processor_options, saved.transformer_settings)
    except (MidlayerError, ImportError):
        raise
    except Exception as reason:  # transformers passes on the errors of its parsers
        raise ModelNotFoundError(
            f"`model` must hold a tokenizer or processor that transformers can read, but {model!r} does not "
            f"({type(reason).__name__}: {reason}). Save the files again with `save_pretrained`, or download them again."
        ) from reason
    if config.model_type == internals.TIMM and not hasattr(config, "num_features"):
        config.num_features = loaded.timm_model.num_features  # only timm's files have it
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0  # a masked autoencoder reads every patch
    if not cut.heads:
        _read_states(module, cut, model, options.chat_template)
    if config.model_type in _PADDED_ALWAYS:
        length = getattr(config, "text_config", config).max_position_embeddings
        module.processing_kwargs = {"text": {"padding": "max_length", "max_length": length, "truncation": True}}
    module.input_formatter.supported_modalities = list(module.modality_config)
    if "audio" in module.modality_config and not suffers_from_padding(loaded):
        module.processing_kwargs = copy.deepcopy(WITH_MASK)
    if module.tokenizer is not None:
        _check_vocabulary(module.tokenizer, loaded, model)
        _make_padding_safe(module.tokenizer, model, None if reads_padding(loaded) else "right")
        limits = (module.tokenizer.model_max_length, most_tokens(loaded))
        module.tokenizer.model_max_length = min(filter(None, limits))
    return module  # type: ignore[no-any-return]


def reads_padding(model: Any) -> bool:
    """Return whether a model pools the last position, padding or not, so that texts keep their tokenizer's side."""
    return getattr(getattr(model, "config", None), "model_type", "") in ("siglip", "siglip2")


def _processor_options(model: str, loaded: Any, source: Mapping[str, Any], max_length: int | None) -> dict[str, Any]:
    config = loaded.config
    options = {key: value for key, value in source.items() if value is not None}
    medium = _MEDIA.get(str(loaded.main_input_name))
    if medium == "audio":
        # Many audio models have no tokenizer, and transformers requires one unless the config names a processor class.
        from transformers import AutoFeatureExtractor

        extractor = AutoFeatureExtractor.from_pretrained(model, **access_options(), **options)
        config.processor_class = type(extractor).__name__
        options["config"] = config
    elif medium is None and getattr(config, "model_type", "") != "imagegpt":
        if not hasattr(config, "type_vocab_size"):  # GPT-2 would embed the token types
            options["model_input_names"] = ["input_ids", "attention_mask"]
        if max_length is not None:
            options["model_max_length"] = check_length("max_length", max_length, loaded, model)
    return options


def _read_states(module: Any, cut: Cut, model: str, chat_template: bool) -> None:
    """Make the module return the layer's states for the medium of its model."""
    output = cut.output or "last_hidden_state"
    entry = {"method": "forward", "method_output_name": output if isinstance(output, str) else list(output)}
    modalities = [key for key in module.modality_config if chat_template or key != "message"]
    if chat_template and "message" not in modalities:
        raise OptionError(f"`chat_template` must be False for {model}: its tokenizer has no chat template.")
    medium = _MEDIA.get(str(module.model.main_input_name), "text")
    if medium in modalities and not chat_template:
        modalities = [medium]
    module.modality_config = {key: {**module.modality_config[key], **entry} for key in modalities}
    module.module_output_name = "token_embeddings"


def _check_vocabulary(tokenizer: Any, loaded: Any, model: str) -> None:
    """Raise if a tokenizer lacks the vocabulary of its model: without one, transformers makes an almost empty one."""
    size = len(tokenizer)
    table = internals.input_embeddings(getattr(loaded, "text_model", loaded))
    rows = getattr(table, "num_embeddings", None) or size
    only_special = size <= len(set(tokenizer.all_special_ids)) + (0 if size == rows else _EMPTY_TOKENS)
    if only_special or rows - size > max(size, _PADDING_ROWS):
        raise ModelNotFoundError(
            f"`model` must hold the vocabulary of its tokenizer, but {model!r} does not: its tokenizer has {size} "
            f"tokens and the model {rows:,} embeddings. Save the tokenizer there with `save_pretrained`."
        )


def _make_padding_safe(tokenizer: Any, model: str, side: str | None) -> None:
    """Pad with an existing token, which is masked, on a side; the right one leaves positions unchanged."""
    tokenizer.padding_side = side or tokenizer.padding_side
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    if tokenizer.pad_token is None:
        raise OptionError(f"The tokenizer of {model} has no pad token. Set `tokenizer.pad_token`, and save it again.")


def check_length(argument: str, length: object, model: nn.Module, name: str) -> int:
    """Return a number of tokens, or raise if the model has fewer positions."""
    number = check_count(argument, length, "tokens")
    most = most_tokens(model)
    if most is not None and most < number:
        raise OptionError(f"`{argument}` must be at most {most}, the positions that {name} has, but got {number}.")
    return number


def states_width(first: Any, anatomy: Anatomy | None, norm: Norm) -> int:
    """Return the width of the states of the first module: a projection after the blocks, as in OPT-350m, narrows them.

    Args:
        first: first module of the encoder.
        anatomy: of its model; ``None`` if the module itself knows the width.
        norm: of the encoder.
    """
    final = anatomy.final if anatomy is not None and norm == "final" else ()
    modules = [first.model.get_submodule(path) for path in final]
    projections = [module.out_features for module in modules if isinstance(module, nn.Linear)]
    return int(projections[-1] if projections else first.get_embedding_dimension())


# --- bidirectional attention -----------------------------------------------------------------------------------------


def turn_mask_off(module: nn.Module, cut: Cut, name: str) -> None:
    """Turn off the causal mask, and raise if a block remains causal."""
    model: Any = module.model
    if not isinstance(getattr(_token_table(model), "weight", None), Tensor):  # patches or waveforms
        raise OptionError(f"`bidirectional` must be False for {name}, which reads no tokens: it has no causal mask.")
    if cut.layer > 0 and not _causal_blocks(module, cut):
        raise OptionError(f"`bidirectional` must be False for {name}: it has no causal mask to turn off.")
    model.config.is_causal = False
    for part in model.modules():
        if getattr(part, "is_causal", None) is True:
            part.is_causal = False
    ids = _token_ids(module, [[5, 6, 7]])
    try:
        with torch.no_grad():
            module({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    except AttributeError as reason:  # MPT requires a mask then, which only padded batches have
        raise OptionError(f"`bidirectional` must be False for {name}: it does not run without its mask.") from reason
    if cut.layer > 0 and (causal := _causal_blocks(module, cut)):
        which = f"those of blocks {', '.join(map(str, causal))}" if len(causal) < cut.layer else "its tokens"
        raise OptionError(
            f"`bidirectional` must be False for {name}: {which} see only those before them, whatever its config says "
            "(a state-space model, or attention with another mask)."
        )


def _token_table(model: nn.Module) -> Any:
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding))
    return internals.input_embeddings(model) or next(tables, None)


def _token_ids(module: Any, ids: list[list[int]]) -> Tensor:
    """Return token ids on the module's device, within its vocabulary."""
    table = _token_table(module.model)
    size = getattr(table, "num_embeddings", None) or len(table.weight)
    return torch.tensor(ids, device=next(module.parameters()).device).remainder(size)


def _causal_blocks(module: nn.Module, cut: Cut) -> list[int]:
    """Return the blocks, from 1, in which a token of a padded batch sees less ahead than back."""
    model: Any = module.model
    ids = _token_ids(module, [[5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0], [5, 6, 7, 9, 5, 6, 7, 8, 5, 6, 7, 8]])
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    passes: list[tuple[Tensor, Tensor]] = []
    inputs: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = input_states(args, kwargs)
        leaf = states.detach().requires_grad_(True)
        inputs.append(leaf)
        new_args = tuple(leaf if value is states else value for value in args)
        return new_args, {name: leaf if value is states else value for name, value in kwargs.items()}

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if (states := first_tensor(output)) is not None:
            passes.append((inputs[-1], states))

    with ExitStack() as stack:
        for block in itertools.islice(model.get_submodule(cut.anatomy.blocks), cut.layer):
            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(after).remove)
        with torch.enable_grad():
            module({"input_ids": ids, "attention_mask": mask})
    last = ids.shape[1] - 1
    return [
        number
        for number, states in enumerate(passes, 1)
        # In the padded row, and as far ahead as back in the other: layers with a window keep it on both sides.
        if not _depends(cut.anatomy, *states, 0, 0, 1)
        or (_depends(cut.anatomy, *states, 1, last, 0) and not _depends(cut.anatomy, *states, 1, 0, last))
    ]


def _depends(anatomy: Anatomy, inputs: Tensor, outputs: Tensor, row: int, target: int, source: int) -> bool:
    """Return whether a block's output at token ``target`` depends on its input at token ``source``."""
    states = anatomy.tokens(outputs)[row, target]
    weights = torch.linspace(-1, 1, len(states), device=outputs.device, dtype=outputs.dtype).cos()
    (slope,) = torch.autograd.grad((states * weights).sum(), inputs, allow_unused=True, retain_graph=True)
    return slope is not None and bool(anatomy.tokens(slope)[row, source].abs().max() > 0)


# --- a model that is not cut ------------------------------------------------------------------------------------------


def probed_width(module: Any) -> int:
    """Return the width of the states of a probe."""
    return int(token_states(module, probe_features(module)[0]).shape[-1])


class UncutTransformer(Transformer):
    """sentence-transformers' module around a model that is not cut because a cut would change its layers.

    Attributes:
        anatomy: anatomy of the model.
        layer: the layer to read.
        norm: norm of its states.
        bypass: whether the model applies its own operations after the last block to the states of the layer, instead of
            ``anatomy.final``.
    """

    anatomy: Anatomy
    layer: int
    norm: Norm
    bypass: bool = False
    get_embedding_dimension = probed_width

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it adds and removes hooks
    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the features with the states of the layer as ``token_embeddings``."""
        if self.bypass:
            with bypass_blocks(self.model, self.anatomy, self.layer):
                return super().forward(features, **kwargs)
        states: list[Tensor] = []
        output: dict[str, Any] = {**features}

        def add(_: int, layer_states: Tensor) -> None:
            states.append(layer_states)

        with watch_layers(self.model, add, anatomy=self.anatomy, layers=[self.layer], norm=self.norm, complete=False):
            output |= super().forward(features, **kwargs)
        # Some models pad to whole windows internally.
        length = output["input_ids"].shape[1] if "input_ids" in output else None
        output["token_embeddings"] = states[0][:, :length]
        return output
