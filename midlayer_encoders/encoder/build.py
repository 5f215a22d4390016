"""Build an encoder from the files of a model or from a module in memory: load and cut, assemble the modules, verify."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import get_device_name

from midlayer_encoders._types import LayerArgument
from midlayer_encoders.encoder import probes, prompting, verification
from midlayer_encoders.encoder.description import Description
from midlayer_encoders.encoder.digests import files_digest
from midlayer_encoders.encoder.first_module import UncutTransformer, states_width, transformer_module, turn_mask_off
from midlayer_encoders.encoder.inputs import supported_media
from midlayer_encoders.encoder.options import EncoderOptions, make_options
from midlayer_encoders.encoder.probes import probe_features, token_states
from midlayer_encoders.encoder.saved_folder import SavedFolder, later_modules, load_saved_folder, pooling_name
from midlayer_encoders.encoder.spec import CardData, base_name
from midlayer_encoders.errors import CutError, MidlayerError, OptionError, error_summary
from midlayer_encoders.models.anatomy import Anatomy, media_parts, suffers_from_padding
from midlayer_encoders.models.cut import Cut
from midlayer_encoders.models.hub import BUILT_IN_MINILM, Location, local_folder, module_folder
from midlayer_encoders.models.load import ModelFiles, open_model
from midlayer_encoders.recipes import Recipe, recipe_of
from midlayer_encoders.token_selector import TokenSelector


def encoder_name(model: str, options: EncoderOptions) -> str:
    """Return the name of a folder or of a model on the hub in results."""
    if model == BUILT_IN_MINILM:
        return "local/all-MiniLM-L6-v2"
    return base_name(*options.split_file(model))


def model_place(location: Location, saved: SavedFolder) -> Location:
    """Return the location of the transformers model, which may have a subfolder of its own."""
    if not saved.first_path:
        return location
    return location._replace(folder=module_folder(location.folder, saved.first_path, location.revision), revision=None)


def build_from_files(encoder: Any, model: str, layer: LayerArgument, options: EncoderOptions) -> None:
    """Initialize an encoder of a folder or a name on the hub, inside ``options.hub_access()``."""
    location = encoder.location = options.locate(model)
    saved = load_saved_folder(location, options)
    prompting.resolve_prompts(options, saved)  # raises before anything large is loaded
    with _named_errors(model, layer, options):
        files = open_model(
            model_place(location, saved),
            adapters=options.adapters,
            trust_remote_code=options.trust_remote_code,
            model_kwargs=_model_kwargs(options, saved),
            config_kwargs={**saved.keywords("config_kwargs"), **(options.config_kwargs or {})},
        )
        towers = media_parts(files.complete)
        if options.tower is not None and options.tower not in towers:
            raise OptionError(
                f"`tower` must be None for {files.model}, which is not a joint model, but got {options.tower!r}."
            )
        anatomy: Anatomy | None = None
        if towers and options.tower is None:
            from midlayer_encoders.extras.joint.joint_encoder import joint_class

            encoder.__class__ = joint_class(encoder.__class__)
            loaded, cut = encoder.load_towers(files, layer, options)
            first = _first_module(files, loaded, cut, options, saved)
        else:
            part = towers.get(options.tower or "")
            first, cut, anatomy = _load_stack(files, model, layer, options, saved, part)
    assemble(encoder, model, first, cut, anatomy, options, saved)
    encoder.files = files_digest(local_folder(location), code=options.trust_remote_code)
    encoder.loaded = Description(encoder).parts()


@contextmanager
def _named_errors(model: str, layer: LayerArgument, options: EncoderOptions) -> Iterator[None]:
    """Raise errors of other libraries, where shallower models fail in their own ways, as errors that name the model."""
    try:
        yield
    except (MidlayerError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as reason:
        cause = " ".join(str(reason).split())
        raise MidlayerError(f"{model!r} needs a library that is not installed: {cause}") from reason
    except Exception as reason:
        raise CutError(
            f"{options.shown_name(model)} cannot be built, or run, with the blocks up to layer "
            f"{layer} alone: {error_summary(reason)}. Its files may be damaged; if not, try another layer."
        ) from reason


def _load_stack(
    files: ModelFiles, model: str, layer: LayerArgument, options: EncoderOptions, saved: SavedFolder, part: str | None
) -> tuple[Any, Cut, Anatomy]:
    """Load one stack of blocks, cut at a layer, or read by hooks if the cut would change its states; verify both."""

    def load(*, whole: bool) -> tuple[Any, Cut, Anatomy]:
        with _named_errors(model, layer, options):
            loaded, cut = files.load_cut(layer, options.norm, part=part, whole=whole)
            first = _first_module(files, loaded, cut, options, saved)
            alone, padded = probe_features(first)
            if not whole:
                return first, cut, verification.check_states(first, cut, alone, padded)
            anatomy, hooked = verification.check_uncut(first, cut, alone)
            first.__class__ = UncutTransformer
            first.anatomy, first.layer, first.norm, first.bypass = anatomy, cut.layer, options.norm, not hooked
            verification.check_padding(first, token_states(first, alone), padded)
            return first, cut, anatomy

    try:
        return load(whole=False)
    except CutError as refusal:
        try:
            return load(whole=True)
        except MidlayerError:
            raise refusal from refusal.__cause__


def _first_module(files: ModelFiles, loaded: Any, cut: Cut, options: EncoderOptions, saved: SavedFolder) -> Any:
    first: Any = transformer_module(files, loaded, cut, options, saved)
    return first if options.device_map is not None else first.to(options.device or get_device_name())


def _model_kwargs(options: EncoderOptions, saved: SavedFolder) -> dict[str, Any]:
    """Return the keywords of the model's ``from_pretrained``: from the options, or else the folder."""
    values = saved.keywords("model_kwargs") | dict(options.model_kwargs or {})
    values["dtype"] = values.pop("torch_dtype", None) or values.pop("dtype", None)
    names = ("dtype", "device_map", "attn_implementation", "quantization")
    values |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if isinstance(values["dtype"], str) and values["dtype"] != "auto":
        values["dtype"] = getattr(torch, values["dtype"].removeprefix("torch."))
    if {"quantization", "quantization_config"} & values.keys():  # bitsandbytes quantizes on the device
        values.setdefault("device_map", options.device or get_device_name())
    return {name: value for name, value in values.items() if value is not None}


