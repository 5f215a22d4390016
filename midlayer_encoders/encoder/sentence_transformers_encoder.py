"""``LayerEncoder``: a SentenceTransformer over a model that ends at the layer you name.

The name of this file contains ``sentence_transformers`` because BERTopic and KeyBERT recognize a SentenceTransformer by
that string in ``str(type(model))``, and otherwise silently embed with another model.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, cast

from torch import Tensor, nn

from midlayer_encoders._types import Layer, Medium, Pooling
from midlayer_encoders.encoder.build import EncoderParts, build_from_files, build_from_module, probe_features
from midlayer_encoders.encoder.causal_mask import turn_mask_off
from midlayer_encoders.encoder.encoding import EmbeddingEncoder
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.encoder.options import (
    EncoderKeywords,
    EncoderOptions,
    make_options,
    normalize_layer,
    with_options,
)
from midlayer_encoders.encoder.prompting import copy_with_options, modules_after_pooling, resolve_prompts
from midlayer_encoders.encoder.spec import CardData
from midlayer_encoders.encoder.verification import check_padding
from midlayer_encoders.errors import OptionError
from midlayer_encoders.measuring import agreed
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.cut import Cut, JointCut
from midlayer_encoders.models.hub import model_location, output_embeddings
from midlayer_encoders.models.padding import wants_padding
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.recipes import Recipe, recipe_of
from midlayer_encoders.recipes.counting import Counting
from midlayer_encoders.selection import Selection, select
from midlayer_encoders.selection.rules import check_rule
from midlayer_encoders.validation import check_text

_AUTO = "auto"


class LayerEncoder(EmbeddingEncoder):
    """A ``SentenceTransformer`` whose model ends after ``layer`` blocks; later weights are never loaded.

    Args:
        model: folder or name on the hub of a transformers model for text, images or audio, or ``"built-in"``
            (SmolLM2-135M) or ``"built-in-minilm"`` (all-MiniLM-L6-v2), if the packages with their weights are
            installed. For a module in memory see :meth:`from_module`.
        layer: an int in ``[0, num_layers]`` (``0`` = embeddings), a negative int from the end (``-1`` = the last), or
            a float in ``(0, 1]``, the fraction of the depth. For a joint model such as CLIP, one for both towers or one
            for each: ``{"text": 6, "image": 9}``. A list, ``[8, 12, 16]``, combines layers from one pass by their mean,
            or as ``combine`` and ``layer_weights`` specify. A rule's name, such as ``"auto"``, selects a layer from
            ``texts``; with ``recipe="auto"`` it also selects the recipe.
        texts: texts for the rule; ``selection`` then holds the result and its reason.
        labels: class of each text for the rule, ``None`` for unlabeled texts.
        options: as in :class:`~midlayer_encoders.EncoderOptions`: ``norm``, ``pooling``, ``revision``, ``dtype``, ….

    The vector of a text without tokens is zero. Special tokens that the tokenizer adds to an empty text count.
    ``save_pretrained`` writes a folder that any ``SentenceTransformer`` loads without this package; if a family does
    not allow that, the error names the reason. ``docs/media.md`` covers images and audio.
    """

    def __init__(
        self,
        model: str,
        layer: Layer | Sequence[Layer] | Mapping[str, Layer] | str | None = None,
        *,
        texts: Sequence[str] | None = None,
        labels: Sequence[int | str | None] | None = None,
        **options: Unpack[EncoderKeywords],
    ) -> None:
        if isinstance(model, nn.Module):
            raise OptionError(
                f"`model` must be a folder or a name on the hub, but got a {type(model).__name__}. For a module in "
                "memory write LayerEncoder.from_module(module, layer, processor=…)."
            )
        model = check_text("model", os.fspath(model) if isinstance(model, os.PathLike) else model)
        recipe = options.get("recipe")
        if select_recipe := isinstance(recipe, str) and recipe == _AUTO:
            options = {**options, "recipe": None}
        encoder_options = make_options(options)
        if layer is None and isinstance(recipe, Recipe):
            layer = recipe.layer
        if layer is None:
            raise OptionError("`layer` must be a number, or several, unless a Recipe names one, but got None.")
        recipes = "all" if select_recipe else None
        layer = normalize_layer(layer)
        layer, selection = _selected_layer(model, layer, texts, labels, encoder_options, recipes=recipes)
        if select_recipe and selection is not None:
            keywords = {name: value for name, value in selection.keywords.items() if name != "layer"}
            encoder_options = make_options({**encoder_options.changed(), **keywords})
        self._assemble(build_from_files(model, layer, encoder_options), encoder_options, selection)

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        layer: Layer | Sequence[Layer],
        *,
        processor: Callable[..., Any],
        medium: Medium = "image",
        blocks: str | None = None,
        final: Sequence[str] | None = None,
        **options: Unpack[EncoderKeywords],
    ) -> LayerEncoder:
        """Return the encoder of a copy of a module in memory, which may be any ``torch.nn.Module``.

        Args:
            module: a model.
            layer: a layer, or a list of layers, as in :class:`LayerEncoder`.
            processor: a transformers processor, or a function from a list of inputs to the module's arguments.
            medium: medium of its inputs.
            blocks: path of its list of blocks, if the rules do not find it.
            final: paths of the modules after its last block, likewise.
            options: those of :class:`~midlayer_encoders.EncoderOptions` that apply without files: ``norm``,
                ``pooling``, ``device``, ``prompts``, ``truncate_dim``, ….
        """
        encoder_options = make_options(options)
        module = getattr(module, "_orig_mod", module)  # the module inside `torch.compile`
        layer = normalize_layer(layer)
        parts = build_from_module(
            module, layer, encoder_options, processor=processor, medium=medium, blocks=blocks, final=final
        )
        encoder = cls.__new__(cls)
        encoder._assemble(parts, encoder_options, None)
        return encoder

    def _assemble(self, parts: EncoderParts, options: EncoderOptions, selection: Selection | None) -> None:
        """Initialize the encoder from its parts, and check it."""
        prompts, default_prompt_name = resolve_prompts(options, parts.saved_prompts)
        super().__init__(
            modules=parts.modules(options.pooling),
            device=options.device,
            prompts=prompts,
            default_prompt_name=default_prompt_name,
            truncate_dim=options.truncate_dim,
            trust_remote_code=options.trust_remote_code,
            model_card_data=CardData(local_files_only=True),
        )
        cut = parts.cut
        towers = cut.towers if isinstance(cut, JointCut) else {}
        main = cut.towers["image"] if isinstance(cut, JointCut) else cut
        self.source = parts.source
        self.name = parts.name
        self.options = options
        self.selection = selection
        self.layer = main.layer
        self.num_layers = main.anatomy.num_layers
        self.tower_layers = {name: tower.layer for name, tower in towers.items()}
        self.mixture = () if parts.mix is None else tuple(zip(parts.mix.layers, parts.mix.shares, strict=True))
        self.norm = options.norm
        self.pooling: Pooling = cast(Any, "head") if towers else options.pooling or "mean"
        self.saved_prompts = parts.saved_prompts
        self.max_pixels = options.max_pixels
        self.counting = Counting(parts.placed, options.skip_first, options.template_tokens is not False)
        options.check_for_media(self.media, self.name)
        self._check_width(options.truncate_dim)
        self._gguf_file = parts.gguf_file
        self._truncation_warned = False
        self._anatomy = parts.anatomy
        if isinstance(cut, Cut) and options.bidirectional:
            turn_mask_off(self[0], cut, self.name)
            if not isinstance(self[0], MemoryModule) and not wants_padding(self.transformer):
                check_padding(self[0], *probe_features(self[0]))
        self.eval()
        self._add_modules_after_pooling(options)

    def with_recipe(self, recipe: Recipe | str) -> LayerEncoder:
        """Return an encoder that shares this one's model and uses a recipe.

        The parts of a recipe that map pooled vectors (``center``, ``whiten``, ``embed_filter``) depend on the layer and
        are omitted here: pass the recipe to :class:`LayerEncoder` to apply them.

        Args:
            recipe: recipe or its name. This encoder must have no template.
        """
        if self.options.template is not None or self.after_pooling or isinstance(self[0], MemoryModule):
            raise OptionError(
                f"`recipe` must be given to an encoder of files without a template and without modules after its "
                f"pooling, but {self.name} has one. Create it with layer=-1 only."
            )
        before_vectors = recipe_of("recipe", recipe).before_vectors()
        options = make_options({**self.options.changed(), "recipe": before_vectors})
        encoder = copy_with_options(self, options)
        encoder.options = options
        encoder.pooling = options.pooling or "mean"
        options.check_for_media(encoder.media, encoder.name)
        return encoder

    def _check_width(self, truncate_dim: int | None) -> None:
        with self.truncate_embeddings(None):
            width = self.get_embedding_dimension()
        if truncate_dim is not None and width is not None and truncate_dim > width:
            raise OptionError(
                f"`truncate_dim` must be at most {width}, the dimensions of {self.name}, but got {truncate_dim}."
            )

    def check_own(self, options: Mapping[str, Any]) -> None:
        """Raise if options that accompany this encoder differ from the encoder's."""
        requested = make_options(options)
        has_index = ":" in (requested.device or "")  # "cuda" means any CUDA device
        current = {"pooling": self.pooling, "device": str(self.device) if has_index else self.device.type}
        for name in options:
            agreed(name, getattr(requested, name), current.get(name, getattr(self.options, name)))

    def _add_modules_after_pooling(self, options: EncoderOptions) -> None:
        if not (options.center or options.whiten or options.embed_filter or options.normalize):
            return
        truncate_dim = self.truncate_dim
        self.truncate_dim = None
        width = cast(int, self.get_embedding_dimension())

        def embed(texts: Sequence[str]) -> Tensor:
            return cast(Tensor, self.encode(list(texts), convert_to_tensor=True, show_progress_bar=False))

        for module in modules_after_pooling(options, width, embed=embed, output_embeddings=self.output_embeddings):
            self.append(module.to(device=self.device, dtype=self.dtype))
        self.truncate_dim = truncate_dim

    def output_embeddings(self) -> Tensor:
        """Return the output embeddings of the language model, shape ``(V, D)``."""
        folder, _ = model_location(self.source)
        return output_embeddings(self.transformer, folder, self.options.revision, gguf_file=self._gguf_file)

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


