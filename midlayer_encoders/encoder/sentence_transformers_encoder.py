"""``LayerEncoder``: a SentenceTransformer over a model that ends at the layer you name.

The name of this file contains ``sentence_transformers`` because BERTopic and KeyBERT recognize a SentenceTransformer by
that string in ``str(type(model))``, and otherwise silently embed with another model.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from torch import nn

from midlayer_encoders._types import EncoderChoice, LayerArgument
from midlayer_encoders.encoder import prompting
from midlayer_encoders.encoder.build import encoder_name
from midlayer_encoders.encoder.description import Description
from midlayer_encoders.encoder.encoding import EmbeddingEncoder
from midlayer_encoders.encoder.first_module import MemoryModule, states_width
from midlayer_encoders.encoder.inputs import probe_features
from midlayer_encoders.encoder.options import (
    CHOSEN_OPTIONS,
    READING_OPTIONS,
    EncoderKeywords,
    EncoderOptions,
    make_options,
    option_fields,
)
from midlayer_encoders.encoder.saved_folder import later_modules, pooling_name
from midlayer_encoders.encoder.verification import check_is_causal
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.hub import local_only, named_as_typed, weight_files
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.recipes import PLAIN, Recipe, recipe_of
from midlayer_encoders.validation import check_choice, check_matches_encoder, check_text, layer_number

if TYPE_CHECKING:
    from midlayer_encoders.selection import Selection

logger = logging.getLogger(__name__)

_AUTO = "auto"
_NO_LAYER = (
    "`layer` must be a number, or 'auto', unless a Recipe names one, but got None. -1 is the last layer; 'auto' "
    "selects one, from `texts` if you pass some."
)


class LayerEncoder(EmbeddingEncoder):
    """A ``SentenceTransformer`` whose model ends after ``layer`` blocks; later weights are never loaded.

    Args:
        model: folder or name on the hub of a transformers model for text, images or audio, or ``"built-in"``
            (SmolLM2-135M) or ``"built-in-minilm"`` (all-MiniLM-L6-v2), if the packages with their weights are
            installed. For a module in memory see :meth:`from_module`.
        layer: an int in ``[0, num_layers]`` (``0`` = embeddings), a negative int from the end (``-1`` = the last), or
            a float in ``(0, 1]``, the fraction of the depth. For a joint model such as CLIP, one for texts and images
            or one for each: ``{"text": 6, "image": 9}``. A rule's name selects a layer from ``texts``. ``"auto"`` also
            selects the recipe, unless ``recipe`` or other options say how to read texts. A
            :class:`~midlayer_encoders.Selection`, or the best layer of a sweep, brings its recipe and its options.
        model_name_or_path: the name of ``model`` in ``SentenceTransformer``.
        texts: texts for the rule; ``selection`` then holds the result and its reason.
        labels: class of each text for the rule, ``None`` for unlabeled texts.
        options: as in :class:`~midlayer_encoders.EncoderOptions`: ``norm``, ``pooling``, ``revision``, ``dtype``, ….
            The other keywords of ``SentenceTransformer`` are accepted, too: ``max_seq_length`` is ``max_length``,
            ``tokenizer_kwargs`` is ``processor_kwargs``, and ``backend`` must be ``"torch"``.

    The vector of a text without tokens is zero. Special tokens that the tokenizer adds to an empty text count.
    ``save_pretrained`` writes a folder that any ``SentenceTransformer`` loads without this package; if a family does
    not allow that, the error names the reason. ``docs/media.md`` covers images and audio.
    """

    selection: Selection | None = None

    def __init__(
        self,
        model: str | None = None,
        layer: LayerArgument | EncoderChoice | str | None = None,
        *,
        model_name_or_path: str | None = None,
        texts: Sequence[str] | None = None,
        labels: Sequence[int | str | None] | None = None,
        **options: Unpack[EncoderKeywords],
    ) -> None:
        model = _model_name(model, model_name_or_path)
        choice = layer if isinstance(layer, EncoderChoice) else None
        if choice is not None:
            layer, options = _apply_choice(choice, model, options)
        recipe = options.get("recipe")
        select_recipe = isinstance(recipe, str) and recipe == _AUTO
        encoder_options = make_options({**options, "recipe": None} if select_recipe else options)
        if (layer := recipe.layer if layer is None and isinstance(recipe, Recipe) else layer) is None:
            raise OptionError(_NO_LAYER)
        number = layer_number(layer) if isinstance(layer, str) else None
        requested: Any = layer if number is None else number
        if select_recipe and requested != _AUTO:
            raise OptionError(f"`layer` must be 'auto' with recipe='auto', which selects both, but got {requested!r}.")
        if not isinstance(requested, str) and (texts is not None or labels is not None):
            raise OptionError(f"`texts` and `labels` must be None unless `layer` names a rule, but it is {requested}.")
        selection = _as_selection(choice)
        if isinstance(requested, str):
            recipes = PLAIN if recipe == PLAIN else None
            selection, encoder_options = _select_by(requested, model, encoder_options, texts, labels, recipes)
            requested = selection.layer
        with encoder_options.hub_access(), named_as_typed(model):
            self._build_from_files(model, requested, encoder_options)
        if choice is not None:
            _check_choice_fits(choice, self.name, self.num_layers)
        self.selection = selection

    @classmethod
    def load(cls, input_path: str) -> LayerEncoder:
        """Return the encoder of the last layer of a folder, like the deprecated ``SentenceTransformer.load``."""
        return cls(input_path, -1)

    def with_recipe(self, recipe: Recipe | str) -> LayerEncoder:
        """Return an encoder that shares this one's model and uses a recipe.

        Centering depends on the layer and is omitted here: pass the recipe to :class:`LayerEncoder` to apply it.

        Args:
            recipe: recipe or its name. This encoder must have no template.
        """
        has_maps = not set(self.after_pooling) <= {"Normalize"}
        if self.options.template is not None or has_maps or isinstance(self[0], MemoryModule):
            raise OptionError(f"`recipe` must be for files with layer=-1 and no other options, but got {self.name}.")
        before_vectors = recipe_of("recipe", recipe).before_vectors()
        options = make_options({**self.options.changed(), "recipe": before_vectors})
        options.check_for_media(self.media, self.name)
        encoder = copy.copy(self)
        first: Any = copy.copy(self[0])
        first._modules = dict(first._modules)
        if first.processor is not first.tokenizer:
            first.processor = copy.copy(first.processor)
        encoder.options = options
        encoder.counting = prompting.apply_template(first, options, self.name)
        width = states_width(first, self._anatomy, options.norm)
        later = later_modules(self.saved, width, options, self.name, last_layer=True)
        later = prompting.pool_spans(later, encoder.counting.placed, options.join)
        vars(encoder)["pooling"] = pooling_name(later)
        encoder._modules = {str(number): module for number, module in enumerate([first, *later])}
        if encoder.spans is not None:
            check_is_causal(first, probe_features(first)[0], encoder.spans, self.name)
        for module in prompting.modules_after_pooling(encoder, options):
            encoder.append(module)
        prompts, encoder.default_prompt_name = prompting.resolve_prompts(options, self.saved)
        encoder.prompts = {"query": "", "document": "", **(prompts or {})}
        encoder.model_card_data = copy.copy(self.model_card_data)
        encoder.model_card_data.register_model(encoder)
        # What the recipe changes counts as loaded; what was changed in memory before does not.
        before, after = Description(self).parts(), Description(encoder).parts()
        recipe_parts = {path: part for path, part in after.items() if before.get(path) == self.loaded.get(path)}
        encoder.loaded = recipe_parts | {path: part for path, part in self.loaded.items() if before.get(path) != part}
        return encoder

    @property
    def own_recipe(self) -> Recipe | None:
        """The recipe that this encoder's template and pooling amount to; ``None`` without a template."""
        if self.options.template is None:
            return None
        options = self.options
        name = options.recipe or "own"
        return Recipe(name=name, template=options.template, join=options.join, pooling=options.pooling)

    @property
    def reads_plainly(self) -> bool:
        """Whether no option says how to read texts, so that a recipe may."""
        return not set(self.options.changed()) & READING_OPTIONS and not isinstance(self[0], MemoryModule)

    @property
    def has_saved_modules(self) -> bool:
        """Whether the model's folder is one of sentence-transformers, whose modules were made for its last layer."""
        return bool(self.saved.modules)

    @property
    def saved_class(self) -> str:
        """The class of sentence-transformers that saved the model's folder, if not ``SentenceTransformer``."""
        return self.saved.saved_class

    @property
    def weight_names(self) -> Sequence[str]:
        """Names of the weights in the model's folder; empty for a module in memory and for a file of another format."""
        if isinstance(self[0], MemoryModule) or self.location.file is not None:
            return ()
        folder, revision = self.location.folder, self.options.revision
        return tuple(weight_files(folder, revision, local=local_only(folder, revision)))

    def check_own(self, options: Mapping[str, Any]) -> None:
        """Raise if options that accompany this encoder differ from the encoder's."""
        requested = make_options(options)
        has_index = ":" in (requested.device or "")  # "cuda" means any CUDA device
        current: dict[str, Any] = {
            "pooling": self.pooling,
            "device": str(self.device) if has_index else self.device.type,
            "normalize": "Normalize" in self.after_pooling,
            "similarity_fn_name": self.similarity_fn_name,
        }
        for name in {**options, **requested.changed()}.keys() & option_fields().keys():
            check_matches_encoder(name, getattr(requested, name), current.get(name, getattr(self.options, name)))

    def __repr__(self) -> str:
        """Return the model, the layer and the options; ``print`` shows the modules, as for SentenceTransformer."""
        if "norm" not in vars(self):
            return object.__repr__(self)  # it is not built yet
        options = {"recipe": self.options.recipe, "norm": self.norm, "pooling": self.pooling}
        options |= self.options.recreating()
        texts = [f"{name}={short_repr(value)}" for name, value in options.items() if value is not None]
        return f"{type(self).__name__}({self.name!r}, layer={self.layers} of {self.depths}, {', '.join(texts)})"

    def __str__(self) -> str:
        return nn.Module.__repr__(self)

    def _become_joint(self) -> None:
        from midlayer_encoders.extras.joint.joint_encoder import joint_class

        self.__class__ = joint_class(type(self))

    # --- process pools and copies -----------------------------------------------------------------------------------

    def start_multi_process_pool(self, *args: Any, **kwargs: Any) -> Any:
        """Start workers as ``SentenceTransformer`` does, while no other thread has hooks on the model."""
        with turn(self.transformer):
            return super().start_multi_process_pool(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker process, without the hooks that transformers restores at its next pass."""
        with turn(self.transformer):
            internals.drop_recording_hooks(self)
            return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if hasattr(self.transformer, "config"):
            internals.register_recordable_outputs(self.transformer)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerEncoder:
        """Return a deep copy without the hooks that another thread may have on the model."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        with turn(self.transformer):
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


# For `help` and editors, the signature names the options.
_parameters = list(inspect.signature(LayerEncoder.__init__).parameters.values())[:-1]
for _name, _option in option_fields().items():
    _parameters.append(_parameters[-1].replace(name=_name, default=_option.default, annotation=_option.type))
LayerEncoder.__init__.__signature__ = inspect.Signature(_parameters)  # type: ignore[attr-defined]


def _apply_choice(choice: EncoderChoice, model: str, options: EncoderKeywords) -> tuple[LayerArgument, EncoderKeywords]:
    """Return the layer of a choice, and its options with others that do not contradict it.

    Raises:
        OptionError: the choice is of another model, or was made with other options.
    """
    if choice.model.startswith("module/"):
        raise OptionError(
            f"`layer` must be chosen for files, but it was chosen for {choice.model}, a module in memory: "
            "LayerEncoder.from_module(module, layer, processor=…)."
        )
    keywords: dict[str, Any] = {**(choice.options or {}), **choice.keywords}
    layer = keywords.pop("layer")
    chosen = make_options(keywords)
    requested = make_options({**keywords, **options})
    name = encoder_name(model, requested)
    if Path(name).name.lower() != Path(choice.model).name.lower():
        raise OptionError(
            f"`layer` must be chosen for {requested.shown_name(model)}, but it was chosen for "
            f"{choice.model.removeprefix('local/')}. If both have the same weights: "
            "LayerEncoder(model, **selection.keywords)."
        )
    fixed = set(chosen.changed()) if choice.options is None else CHOSEN_OPTIONS
    settings = {name: (getattr(chosen, name), getattr(requested, name)) for name in options.keys() & fixed}
    settings["revision"] = choice.revision, requested.revision or "default"
    for name, (expected, value) in settings.items():
        if value != expected:
            raise OptionError(
                f"`{name}` must be {short_repr(expected)}, for which the layer was chosen, but got "
                f"{short_repr(value)}. Leave it out, or pass the number of the layer."
            )
    return layer, cast(EncoderKeywords, {**keywords, **options})


def _check_choice_fits(choice: EncoderChoice, name: str, num_layers: int) -> None:
    """Raise if a choice was made for a model with another number of blocks."""
    if choice.num_layers not in (0, num_layers):  # 0 in a frame of layer 0 alone
        raise OptionError(
            f"`layer` must be chosen for {name}, which has {num_layers} blocks, but it was chosen for a model of "
            f"{choice.num_layers}. Select a layer of this model."
        )


def complete_encoder(model: str, options: Mapping[str, Any]) -> LayerEncoder:
    """Return an encoder of the whole model whose layers can be read, without modules trained for the last layer.

    Args:
        model: folder or hub name.
        options: keywords of :class:`~midlayer_encoders.EncoderOptions`.
    """
    encoder = LayerEncoder(model, -1, **{"dense": "drop", **options})
    if encoder.options.dense == "drop" and "dense" not in options:
        logger.warning(
            "Every layer of %s is read without %s, which was trained for its last layer (dense='drop').",
            encoder.name,
            ", ".join(encoder.saved.trained),
        )
    return encoder


def _as_selection(choice: EncoderChoice | None) -> Selection | None:
    """Return a choice if it is a selection; another is the best layer of a sweep."""
    if choice is None:
        return None
    from midlayer_encoders.selection import Selection

    return choice if isinstance(choice, Selection) else None


def _select_by(
    rule: str,
    model: str,
    options: EncoderOptions,
    texts: Sequence[str] | None,
    labels: Sequence[int | str | None] | None,
    recipes: str | None,
) -> tuple[Selection, EncoderOptions]:
    """Return the selection of a rule, and the options with the recipe that it brings."""
    from midlayer_encoders.selection import RULES, select  # with the metrics, which a numbered layer does not need

    check_choice("layer", rule, RULES)
    # The recipe's fields are among the options; modules after the pooling depend on the layer.
    complete = complete_encoder(model, {**options.changed(), "recipe": None, "center": None})
    selection = select(complete, texts, labels, rule=rule, recipes=recipes)
    keywords = dict(selection.keywords)
    del keywords["layer"]
    keywords |= {"center": own} if (own := options.center) is not None else {}
    # The last layer by default is the model as it was saved; other choices compare layers without these modules.
    is_default = rule == _AUTO and labels is None and selection.layer == complete.num_layers
    dense = options.dense if is_default else complete.options.dense
    options = make_options({**options.changed(), "dense": dense, **keywords})
    return with_encoder(selection, model, options), options


def _model_name(model: Any, model_name_or_path: str | None) -> str:
    """Return the folder or hub name of a model, which has two keywords."""
    if model is not None and model_name_or_path is not None:
        raise OptionError("`model_name_or_path` cannot be combined with `model`, which means the same.")
    model = model_name_or_path if model is None else model
    if isinstance(model, nn.Module):
        raise OptionError("`model` must be a name. For a module: LayerEncoder.from_module(module, layer, processor=…).")
    return check_text("model", os.fspath(model) if isinstance(model, os.PathLike) else model)


def with_encoder(selection: Selection, model: str, options: EncoderOptions) -> Selection:
    """Return a selection that can create its encoder."""
    return replace(selection, options=options.recreating(), make_encoder=partial(LayerEncoder, model))