def assemble(
    encoder: Any,
    source: str,
    first: Any,
    cut: Cut,
    anatomy: Anatomy | None,
    options: EncoderOptions,
    saved: SavedFolder,
) -> None:
    """Initialize the encoder from its first module, and check it."""
    name = options.shown_name(source)
    if "text" not in supported_media(first.modalities):
        saved = replace(saved, prompts={}, default_prompt_name=None)
    if not saved.trained:
        options = replace(options, dense=None)
    complete = cut.layer == cut.anatomy.num_layers and not encoder.ends_early
    last_layer = complete and (options.norm == "final" or not cut.anatomy.final)
    counting, later = _pooling(first, anatomy, options, saved, name, last_layer=last_layer, pools=not cut.heads)
    prompts, default_prompt_name = prompting.resolve_prompts(options, saved)
    SentenceTransformer.__init__(
        encoder,
        modules=[first, *later],
        device=options.device,
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        truncate_dim=options.truncate_dim or saved.truncate_dim,
        similarity_fn_name=cast(Any, options.similarity_fn_name or saved.similarity_fn_name),
        trust_remote_code=options.trust_remote_code,
        model_card_data=CardData(local_files_only=True),
    )
    encoder.warned = set()  # what was reported once
    encoder.module_kwargs = dict(saved.module_kwargs)
    encoder.source = source
    encoder.name = name
    encoder.results_name = encoder_name(source, options)
    encoder.options = options
    encoder.layer = cut.layer
    encoder.num_layers = cut.anatomy.num_layers
    encoder.norm = options.norm
    encoder.pooling = cast(Any, "head" if cut.heads else pooling_name(later))
    encoder.saved = saved
    encoder.max_pixels = options.max_pixels
    encoder.counting = counting
    encoder.stack = anatomy
    options.check_for_media(encoder.media, encoder.name)
    if options.bidirectional and not cut.heads:
        if getattr(first, "bypass", False):
            raise OptionError(f"`bidirectional` must be False for {name}: its blocks pass on several streams.")
        turn_mask_off(first, cut, name)
        if not encoder.in_memory:
            alone, padded = probe_features(first)
            verification.check_padding(first, token_states(first, alone), padded)
    encoder.eval()
    encoder.makes_one_size = "image" not in encoder.media or probes.makes_one_size(first)
    if not cut.heads and ("audio" in encoder.media or suffers_from_padding(first.model)):
        probes.check_batches(encoder)
    with encoder.truncate_embeddings(None):
        dimension = encoder.get_embedding_dimension()
        size = options.truncate_dim
        if size is not None and dimension is not None and size > dimension:
            raise OptionError(f"`truncate_dim` must be at most {dimension} for {encoder.name}, but got {size}.")
        _append_modules(encoder)


