"""``LayerEncoder``: a SentenceTransformer over a model that ends at the layer you name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import Tensor, nn

from midlayer_encoders._types import NORMS, POOLINGS, EncoderSpec, Layer, Norm, Pooling
from midlayer_encoders.encoder.card import CardData
from midlayer_encoders.encoder.checks import check_states, turn_mask_off
from midlayer_encoders.encoder.identity import base_name, model_card, weights_digest
from midlayer_encoders.encoder.inputs import both_media, probe_input
from midlayer_encoders.encoder.layer_module import layer_module
from midlayer_encoders.encoder.media_encoder import MediaEncoder
from midlayer_encoders.encoder.plain_module import PlainModule, plain_module
from midlayer_encoders.errors import NotFiniteError, OptionError, check_choice
from midlayer_encoders.media import MAX_PIXELS, InputError, Medium
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy
from midlayer_encoders.models.cut import Cut, JointCut
from midlayer_encoders.models.load import load_cut

if TYPE_CHECKING:
    from midlayer_encoders.selection import Selection

__all__ = ["LayerEncoder"]

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_MODES = {"last": "lasttoken"}  # sentence-transformers' own name for it
_LEAST_CENTRE = 16  # texts: the mean of fewer is one of them as much as what all share


class LayerEncoder(MediaEncoder):
    """A ``SentenceTransformer`` whose model ends after ``layer`` blocks; the weights after them are never read.

    Args:
        model: folder or name on the hub of a transformers model of text, images or sound, or a module in memory.
        layer: an int in ``[0, num_layers]`` (``0`` = embeddings), a negative int from the end (``-1`` = the last), or
            a float in ``(0, 1]``, the fraction of the depth. Of a joint model such as CLIP, one for both towers or one
            for each: ``{"text": 6, "image": 9}``. Or the name of a rule that chooses one from ``texts``, as ``"auto"``.
        norm: ``"final"`` applies the model's own final norm to the layer's states, so that the encoder is exactly the
            model without its last blocks; ``"none"`` takes the raw residual stream (and keeps one block more for it).
        pooling: ``"mean"`` over real tokens, ``"last"``, ``"cls"``, ``"max"`` or ``"weightedmean"``. By default the
            mean; a joint model embeds by its own heads, in which its towers meet, and takes no other pooling.
        tower: ``"text"`` or ``"image"`` takes that tower of a joint model alone, its states pooled.
        revision: branch, tag or commit on the hub, as ``"step1000"`` of Pythia.
        dtype: of the weights, a ``torch.dtype`` or its name; ``None`` keeps that of the files.
        device: as in ``SentenceTransformer``; ``None`` takes the best there is.
        max_length: number of tokens after which a text is cut off; ``None`` takes what the model can.
        prompts: name and text of prompts, as in ``SentenceTransformer``.
        default_prompt_name: which of them is used when none is asked for.
        bidirectional: turn a causal model's mask off, as LLM2Vec does.
        adapters: PEFT adapters, merged in order before the cut (LLM2Vec: the MNTP one, then SimCSE or supervised).
        chat_template: wrap every text in the tokenizer's chat template.
        gguf_file: name of a GGUF file in ``model`` to read the weights from.
        truncate_dim: number of leading dimensions to keep.
        trust_remote_code: whether the model's own code on the hub may run.
        device_map: ``"auto"`` spreads a model that is too large for one device; ``device`` must then be ``None``.
        max_pixels: largest image that is read.
        processor: for a module in memory, what turns a list of inputs into what it takes.
        medium: for a module in memory, what its inputs are.
        blocks: for a module in memory, the path of its blocks where they cannot be told.
        final: for a module in memory, the paths of what follows its last block, likewise.
        texts: where ``layer`` is a rule, what it looks at; ``selection`` then says what was chosen, and why.
        labels: where ``layer`` is a rule, the class of each text, ``None`` for those without.
        centre: texts like those to come, a few hundred, whose mean vector is subtracted from every vector (by a
            ``Dense`` with a bias, so the folder stays plain); benchmarks/selection/README.md says what that is worth.

    An empty text embeds as the zero vector. ``save_pretrained`` writes a folder that any ``SentenceTransformer`` loads,
    without this package; where a family does not allow that, it says why. ``docs/media.md`` tells of images and sound.
    """

    def __init__(
        self,
        model: str | nn.Module,
        layer: Layer | Mapping[str, Layer] | str,
        *,
        norm: Norm = "final",
        pooling: Pooling | None = None,
        tower: Literal["text", "image"] | None = None,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | None = None,
        max_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        bidirectional: bool = False,
        adapters: Sequence[str] = (),
        chat_template: bool = False,
        gguf_file: str | None = None,
        truncate_dim: int | None = None,
        trust_remote_code: bool = False,
        device_map: str | None = None,
        max_pixels: int = MAX_PIXELS,
        processor: Callable[..., Any] | None = None,
        medium: Medium = "image",
        blocks: str | None = None,
        final: tuple[str, ...] | None = None,
        texts: Sequence[str] | None = None,
        labels: Sequence[int | str | None] | None = None,
        centre: Sequence[str] | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        _check_options(norm, pooling, max_length, adapters, device, device_map)
        layer, selection = _chosen(layer, texts, labels, options)
        source: dict[str, Any] = {"revision": revision, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
        first: Any
        cut: Cut | JointCut
        if isinstance(model, nn.Module):
            if isinstance(layer, Mapping):
                raise OptionError(f"`layer` must be one number for a module in memory, but got {dict(layer)}.")
            first, cut = plain_module(model, layer, processor, norm=norm, medium=medium, blocks=blocks, final=final)
            name = f"module/{type(model).__name__}"
        else:
            loaded, cut = load_cut(
                model, layer, norm=norm, tower=tower, dtype=_dtype(dtype), adapters=adapters, device_map=device_map,
                **source,
            )  # fmt: skip
            first = layer_module(model, loaded, cut, source, max_length=max_length, chat_template=chat_template)
            name = base_name(model, gguf_file)
        joint = isinstance(cut, JointCut)
        if joint and pooling is not None:
            raise OptionError(
                f"`pooling` must be None for {name}: its towers meet in what its own heads make, but got {pooling!r}. "
                "Pass `tower` to pool the states of one tower."
            )
        mode: Pooling = pooling or "mean"
        dimension = first.get_embedding_dimension()
        pools = [] if joint else [PoolingModule(dimension, pooling_mode=_MODES.get(mode, mode))]
        super().__init__(
            modules=[first, *pools],
            device=device,
            prompts=dict(prompts) if prompts is not None else None,
            default_prompt_name=default_prompt_name,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
            model_card_data=CardData(local_files_only=True),
        )
        main = cut.towers["image"] if isinstance(cut, JointCut) else cut
        self.source = model if isinstance(model, str) else name
        self.name = name
        self.layer = main.layer
        self.layers = {tower: one.layer for tower, one in cut.towers.items()} if isinstance(cut, JointCut) else {}
        self.num_layers = main.anatomy.num_layers
        self.norm: Norm = norm
        self.pooling: Pooling = cast(Any, "head") if joint else mode  # no pooling of states that others could ask for
        self.max_pixels = max_pixels
        self.selection = selection
        self._given = {
            "model": name,
            "revision": revision,
            "tower": tower,
            "layers": tuple(self.layers.items()),
            "bidirectional": bidirectional,
            "adapters": tuple(base_name(adapter) for adapter in adapters),
            "chat_template": chat_template,
            "gguf_file": gguf_file,
        }
        self._truncation_said = False
        if isinstance(cut, Cut):
            if bidirectional:
                turn_mask_off(self[0], cut, name)
            if not isinstance(first, PlainModule):
                check_states(self[0], cut, self._moved(self.preprocess([probe_input(self.media, self.sampling_rate)])))
        if centre is not None:
            self._centre_on(centre)

    def _centre_on(self, texts: Sequence[str]) -> None:
        """Add a module that subtracts the mean vector of these texts."""
        if isinstance(texts, str) or len(texts) < _LEAST_CENTRE:
            raise OptionError(
                f"`centre` must be {_LEAST_CENTRE} texts or more, like those to come, but got "
                f"{'one string' if isinstance(texts, str) else len(texts)}."
            )
        kept, self.truncate_dim = self.truncate_dim, None
        vectors = self.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        self.truncate_dim = kept
        width = vectors.shape[1]
        shift = Dense(
            width, width, activation_function=nn.Identity(), init_weight=torch.eye(width),
            init_bias=-vectors.double().mean(dim=0).float().cpu(),
        )  # fmt: skip
        self.append(shift.to(device=vectors.device, dtype=vectors.dtype))

    # --- identity ---------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> EncoderSpec:
        """Everything that changes this encoder's vectors, as it is now: training it in place makes another spec."""
        modules = [[type(module).__name__, module.get_config_dict()] for module in self]  # type: ignore[operator]
        return EncoderSpec(
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
            truncate_dim=self.truncate_dim,
            modules=json.dumps(modules, sort_keys=True, default=str),
            weights=weights_digest(self),
            **self._given,  # type: ignore[arg-type]
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
        return first.anatomy if isinstance(first, PlainModule) else find_anatomy(first.model)

    def _create_model_card(self, path: str, *_: Any, **__: Any) -> None:
        """Write our own card: the generated one names this class and guesses the lineage."""
        parameters = sum(parameter.numel() for parameter in self.parameters())
        trained = "generated_from_trainer" in self.model_card_data.tags
        Path(path, "README.md").write_text(
            model_card(self.spec, parameters=parameters, trained=trained, media=self.media), encoding="utf8"
        )

    @classmethod
    def _load_with_module_classes(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as what it is on disk, a plain SentenceTransformer, when the trainer asks for it."""
        return SentenceTransformer._load_with_module_classes(*args, **kwargs)

    # --- encoding ---------------------------------------------------------------------------------------------------

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return embeddings as ``SentenceTransformer.encode`` does, or raise where one is not finite.

        A joint model takes ``{"text": …, "image": …}`` too: the sum of both vectors, as mteb's own CLIP.

        Raises:
            OptionError: when there is nothing to encode.
            InputError: for an image or sound that cannot be read, or a medium that the model does not take.
            NotFiniteError: naming the layer and the first text whose states hold NaN or infinity.
        """
        single = self.is_singular_input(inputs)
        if not single and len(inputs) == 0:
            raise OptionError("`inputs` must hold at least one text, but got an empty list.")
        if self.layers and both_media(inputs if single else inputs[0]):
            return self._encode_both(inputs, single, *args, **kwargs)
        try:
            embeddings = super().encode(inputs, *args, **kwargs)
        except InputError as reason:  # batches are in another order: find where the caller has it
            place = next((n for n, item in enumerate(inputs) if item is reason.item), None) if not single else None
            raise InputError(f"Input {place}: {reason}" if place is not None else str(reason)) from reason
        self._check_finite([inputs] if single else inputs, embeddings, single)
        return embeddings

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return the features of a batch; images and sounds are read, and a text or sound cut off is said once."""
        if self.media != ["text"] or not all(isinstance(item, str | list | Mapping) for item in inputs):
            return self._preprocess_media(inputs, prompt=prompt, **kwargs)
        empty = bool(inputs) and not prompt and all(isinstance(text, str) and not text.strip() for text in inputs)
        if empty and not self.tokenizer(list(inputs))["input_ids"][0]:
            features: dict[str, Any] = super().preprocess(["."] * len(inputs), prompt=prompt, **kwargs)
            features["attention_mask"] = torch.zeros_like(features["attention_mask"])
            return features
        features = super().preprocess(inputs, prompt=prompt, **kwargs)
        if not self._truncation_said:
            self._say_truncation(inputs, features, prompt)
        return features

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: A002  (the base class's name)
        """Run the modules; a text without tokens embeds as zero under every pooling."""
        if not self.layers and input.get("modality") in ("image", "audio"):
            return self._forward_media(input)
        features: dict[str, Any] = super().forward(input, **kwargs)
        mask, embedding = features.get("attention_mask"), features.get("sentence_embedding")
        if (
            not self.training
            and mask is not None
            and embedding is not None
            and mask.ndim == 2
            and len(mask) == len(embedding)
        ):
            features["sentence_embedding"] = embedding.masked_fill(~mask.bool().any(dim=1, keepdim=True), 0.0)
        return features

    def _say_truncation(self, inputs: Sequence[Any], features: dict[str, Any], prompt: str | None) -> None:
        limit, mask = self.max_seq_length, features.get("attention_mask")
        if limit is None or mask is None or mask.ndim != 2 or int(mask.sum(dim=1).max()) < limit:
            return
        row = int(mask.sum(dim=1).argmax())
        if isinstance(inputs[row], str) and self.tokenizer is not None:
            length = len(self.tokenizer((prompt or "") + inputs[row], truncation=False, verbose=False)["input_ids"])
            if length > limit:
                self._truncation_said = True
                logger.warning(
                    "A text of %d tokens is cut off after %d (%r…); others may be too, this is said once. "
                    "Pass `max_length` to choose the limit, or split long texts.",
                    length, limit, inputs[row][:40],
                )  # fmt: skip

    def _check_finite(self, inputs: Sequence[Any], embeddings: Any, single: bool) -> None:
        rows = [embeddings] if single else embeddings
        if isinstance(rows, np.ndarray | Tensor) and bool(
            rows.isfinite().all() if isinstance(rows, Tensor) else np.isfinite(rows).all()
        ):
            return
        for text, row in zip(inputs, rows, strict=True):
            values = row if isinstance(row, np.ndarray | Tensor) else None
            if values is not None and not bool(torch.isfinite(torch.as_tensor(values)).all()):
                raise NotFiniteError(
                    f"Layer {self.layer} of {self.name} gives NaN or infinity for {str(text)[:80]!r} "
                    f"in {self.dtype}. Load it with dtype='float32', or check the weights."
                )

    # --- process pools ----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs, without the hooks that transformers puts back at its next pass."""
        for module in self.modules():
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                    del module._forward_hooks[key]
            if getattr(module, "_output_capturing_hooks_installed", False):
                module._output_capturing_hooks_installed = False  # type: ignore[assignment]
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        model: Any = self[0].model
        if hasattr(model, "config"):
            with torch.device("meta"):
                type(model)(model.config)  # a class learns which outputs it can record when its first model is made


def _check_options(
    norm: Norm,
    pooling: Pooling | None,
    max_length: int | None,
    adapters: Sequence[str],
    device: str | None,
    device_map: str | None,
) -> None:
    check_choice("norm", norm, NORMS)
    if pooling is not None:
        check_choice("pooling", pooling, POOLINGS)
    if max_length is not None and (isinstance(max_length, bool) or max_length < 1):
        raise OptionError(f"`max_length` must be a positive number of tokens, but got {max_length}.")
    if isinstance(adapters, str):
        raise OptionError(f"`adapters` must be a list of adapters, but got a string. Write [{adapters!r}].")
    if device_map is not None and device is not None:
        raise OptionError(f"`device` must be None when `device_map` places the model, but got {device!r}.")


def _chosen(
    layer: Layer | Mapping[str, Layer] | str,
    texts: Sequence[str] | None,
    labels: Sequence[int | str | None] | None,
    options: Mapping[str, Any],
) -> tuple[Layer | Mapping[str, Layer], Selection | None]:
    """Return the layer itself, or the one that a rule chooses after a look at all layers of the whole model."""
    if not isinstance(layer, str):
        if texts is not None or labels is not None:
            raise OptionError(f"`texts` and `labels` must be None unless `layer` is a rule's name, but it is {layer}.")
        return layer, None
    from midlayer_encoders.selection import select
    from midlayer_encoders.selection.rules import check_rule

    check_rule(layer, argument="layer")
    whole = LayerEncoder(**{**options, "layer": -1, "texts": None, "labels": None, "centre": None})
    selection = select(whole, texts, labels, rule=layer)
    return selection.layer, selection


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    check_choice("dtype", dtype, _DTYPES)
    return _DTYPES[dtype]
