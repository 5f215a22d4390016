"""``LayerEncoder``: a SentenceTransformer over a model that ends at the layer you name.

The name of this file contains ``sentence_transformers`` because BERTopic and KeyBERT recognize a SentenceTransformer by
that string in ``str(type(model))``, and otherwise silently embed with another model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import Tensor, nn

from midlayer_encoders._types import EncoderChoice, EncoderSpec, Layer, LayerArgument, Medium, Norm, Pooling
from midlayer_encoders.arguments import TokenBudget, check_budget
from midlayer_encoders.encoder import build, choosing, encoding, saving
from midlayer_encoders.encoder import inputs as prepare
from midlayer_encoders.encoder.first_module import check_length
from midlayer_encoders.encoder.options import EncoderOptions, make_options, name_options
from midlayer_encoders.encoder.saved_folder import SavedFolder
from midlayer_encoders.encoder.sentence_transformers_internals import prompt_length
from midlayer_encoders.encoder.spec import encoder_spec, mteb_encoder
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.models import hub
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.cut import plan_cut
from midlayer_encoders.reading.fused import fused_blocks
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.pooled_spans import PooledSpans
from midlayer_encoders.reading.reader import LayerReader, layer_reader
from midlayer_encoders.recipes import Recipe
from midlayer_encoders.token_selector import TokenSelector
from midlayer_encoders.validation import check_path

if TYPE_CHECKING:
    from midlayer_encoders.selection import Selection


class LayerEncoder(SentenceTransformer):
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

    source: str  # as it was given: a folder, a name on the hub, "built-in", or the name of a module
    name: str  # for people
    results_name: str
    options: EncoderOptions
    layer: int
    num_layers: int  # of the complete model
    norm: Norm
    pooling: Pooling
    max_pixels: int
    saved: SavedFolder
    counting: TokenSelector
    stack: Anatomy | None  # of the cut model; None for a joint model
    makes_one_size: bool  # whether its processor brings images to one size
    warned: set[str]  # topics of the warnings that were logged
    selection: Selection | None = None
    location = hub.Location("")
    files = ""  # digest of the files that it was loaded from
    loaded: Mapping[str, str] = MappingProxyType({})  # digests of its modules as they follow from these files
    ends_early = False  # whether another stack of its model ends before its last block
    _branch: str | None = None  # the target of `push_to_hub` while it runs

    def __init__(
        self,
        model: str | None = None,
        layer: LayerArgument | EncoderChoice | str | None = None,
        *,
        model_name_or_path: str | None = None,
        texts: Sequence[str] | None = None,
        labels: Sequence[int | str | None] | None = None,
        **options: Any,
    ) -> None:
        model = choosing.model_name(model, model_name_or_path)
        choice = layer if isinstance(layer, EncoderChoice) else None
        resolved, encoder_options, selection = choosing.resolve(LayerEncoder, model, layer, options, texts, labels)
        with encoder_options.hub_access(), hub.name_as_typed(self):
            build.build_from_files(self, model, resolved, encoder_options)
        if choice is not None:
            choosing.check_choice_fits(choice, self.name, self.num_layers)
        self.selection = selection

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        layer: Layer,
        *,
        processor: Callable[..., Any],
        medium: Medium = "image",
        blocks: str | None = None,
        final: Sequence[str] | None = None,
        **keywords: Any,
    ) -> Self:
        """Return the encoder of a copy of a module in memory, which may be any ``torch.nn.Module``.

        Args:
            module: a model.
            layer: a layer, as in :class:`~midlayer_encoders.LayerEncoder`.
            processor: a transformers processor, or a function from a list of inputs to the module's arguments.
            medium: medium of its inputs.
            blocks: path of its list of blocks, if the rules do not find it.
            final: paths of the modules after its last block, likewise.
            keywords: options of :class:`~midlayer_encoders.EncoderOptions` that apply without files: ``norm``,
                ``pooling``, ``device``, ``prompts``, ``truncate_dim``, ….
        """
        from midlayer_encoders.encoder.memory_module import read_module

        options = make_options(keywords)
        options.check_for_module()
        first, cut = read_module(module, layer, options.norm, processor, medium, blocks, final)
        encoder = cls.__new__(cls)
        build.assemble(
            encoder, f"module/{type(first.model).__name__}", first, cut, first.anatomy, options, SavedFolder()
        )
        return encoder

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
        return cast(LayerEncoder, build.build_with_recipe(self, recipe))

    def __setattr__(self, name: str, value: Any) -> None:
        # A new value would change the spec, but no vector.
        if name in ("layer", "num_layers", "norm", "pooling") and name in vars(self):
            raise OptionError(
                f"`{name}` must be chosen when an encoder is created: LayerEncoder(…, {name}={value!r}). "
                "`encode_layers` reads the layers of one encoder."
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Return the model, the layer and the options; ``print`` shows the modules, as for SentenceTransformer."""
        if "norm" not in vars(self):
            return object.__repr__(self)  # it is not built yet
        options = {"recipe": self.options.recipe, "norm": self.norm, "pooling": self.pooling}
        options |= self.options.recreating()
        texts = [f"{name}={short_repr(value)}" for name, value in options.items() if value is not None]
        place = f"layer={self.layers} of {self.depths}"
        return f"{type(self).__name__}({self.name!r}, {place}, {', '.join(texts)})"

    def __str__(self) -> str:
        return nn.Module.__repr__(self)

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> EncoderSpec:
        """Everything that changes this encoder's vectors and scores; training the encoder changes the spec."""
        return encoder_spec(self)

    @property
    def in_memory(self) -> bool:
        """Whether it was created from a module in memory, by :meth:`from_module`."""
        return not self.location.folder

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of the model on the hub."""
        return self.options.revision

    @property
    def transformer(self) -> nn.Module:
        """The model inside the first module."""
        return cast(nn.Module, cast(Any, self[0]).model)

    @property
    def anatomy(self) -> Anatomy:
        """The paths of the parts of the cut model."""
        first: Any = self[0]
        if getattr(first, "bypass", False):
            raise OptionError(
                f"`encoder` must have layers that one pass can read, but {self.name} changes its states after its last "
                "block. Read one layer at a time with `encode`, or pass norm='none'."
            )
        return cast(Anatomy, self.stack)

    @property
    def layers(self) -> LayerArgument:
        """The ``layer`` that creates this encoder: a number, or a number by name."""
        return self.layer

    @property
    def depths(self) -> LayerArgument:
        """The number of blocks of the complete model, or one by name."""
        return self.num_layers

    def layer_argument(self, layer: int) -> LayerArgument:
        """Return the ``layer`` that creates the encoder of one of the layers that ``encode_layers`` numbers."""
        return layer

    def kept_blocks(self, layer: int) -> list[tuple[Anatomy, int]]:
        """Return each stack of blocks of the whole model, with the number that the encoder of a layer keeps."""
        if self.in_memory:
            return [(self.anatomy, self.num_layers)]
        config = getattr(self.transformer, "config", None)
        return [(self.anatomy, plan_cut(self.anatomy, layer, self.norm, config=config).keep)]

    def check_one_stack(self, argument: str) -> None:
        """Raise an :class:`OptionError` if ``argument`` needs one stack of blocks, and the model has several."""

    @property
    def own_recipe(self) -> Recipe | None:
        """The recipe that this encoder's template and pooling amount to; ``None`` without a template."""
        return self.options.own_recipe()

    @property
    def reads_plainly(self) -> bool:
        """Whether no option says how to read texts, so that a recipe may."""
        return self.options.reads_plainly() and not self.in_memory

    @property
    def media(self) -> list[str]:
        """The media of its inputs: ``"text"``, ``"image"``, ``"audio"``."""
        return prepare.supported_media(self.modalities)

    @property
    def sampling_rate(self) -> int | None:
        """Sampling rate of its audio model; waveforms at another rate are resampled."""
        return prepare.sampling_rate(self.processor) if "audio" in self.media else None

    @property
    def default_prompt(self) -> str:
        """The text of the default prompt; empty if there is none."""
        return self.prompts.get(self.default_prompt_name or "", "") or ""

    @property
    def after_pooling(self) -> list[str]:
        """Names of the modules after the first one, except the pooling."""
        poolings = (PoolingModule, PooledSpans)
        return [type(module).__name__ for module in list(self)[1:] if not isinstance(module, poolings)]

    @property
    def spans(self) -> PooledSpans | None:
        """The pooling of a template that marks a span; ``None`` for other poolings."""
        return next((module for module in self if isinstance(module, PooledSpans)), None)

    @property
    def leaves_out_prompts(self) -> bool:
        """Whether the pooling leaves out the tokens of a prompt."""
        return not all(getattr(module, "include_prompt", True) for module in self)

    def pooled_tokens(self, prompt: str) -> TokenSelector:
        """Return which tokens to pool after a prompt."""
        length = prompt_length(self[0], prompt) if prompt and self.leaves_out_prompts else 0
        return replace(self.counting, prompt_tokens=length)

    @property
    def max_seq_length(self) -> int | None:
        """Number of tokens after which a text is truncated, with a template and one copy; ``None`` without texts."""
        return super().max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        if self.in_memory or self.tokenizer is None:  # it would change the spec but no vector
            raise OptionError(f"`max_seq_length` must be left alone for {self.name}, which is not tokenized here.")
        if self.counting.placed.copies > 1:
            raise OptionError(
                "`max_seq_length` must be left alone with a template that repeats the text, because both copies have "
                f"to fit. Write LayerEncoder({self.name!r}, …, max_length={value}) instead."
            )
        cast(Any, self[0]).max_seq_length = check_length("max_seq_length", value, self.transformer, self.name)

    def output_embeddings(self) -> Tensor:
        """Return the output embeddings of the language model, shape ``(V, D)``."""
        with self.options.hub_access(), hub.name_as_typed(self):
            return hub.output_embeddings(self.transformer, build.model_place(self.location, self.saved))

    def for_mteb(self) -> Any:
        """Return this encoder for mteb, with its media, number of parameters and memory in its ``ModelMeta``.

        ``mteb.evaluate`` accepts a text encoder directly, but records no size of a local SentenceTransformer, assumes
        that it supports only text, and refuses to run tasks of images or audio on it.
        """
        return mteb_encoder(self)

    # --- vectors -----------------------------------------------------------------------------------------------------

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return embeddings as ``SentenceTransformer.encode`` does, or raise if one is not finite.

        A joint model such as CLIP also accepts ``{"text": …, "image": …}`` and returns the sum of both vectors.

        Raises:
            InputError: for an image or waveform that cannot be read, or a medium that the model does not support.
            NotFiniteError: naming the layer and the first text whose vector has NaN or infinity.
        """
        return encoding.encode(self, inputs, args, kwargs)

    def encode_layers(
        self,
        inputs: Any,
        layers: Sequence[Layer] | str = "all",
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        token_budget: TokenBudget = "auto",
        show_progress_bar: bool = False,
        convert_to_tensor: bool = False,
    ) -> Any:
        """Return the embeddings at many layers from one pass over the inputs, shape ``(L + 1, N, D)`` for all layers.

        Row ``k`` equals ``LayerEncoder(model, k).encode(inputs)`` up to rounding, with this encoder's norm, pooling,
        recipe and ``truncate_dim``; for a joint model such as CLIP, ``LayerEncoder(model, k / L)``, whose layers are
        numbered by its images. See :func:`~midlayer_encoders.embed` for vectors
        that do not fit in memory.

        Args:
            inputs: a list of texts, images or waveforms; for a single one the result is ``(L + 1, D)``.
            layers: ``"all"`` up to the encoder's layer, or a list; they are returned in ascending order.
            prompt_name: name of the prompt before each text; the default prompt by default.
            prompt: text of the prompt.
            token_budget: tokens in a batch; ``"auto"`` chooses a number for the device.
            show_progress_bar: show the progress on standard error.
            convert_to_tensor: return a tensor on the encoder's device instead of a NumPy array.

        Raises:
            OptionError: for an encoder with modules after its pooling.
            NotFiniteError: naming the layer and the input whose states have NaN or infinity.
        """
        budget = check_budget(token_budget)
        single = self.is_singular_input(inputs)
        items = [inputs] if single else list(inputs)
        prompt = self.prompt_text(prompt_name, prompt, items)
        reader = self.vector_reader(layers, prompt=prompt)
        vectors = encoding.read_vectors(self, reader, items, budget, prompt, show_progress_bar)
        vectors = vectors[:, 0] if single else vectors
        return vectors.to(self.device) if convert_to_tensor else vectors.numpy()

    def vector_reader(self, layers: Sequence[Layer] | str = "all", *, prompt: str = "") -> LayerReader:
        """Return a reader of the vectors of layers."""
        return layer_reader(self, layers=layers, prompt=prompt)

    def is_singular_input(self, inputs: Any) -> bool:  # type: ignore[override]
        """Return whether this is a single input; a waveform as ``(array, rate)`` is one, a column of a frame is not."""
        if hasattr(inputs, "to_list"):  # a Series of pandas or polars
            return False
        if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[1], int | np.integer):
            return True
        return bool(super().is_singular_input(inputs))

    def prompt_text(self, prompt_name: str | None, prompt: str | None, inputs: Sequence[Any]) -> str:
        """Return the prompt before each input: the given one, the named one, or the default one for texts."""
        return encoding.prompt_text(self, prompt_name, prompt, inputs)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return the features of a batch; images and audio are read, and truncation is reported once."""
        return encoding.preprocess(self, list(inputs), prompt, kwargs)

    def host_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the model's inputs for a batch, on the host."""
        features, unread = self.preprocess(inputs, prompt=prompt), encoding.NOT_MODEL_INPUTS
        return {key: value for key, value in features.items() if isinstance(value, Tensor) and key not in unread}

    def model_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the model's inputs for a batch, on its device."""
        return prepare.to_device(self.host_inputs(inputs, prompt=prompt), self.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the modules, one thread at a time, since a pass may change the model, such as its rotary tables.

        ``forward`` takes no lock because ``compile`` traces it.
        """
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        is_compiled = any(module._compiled_call_impl is not None for module in (self, *self))
        with turn(self.transformer), nullcontext() if is_compiled else fused_blocks(self.transformer):
            return super().__call__(*args, **kwargs)

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: A002  (the base class's name)
        """Run the modules; the vector of a text without tokens is zero."""
        return encoding.forward(self, input, kwargs)

    # --- folders, processes and copies -------------------------------------------------------------------------------

    def save(self, path: str | None, *args: Any, stock: bool = False, **kwargs: Any) -> None:
        """Write a folder that any ``SentenceTransformer`` loads, or raise if it would give other vectors.

        The folder is written and verified beside ``path``, and then replaces it; unrelated files in it stay.

        Args:
            path: the folder.
            args: as in ``SentenceTransformer.save``.
            stock: for ``word-echo``, whose folder contains code: write the nearest encoder that needs none, which gives
                other vectors (``docs/recipes.md``).
            kwargs: as in ``SentenceTransformer.save``.

        Raises:
            CutError: naming the reason.
            FolderError: if a file is in its place.
            DiskFullError: if the disk is full.
        """
        check_path("path", path)
        if path is not None:  # which the base class allows
            saving.save_files(self, path, stock, *args, **kwargs)

    def save_pretrained(self, path: str, *args: Any, stock: bool = False, **kwargs: Any) -> None:
        """Write a folder like :meth:`save`, and log whether it contains code, unless it is a checkpoint."""
        self.save(path, *args, stock=stock, **kwargs)
        if path is not None:
            saving.log_code(self, stock)

    def needs_trust(self, *, stock: bool = False) -> bool:
        """Return whether a saved folder, or the stock form's, is loaded with ``trust_remote_code=True``."""
        return self.options.trust_remote_code or (self.spans is not None and not stock)

    def model_card_text(self, repository: str | None = None, branch: str | None = None) -> str:
        """Return the README that ``save_pretrained`` writes to a folder, or ``push_to_hub`` to a repository."""
        return saving.card_text(self, repository, branch)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the folder as ``SentenceTransformer`` does, with a card that shows how to load it."""
        call = inspect.signature(SentenceTransformer.push_to_hub).bind(self, *args, **kwargs)
        self._branch = call.arguments.get("revision")
        if call.arguments.get("commit_message") is None:
            call.arguments["commit_message"] = "Add new SentenceTransformer model"
        try:
            return super().push_to_hub(*call.args[1:], **call.kwargs)
        finally:
            self._branch = None

    def _create_model_card(self, path: str, model_name: str | None = None, *_: Any, **__: Any) -> None:
        """Write the encoder's card; the generated one names the subclass and guesses the base model."""
        Path(path, "README.md").write_text(self.model_card_text(model_name, self._branch), encoding="utf8")

    def _push_to_hub_usage_tip(self, repo_id: str) -> str:
        """Return the text of a pull request, which shows how to load a ``SentenceTransformer``."""
        return str(super()._push_to_hub_usage_tip(repo_id)).replace(type(self).__name__, SentenceTransformer.__name__)

    @classmethod
    def _load_with_module_classes(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as a plain ``SentenceTransformer``, when the trainer loads its best one."""
        return SentenceTransformer._load_with_module_classes(*args, **kwargs)

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


name_options(LayerEncoder.__init__)