def _pooling(
    first: Any,
    anatomy: Anatomy | None,
    options: EncoderOptions,
    saved: SavedFolder,
    name: str,
    *,
    last_layer: bool = True,
    pools: bool = True,
) -> tuple[TokenSelector, list[Any]]:
    """Return the selection of the pooled tokens and the modules after the first one, which takes the template."""
    counting = prompting.apply_template(first, options, name)
    width = states_width(first, anatomy, options.norm)
    later = later_modules(saved, width, options, name, last_layer=last_layer, pools=pools)
    return counting, prompting.pool_spans(later, counting.placed, options.join)


def _append_modules(encoder: Any) -> None:
    """Append the modules that the options add after the pooling."""
    if encoder.spans is not None:
        probes.check_is_causal(encoder[0], probe_features(encoder[0])[0], encoder.spans, encoder.name)
    for module in prompting.modules_after_pooling(encoder, encoder.options):
        encoder.append(module.to(device=encoder.device, dtype=encoder.dtype))


def build_with_recipe(source: Any, recipe: Recipe | str) -> Any:
    """Return an encoder that shares another one's model and uses a recipe; see ``LayerEncoder.with_recipe``."""
    has_maps = not set(source.after_pooling) <= {"Normalize"}
    if source.options.template is not None or has_maps or source.in_memory:
        raise OptionError(f"`recipe` must be for files with layer=-1 and no other options, but got {source.name}.")
    options = make_options({**source.options.non_defaults(), "recipe": recipe_of("recipe", recipe).before_vectors()})
    options.check_for_media(source.media, source.name)
    encoder = copy.copy(source)
    encoder.warned = set(source.warned)
    first = prompting.copy_first_module(source)
    encoder.options = options
    encoder.counting, later = _pooling(first, source.stack, options, source.saved, source.name)
    vars(encoder)["pooling"] = pooling_name(later)
    encoder._modules = {str(number): module for number, module in enumerate([first, *later])}
    _append_modules(encoder)
    prompts, encoder.default_prompt_name = prompting.resolve_prompts(options, source.saved)
    encoder.prompts = {"query": "", "document": "", **(prompts or {})}
    encoder.model_card_data = copy.copy(source.model_card_data)
    encoder.model_card_data.register_model(encoder)
    # What the recipe changes counts as loaded; what was changed in memory before does not.
    before, after = Description(source).parts(), Description(encoder).parts()
    recipe_parts = {path: part for path, part in after.items() if before.get(path) == source.loaded.get(path)}
    encoder.loaded = recipe_parts | {path: part for path, part in source.loaded.items() if before.get(path) != part}
    return encoder
