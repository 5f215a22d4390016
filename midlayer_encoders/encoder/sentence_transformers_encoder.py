"""``LayerEncoder``: a SentenceTransformer over a model that ends at the layer you name.

The name of this file holds ``sentence_transformers`` because BERTopic and KeyBERT recognize a SentenceTransformer by
that string in ``str(type(model))``, and silently embed with another model otherwise.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, cast

from torch import Tensor, nn

from midlayer_encoders._types import Layer, Medium, Pooling
from midlayer_encoders.encoder.build import Built, build_from_files, build_from_module, probes
from midlayer_encoders.encoder.causal_mask import turn_mask_off
from midlayer_encoders.encoder.encoding import InputsEncoder
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.encoder.options import (
    EncoderKeywords,
    EncoderOptions,
    make_options,
    normalize_layer,
    with_options,
)
from midlayer_encoders.encoder.prompting import after_pooling, asked_copy, prompts_of
from midlayer_encoders.encoder.spec import CardData
from midlayer_encoders.encoder.verification import check_padding
from midlayer_encoders.errors import OptionError
from midlayer_encoders.measuring import agreed
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.cut import Cut, JointCut
from midlayer_encoders.models.hub import place_of
from midlayer_encoders.models.output_embeddings import output_embeddings
from midlayer_encoders.models.padding import wants_padding
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.recipes import Recipe, recipe_of
from midlayer_encoders.recipes.counting import Counting
from midlayer_encoders.selection import Selection, select
from midlayer_encoders.selection.rules import check_rule
from midlayer_encoders.validation import check_text

__all__ = ["LayerEncoder"]

_AUTO = "auto"


class LayerEncoder(InputsEncoder):
    """A ``SentenceTransformer`` whose model ends after ``layer`` blocks; the weights after them are never read.

    Args:
        model: folder or name on the hub of a transformers model of text, images or audio, or ``"built-in"``
            (SmolLM2-135M) or ``"built-in-minilm"`` (all-MiniLM-L6-v2), where the packages of their weights are
            installed. For a module in memory see :meth:`from_module`.
        layer: an int in ``[0, num_layers]`` (``0`` = embeddings), a negative int from the end (``-1`` = the last), or
            a float in ``(0, 1]``, the fraction of the depth. Of a joint model such as CLIP, one for both towers or one
            for each: ``{"text": 6, "image": 9}``. Several, ``[8, 12, 16]``: all are read in one pass, and the vector is
            the mean of theirs, or what ``combine`` and ``weights`` say. Or the name of a rule that chooses a layer from
            ``texts``, as ``"auto"``; with ``recipe="auto"`` it chooses how texts are asked, too.
        texts: where ``layer`` is a rule, what it reads; ``selection`` then says what was chosen, and why.
        labels: where ``layer`` is a rule, the class of each text, ``None`` for those without.
        options: as in :class:`~midlayer_encoders.EncoderOptions`: ``norm``, ``pooling``, ``revision``, ``dtype``, ….

    A text without tokens embeds as the zero vector. An empty one is such a text where the tokenizer adds no special
    tokens; where it does, they are what is embedded. ``save_pretrained`` writes a folder that any
    ``SentenceTransformer`` loads, without this package; where a family does not allow that, the error says why.
    ``docs/media.md`` covers images and audio.
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
        if choose := isinstance(recipe, str) and recipe == _AUTO:
            options = {**options, "recipe": None}
        given = make_options(options)
        if layer is None and isinstance(recipe, Recipe):
            layer = recipe.layer
        if layer is None:
            raise OptionError("`layer` must be a number, or several, unless a Recipe names one, but got None.")
        layer, selection = _chosen_layer(
            model, normalize_layer(layer), texts, labels, given, recipes="all" if choose else None
        )
        if choose and selection is not None:
            given = make_options({**given.changed(), **{k: v for k, v in selection.keywords.items() if k != "layer"}})
        self._assemble(build_from_files(model, layer, given), given, selection)

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
        """Return the encoder of a module in memory, of transformers or any other; the module itself is left alone.

        Args:
            module: a model.
            layer: a number, or several, as in :class:`LayerEncoder`.
            processor: one of transformers', or a function that turns a list of inputs into what the module takes.
            medium: what its inputs are.
            blocks: path of its list of blocks, where it cannot be found by rule.
            final: paths of what follows its last block, likewise.
            options: those of :class:`~midlayer_encoders.EncoderOptions` that apply without files: ``norm``,
                ``pooling``, ``device``, ``prompts``, ``truncate_dim``, ….
        """
        given = make_options(options)
        module = getattr(module, "_orig_mod", module)  # what `torch.compile` wraps, and traces anew after a cut
        built = build_from_module(
            module, normalize_layer(layer), given, processor=processor, medium=medium, blocks=blocks, final=final
        )  # fmt: skip
        encoder = cls.__new__(cls)
        encoder._assemble(built, given, None)
        return encoder

    def _assemble(self, built: Built, options: EncoderOptions, selection: Selection | None) -> None:
        """Become the encoder of what was built, and check that it reads the layer."""
        prompts, default_prompt_name = prompts_of(options, built.saved_prompts)
        super().__init__(
            modules=built.modules(options.pooling),
            device=options.device,
            prompts=prompts,
            default_prompt_name=default_prompt_name,
            truncate_dim=options.truncate_dim,
            trust_remote_code=options.trust_remote_code,
            model_card_data=CardData(local_files_only=True),
        )
        cut = built.cut
        main = cut.towers["image"] if isinstance(cut, JointCut) else cut
        self.source, self.name, self.options, self.selection = built.source, built.name, options, selection
        self.layer, self.num_layers = main.layer, main.anatomy.num_layers
        self.tower_layers = {tower: one.layer for tower, one in cut.towers.items()} if isinstance(cut, JointCut) else {}
        self.mixture = () if built.mix is None else tuple(zip(built.mix.layers, built.mix.shares, strict=True))
        self.norm = options.norm
        # A joint model's own heads pool: no pooling of states that others could ask for.
        self.pooling: Pooling = cast(Any, "head") if isinstance(cut, JointCut) else options.pooling or "mean"
        self.saved_prompts = built.saved_prompts
        self.max_pixels = options.max_pixels
        self.counting = Counting(built.placed, options.skip_first, options.template_tokens is not False)
        options.check_for_media(self.media, self.name)
        self._check_width(options.truncate_dim)
        self._gguf_file = built.gguf_file
        self._truncation_warned = False
        self._anatomy = built.anatomy
        if isinstance(cut, Cut) and options.bidirectional:
            turn_mask_off(self[0], cut, self.name)
            if not isinstance(self[0], MemoryModule) and not wants_padding(self.transformer):
                check_padding(self[0], *probes(self[0]))
        self.eval()
        self._follow_pooling(options)

    def with_recipe(self, recipe: Recipe | str) -> LayerEncoder:
        """Return an encoder that shares this one's model, and asks it by a recipe.

        What a recipe does to pooled vectors (``center``, ``whiten``, ``embed_filter``) is made for one layer, and left
        out here: pass the recipe to :class:`LayerEncoder` for it.

        Args:
            recipe: or its name. This encoder must have no template of its own.
        """
        found = recipe_of("recipe", recipe)
        if self.options.template is not None or self.after_pooling or isinstance(self[0], MemoryModule):
            raise OptionError(
                f"`recipe` must be given to an encoder of files without a template, and without modules after its "
                f"pooling, but {self.name} has one. Make it with layer=-1 alone."
            )
        options = make_options({**self.options.changed(), "recipe": found.before_vectors()})
        made = asked_copy(self, options)
        made.options, made.pooling = options, options.pooling or "mean"
        options.check_for_media(made.media, made.name)
        return made

    def _check_width(self, truncate_dim: int | None) -> None:
        with self.truncate_embeddings(None):
            width = self.get_embedding_dimension()
        if truncate_dim is not None and width is not None and truncate_dim > width:
            raise OptionError(
                f"`truncate_dim` must be at most {width}, the dimensions of {self.name}, but got {truncate_dim}."
            )

    def check_own(self, options: Mapping[str, Any]) -> None:
        """Raise where options that are given beside this encoder are not its own: it was made already."""
        given = make_options(options)
        number = ":" in (given.device or "")  # "cuda" is any of them
        own = {"pooling": self.pooling, "device": str(self.device) if number else self.device.type}
        for name in options:
            agreed(name, getattr(given, name), own.get(name, getattr(self.options, name)))

    def _follow_pooling(self, options: EncoderOptions) -> None:
        """Add what the options do to pooled vectors."""
        if not (options.center or options.whiten or options.embed_filter or options.normalize):
            return
        kept, self.truncate_dim = self.truncate_dim, None
        width = cast(int, self.get_embedding_dimension())

        def vectors(texts: Sequence[str]) -> Tensor:
            return cast(Tensor, self.encode(list(texts), convert_to_tensor=True, show_progress_bar=False))

        for module in after_pooling(options, width, vectors=vectors, embeddings=self.output_embeddings):
            self.append(module.to(device=self.device, dtype=self.dtype))
        self.truncate_dim = kept

    def output_embeddings(self) -> Tensor:
        """Return the embeddings by which the language model chooses its next token, shape ``(T, D)``."""
        folder, _ = place_of(self.source)
        return output_embeddings(self.transformer, folder, self.options.revision, gguf_file=self._gguf_file)

    # --- process pools and copies -----------------------------------------------------------------------------------

    def start_multi_process_pool(self, *args: Any, **kwargs: Any) -> Any:
        """Start workers as ``SentenceTransformer`` does; not while another thread has hooks on the model."""
        with turn(self.transformer):
            return super().start_multi_process_pool(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs, without the hooks that transformers puts back at its next pass."""
        with turn(self.transformer):
            internals.drop_recording_hooks(self)
            return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if hasattr(self.transformer, "config"):
            internals.register_recordable_outputs(self.transformer)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerEncoder:
        """Return a copy that shares nothing, without the hooks that another thread may have on the model."""
        made = memo[id(self)] = type(self).__new__(type(self))
        with turn(self.transformer):
            made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


LayerEncoder.__init__.__signature__ = with_options(inspect.signature(LayerEncoder.__init__))  # type: ignore[attr-defined]


def _chosen_layer(
    model: str,
    layer: Layer | Sequence[Layer] | Mapping[str, Layer] | str,
    texts: Sequence[str] | None,
    labels: Sequence[int | str | None] | None,
    options: EncoderOptions,
    *,
    recipes: str | None,
) -> tuple[Layer | Sequence[Layer] | Mapping[str, Layer], Selection | None]:
    """Return the layer itself, or the one that a rule chooses from all layers of the whole model."""
    if recipes is not None and layer != _AUTO:
        raise OptionError(f"`layer` must be {_AUTO!r} with recipe={_AUTO!r}, which chooses both, but got {layer!r}.")
    if not isinstance(layer, str):
        if texts is not None or labels is not None:
            raise OptionError(f"`texts` and `labels` must be None unless `layer` is a rule's name, but it is {layer}.")
        return layer, None
    check_rule(layer, argument="layer")
    # The fields of a recipe are among the options; what follows the pooling is made for one layer.
    bare = {"recipe": None, "center": None, "whiten": False, "embed_filter": False, "normalize": False}
    whole = LayerEncoder(model, -1, **{**options.changed(), **bare})
    selection = select(whole, texts, labels, rule=layer, recipes=recipes)
    return selection.layer, selection