LayerEncoder.__init__.__signature__ = with_options(inspect.signature(LayerEncoder.__init__))  # type: ignore[attr-defined]


def _selected_layer(
    model: str,
    layer: Layer | Sequence[Layer] | Mapping[str, Layer] | str,
    texts: Sequence[str] | None,
    labels: Sequence[int | str | None] | None,
    options: EncoderOptions,
    *,
    recipes: str | None,
) -> tuple[Layer | Sequence[Layer] | Mapping[str, Layer], Selection | None]:
    """Return the layer, or the layer of the complete model that a rule selects."""
    if recipes is not None and layer != _AUTO:
        raise OptionError(f"`layer` must be {_AUTO!r} with recipe={_AUTO!r}, which selects both, but got {layer!r}.")
    if not isinstance(layer, str):
        if texts is not None or labels is not None:
            raise OptionError(f"`texts` and `labels` must be None unless `layer` is a rule's name, but it is {layer}.")
        return layer, None
    check_rule(layer, argument="layer")
    # The recipe's fields are among the options; modules after the pooling depend on the layer.
    without_vector_maps = {"recipe": None, "center": None, "whiten": False, "embed_filter": False, "normalize": False}
    complete = LayerEncoder(model, -1, **{**options.changed(), **without_vector_maps})
    selection = select(complete, texts, labels, rule=layer, recipes=recipes)
    return selection.layer, selection
