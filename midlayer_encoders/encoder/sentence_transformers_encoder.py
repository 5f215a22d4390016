"""``LayerEncoder``: a SentenceTransformer over a model that ends at the layer you name.

The name of this file holds ``sentence_transformers`` because BERTopic and KeyBERT recognize a SentenceTransformer by
that string in ``str(type(model))``, and silently embed with another model otherwise.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from tqdm import tqdm

from midlayer_encoders._types import EncoderSpec, Layer, Medium, Norm, Pooling, ReadSite
from midlayer_encoders.encoder.asking import after_pooling, asked, asked_copy, prompts_of
from midlayer_encoders.encoder.batches_ahead import prepared, preparing
from midlayer_encoders.encoder.build import Built, build_from_files, build_from_module, probes
from midlayer_encoders.encoder.causal_mask import turn_mask_off
from midlayer_encoders.encoder.checks import check_padding
from midlayer_encoders.encoder.inputs import (
    both_media,
    is_conversation,
    is_pair,
    named_medium,
    read_inputs,
    with_padded_column,
)
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.encoder.multimodal import MultimodalEncoder
from midlayer_encoders.encoder.options import (
    EncoderKeywords,
    EncoderOptions,
    check_device,
    device_name,
    make_options,
    with_options,
)
from midlayer_encoders.encoder.spec import CardData, base_name, model_card, weights_digest
from midlayer_encoders.encoder.transformer_module import checked_length
from midlayer_encoders.errors import NotFiniteError, OptionError, check_choice, check_count, check_text, shown
from midlayer_encoders.measuring import agreed
from midlayer_encoders.media import InputError, medium_of
from midlayer_encoders.models import compat
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy
from midlayer_encoders.models.cut import Cut, JointCut
from midlayer_encoders.models.hub import place_of
from midlayer_encoders.models.output_embeddings import output_embeddings
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.reading.batches import TokenBudget, batches_of, check_budget, tokens_that_fit
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.reading.turns import turn
from midlayer_encoders.recipes import Recipe, recipe_of
from midlayer_encoders.recipes.counting import Counting
from midlayer_encoders.selection import Selection, select
from midlayer_encoders.selection.rules import check_rule

__all__ = ["LayerEncoder"]

logger = logging.getLogger(__name__)

_AUTO = "auto"


class LayerEncoder(MultimodalEncoder):
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
        layer, selection = _chosen_layer(model, layer, texts, labels, given, recipes="all" if choose else None)
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
            module, layer, given, processor=processor, medium=medium, blocks=blocks, final=final
        )  # fmt: skip
        encoder = cls.__new__(cls)
        encoder._assemble(built, given, None)
        return encoder

    def _assemble(self, built: Built, options: EncoderOptions, selection: Selection | None) -> None:
        """Become the encoder of what was built, and check that it reads the layer."""
        prompts, default_prompt_name = prompts_of(options)
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
        self.layers = {tower: one.layer for tower, one in cut.towers.items()} if isinstance(cut, JointCut) else {}
        self.mixture = () if built.mix is None else tuple(zip(built.mix.layers, built.mix.shares, strict=True))
        self.norm: Norm = options.norm
        # A joint model's own heads pool: no pooling of states that others could ask for.
        self.pooling: Pooling = cast(Any, "head") if isinstance(cut, JointCut) else options.pooling or "mean"
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

    # --- identity ---------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> EncoderSpec:
        """What changes this encoder's vectors and scores, as it is now: training it in place makes another spec."""
        modules = [[type(module).__name__, module.get_config_dict()] for module in self]  # type: ignore[operator]
        given = self.options
        return EncoderSpec(
            model=self.name,
            revision=given.revision,
            layer=self.layer,
            num_layers=self.num_layers,
            norm=self.norm,
            pooling=self.pooling,
            max_length=self.max_seq_length,
            dtype=str(self.dtype).removeprefix("torch."),
            prompts=(
                *sorted((name, text or "") for name, text in self.prompts.items()),
                ("", self.default_prompt_name or ""),
            ),
            bidirectional=given.bidirectional,
            adapters=tuple(base_name(adapter) for adapter in given.adapters),
            chat_template=given.chat_template,
            gguf_file=self._gguf_file,
            truncate_dim=self.truncate_dim,
            modules=json.dumps(modules, sort_keys=True, default=str),
            weights=weights_digest(self),
            tower=given.tower,
            layers=tuple(self.layers.items()),
            similarity=self.similarity_fn_name,
            asked=asked(given),
            mixture=self.mixture,
        )

    @property
    def anatomy(self) -> Anatomy:
        """Where the model, as it is cut, keeps its parts. A joint model has two; see ``tower``."""
        if self.layers:
            raise OptionError(
                f"`encoder` must have one stack of layers, but {self.name} has a tower of text and one of images. "
                "Load one: LayerEncoder(model, -1, tower='image')."
            )
        first: Any = self[0]
        return first.anatomy if isinstance(first, MemoryModule) else self._anatomy or find_anatomy(first.model)

    def model_card_text(self, repository: str | None = None, branch: str | None = None) -> str:
        """Return the README that ``save_pretrained`` writes to a folder, or ``push_to_hub`` to a repository."""
        parameters = sum(parameter.numel() for parameter in self.parameters())
        trained = "generated_from_trainer" in self.model_card_data.tags
        return model_card(
            self.spec, parameters=parameters, trained=trained, media=self.media, repository=repository, branch=branch,
            own_code=self.options.trust_remote_code, data=cast(CardData, self.model_card_data),
        )  # fmt: skip

    # --- encoding ---------------------------------------------------------------------------------------------------

    @property
    def max_seq_length(self) -> int | None:
        """Number of tokens after which a text is truncated; ``None`` where a model takes no text."""
        return super().max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        if isinstance(self[0], MemoryModule) or self.tokenizer is None:  # it would change the spec, and no vector
            raise OptionError(
                f"`max_seq_length` must be left alone for {self.name}, whose inputs no tokenizer of ours truncates, "
                f"but got {shown(value)}."
            )
        cast(Any, self[0]).max_seq_length = checked_length("max_seq_length", value, self.transformer, self.name)

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return embeddings as ``SentenceTransformer.encode`` does, or raise where one is not finite.

        A joint model takes ``{"text": …, "image": …}`` too: the sum of both vectors, as mteb's own CLIP.

        Raises:
            InputError: for an image or waveform that cannot be read, or a medium that the model does not take.
            NotFiniteError: naming the layer and the first text whose states hold NaN or infinity.
        """
        single = self.is_singular_input(inputs)
        if not single and not isinstance(inputs, list):  # as the base class does, for one that can be read only once
            inputs = inputs.tolist() if isinstance(inputs, np.ndarray) else list(inputs)
        if self.layers and any(both_media(item) for item in ([inputs] if single else inputs[:1])):
            return self._encode_both(inputs, single, *args, **kwargs)
        args, kwargs = _checked_call(self, inputs, args, kwargs)
        items = [inputs] if single else inputs
        try:
            media, name = self.media, self.name
            for item in items if not self._is_tokenizers(items) else ():
                named_medium(item, media, model=name)
            with preparing(self, items, beside=self.device.type == "cuda"):
                embeddings = super().encode(inputs, *args, **kwargs)
        except InputError as reason:  # batches are in another order: find where the caller has it
            place = next((n for n, item in enumerate(inputs) if item is reason.item), None) if not single else None
            raise InputError(f"Input {place}: {reason}" if place is not None else str(reason)) from reason
        self._check_finite(items, embeddings, single)
        return embeddings

    def encode_layers(
        self,
        inputs: Any,
        layers: Sequence[Layer] | str = "all",
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        site: ReadSite = "block",
        token_budget: TokenBudget = "auto",
        show_progress_bar: bool = False,
        convert_to_tensor: bool = False,
    ) -> Any:
        """Return the embeddings at many layers from one pass over the inputs, shape ``(L + 1, N, D)`` for all layers.

        Row ``k`` is what ``LayerEncoder(model, k).encode(inputs)`` gives, to rounding: norm, pooling, recipe and
        ``truncate_dim`` are this encoder's. For more than memory holds see :func:`~midlayer_encoders.embed`.

        Args:
            inputs: a list of texts, images or waveforms; of a single one the result is ``(L + 1, D)``.
            layers: ``"all"`` up to the encoder's own, or some; they are returned in ascending order.
            prompt_name: which of the encoder's prompts is put before each text; the default one by default.
            prompt: the prompt itself.
            site: ``"block"``, or ``"attention"`` or ``"mlp"``: what these add in each block, from layer 1 up.
            token_budget: tokens in a batch; ``"auto"`` for as many as the device runs best with.
            show_progress_bar: count the inputs on the error output.
            convert_to_tensor: return a tensor on the encoder's device instead of an array of NumPy.

        Raises:
            OptionError: for an encoder with modules after its pooling, or a joint model without ``tower``.
            NotFiniteError: naming the layer and the input whose states hold NaN or infinity.
        """
        budget = check_budget(token_budget)
        single = self.is_singular_input(inputs)
        items = [inputs] if single else list(inputs)
        put = self.prompt_text(prompt_name, prompt, items)
        reader = layer_reader(self, layers=layers, prompt=put, site=site)
        tokens = tokens_that_fit(self) if budget == "auto" else budget
        batches = batches_of(self, items, token_budget=tokens, prompt=put)
        with tqdm(total=len(items), desc="Inputs", disable=not show_progress_bar) as bar:
            found = reader.vectors(items, batches, done=bar.update)
        if not items:
            found = found.new_empty(len(reader.layers), 0, self.get_embedding_dimension() or 0)
        found = found[:, 0] if single else found
        return found.to(self.device) if convert_to_tensor else found.numpy()

    def prompt_text(self, prompt_name: str | None, prompt: str | None, inputs: Sequence[Any]) -> str:
        """Return what is put before each of the inputs: a prompt, the one of a name, or the default one for texts."""
        texts = bool(inputs) and medium_of(inputs[0], self.media) == "text"
        if prompt is not None:
            prompt = check_text("prompt", prompt)
        elif prompt_name is not None:
            check_choice("prompt_name", prompt_name, self.prompts)
            prompt = self.prompts[prompt_name] or ""
        if prompt and inputs and not texts:
            raise OptionError(f"`prompt` must be left out for images and audio, but got {shown(prompt)}.")
        return (self.default_prompt if texts else "") if prompt is None else prompt

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return the features of a batch; images and audio are read, and truncation is warned once."""
        return prepared(self, inputs, prompt, kwargs, lambda batch: self._preprocess(batch, prompt, **kwargs))

    def _preprocess(self, inputs: Sequence[Any], prompt: str | None, **kwargs: Any) -> dict[str, Any]:
        if not self._is_tokenizers(inputs):
            read = read_inputs(
                inputs, self.media, model=self.name, rate=self.sampling_rate, max_pixels=self.max_pixels
            )  # fmt: skip
            if not all(isinstance(item, str) for item in read):
                return self._preprocess_media(read, inputs, prompt=prompt, **kwargs)
            inputs = read
        with turn(self.preparer):
            return self._preprocess_texts(inputs, prompt=prompt, **kwargs)

    def _preprocess_texts(self, inputs: Sequence[Any], prompt: str | None, **kwargs: Any) -> dict[str, Any]:
        empty = bool(inputs) and not prompt and all(isinstance(text, str) and not text.strip() for text in inputs)
        if empty and not self.tokenizer(list(inputs))["input_ids"][0]:
            features: dict[str, Any] = super().preprocess(["."] * len(inputs), prompt=prompt, **kwargs)
            features["attention_mask"] = torch.zeros_like(features["attention_mask"])
            return features
        if not isinstance(self[0], MemoryModule):
            self.tokenizer.padding_side = "right"  # where positions are those of the text alone, whoever changed it
        features = super().preprocess(inputs, prompt=prompt, **kwargs)
        self._check_ids(features.get("input_ids"))
        if not self._truncation_warned:
            self._warn_truncation(inputs, features, prompt)
        return with_padded_column(features) if wants_padding(self.transformer) else features

    def _check_ids(self, ids: Tensor | None) -> None:
        """Raise where a token has no embedding: one that was added to the tokenizer alone."""
        if ids is None or self.tokenizer is None or not ids.numel():
            return
        path = None if self._anatomy is None else self._anatomy.embeddings
        size = getattr(self.transformer.get_submodule(path), "num_embeddings", None) if path else None
        if size is not None and len(self.tokenizer) > size and (last := int(ids.max())) >= size:
            raise OptionError(
                f"The tokenizer of {self.name} makes the token {self.tokenizer.convert_ids_to_tokens(last)!r}, number "
                f"{last}, but the model has embeddings for {size} tokens only. Tokens were added to the tokenizer "
                "alone: call `model.resize_token_embeddings(len(tokenizer))` and save both again."
            )

    def _is_tokenizers(self, inputs: Sequence[Any]) -> bool:
        """Return whether these are for the tokenizer as they are: conversations, or pairs of texts."""
        chat = "message" in self.modalities and all(map(is_conversation, inputs))
        return chat or ("text" in self.media and all(map(is_pair, inputs)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the modules, one thread at a time: a pass may change its model, as rotary tables that follow the length.

        Here and not in ``forward``, which ``compile`` traces.
        """
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        with turn(self.transformer):
            return super().__call__(*args, **kwargs)

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: A002  (the base class's name)
        """Run the modules; a text without tokens embeds as zero under every pooling."""
        apart = not self.training and suffers_from_padding(self.transformer)
        if not self.layers and (apart or input.get("modality") in ("image", "audio")):
            return self._forward_media(input)
        if not self.counting.all:
            return self._forward_counted(input)
        features: dict[str, Any] = super().forward(input, **kwargs)
        mask, embedding = features.get("attention_mask"), features.get("sentence_embedding")
        if (
            not self.training
            and mask is not None
            and embedding is not None
            and mask.ndim == 2
            and mask.shape[0] == embedding.shape[0]  # not `len`, which a tracer takes for a constant
        ):
            features["sentence_embedding"] = embedding.masked_fill(~mask.bool().any(dim=1, keepdim=True), 0.0)
        return features

    def _forward_counted(self, features: dict[str, Any]) -> dict[str, Any]:
        """Run the modules; the pooling sees the tokens that count alone."""
        modules: list[Any] = list(self)
        made = modules[0](features)
        mask = made["attention_mask"]
        made["attention_mask"] = counted = self.counting(mask).to(mask.dtype)
        for module in modules[1:]:
            made = module(made)
        made["attention_mask"] = mask
        found = made["sentence_embedding"]
        made["sentence_embedding"] = found.masked_fill(~counted.bool().any(dim=1, keepdim=True), 0.0)
        return made  # type: ignore[no-any-return]

    def _warn_truncation(self, inputs: Sequence[Any], features: dict[str, Any], prompt: str | None) -> None:
        limit, mask = self.max_seq_length, features.get("attention_mask")
        if limit is None or mask is None or mask.ndim != 2 or int(mask.sum(dim=1).max()) < limit:
            return
        row = int(mask.sum(dim=1).argmax())
        if isinstance(inputs[row], str) and self.tokenizer is not None:
            length = len(self.tokenizer((prompt or "") + inputs[row], truncation=False, verbose=False)["input_ids"])
            if length > limit:
                self._truncation_warned = True
                logger.warning(
                    "A text of %d tokens is truncated to %d (%r…); others may be too, this is warned once. "
                    "Pass `max_length` to choose the limit, or split long texts.",
                    length, limit, inputs[row][:40],
                )  # fmt: skip

    def _check_finite(self, inputs: Sequence[Any], embeddings: Any, single: bool) -> None:
        rows = [embeddings] if single else embeddings
        if isinstance(rows, np.ndarray | Tensor) and torch.as_tensor(rows).isfinite().all():
            return
        for text, row in zip(inputs, rows, strict=True):
            if isinstance(row, np.ndarray | Tensor) and not torch.as_tensor(row).isfinite().all():
                raise NotFiniteError(
                    f"Layer {self.layer} of {self.name} gives NaN or infinity for {str(text)[:80]!r} "
                    f"in {self.dtype}. Load it with dtype='float32', or check the weights."
                )

    # --- process pools and copies -----------------------------------------------------------------------------------

    def start_multi_process_pool(self, *args: Any, **kwargs: Any) -> Any:
        """Start workers as ``SentenceTransformer`` does; not while another thread has hooks on the model."""
        with turn(self.transformer):
            return super().start_multi_process_pool(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs, without the hooks that transformers puts back at its next pass."""
        with turn(self.transformer):
            compat.drop_recording_hooks(self)
            return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if hasattr(self.transformer, "config"):
            compat.register_recordable_outputs(self.transformer)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerEncoder:
        """Return a copy that shares nothing, without the hooks that another thread may have on the model."""
        made = memo[id(self)] = type(self).__new__(type(self))
        with turn(self.transformer):
            made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


LayerEncoder.__init__.__signature__ = with_options(inspect.signature(LayerEncoder.__init__))  # type: ignore[attr-defined]


_ENCODE = inspect.signature(SentenceTransformer.encode)


def _checked_call(
    encoder: LayerEncoder, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what ``encode`` was given after its inputs, by position or by name, once it is checked."""
    call = _ENCODE.bind(encoder, inputs, *args, **kwargs)
    given = call.arguments
    if "batch_size" in given:
        given["batch_size"] = check_count("batch_size", given["batch_size"], "inputs")
    if given.get("truncate_dim") is not None:
        given["truncate_dim"] = check_count("truncate_dim", given["truncate_dim"], "dimensions")
    devices = given.get("device")
    for device in devices if isinstance(devices, list | tuple) else [devices]:
        check_device(None if device is None else device_name("device", device))
    return call.args[2:], call.kwargs


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
