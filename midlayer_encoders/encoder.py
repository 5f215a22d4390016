"""``LayerEncoder``: a SentenceTransformer over a model that ends at the layer you name."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import Tensor, nn

from midlayer_encoders._types import NORMS, POOLINGS, EncoderSpec, Layer, Norm, Pooling
from midlayer_encoders.cut import Cut, load_cut
from midlayer_encoders.errors import CutError, NotFiniteError, OptionError, check_choice
from midlayer_encoders.identity import base_name, model_card, result_name, result_revision, weights_digest
from midlayer_encoders.layer_module import layer_module

__all__ = ["LayerEncoder"]

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_MODES = {"last": "lasttoken"}  # sentence-transformers' own name for it


class LayerEncoder(SentenceTransformer):
    """A ``SentenceTransformer`` whose model ends after ``layer`` blocks; the weights after them are never read.

    Args:
        model: folder or name on the hub of a transformers model.
        layer: an int in ``[0, num_layers]`` (``0`` = embeddings), a negative int from the end (``-1`` = the last), or
            a float in ``(0, 1]``, the fraction of the depth.
        norm: ``"final"`` applies the model's own final norm to the layer's states, so that the encoder is exactly the
            model without its last blocks; ``"none"`` takes the raw residual stream (and keeps one block more for it).
        pooling: ``"mean"`` over real tokens, ``"last"``, ``"cls"``, ``"max"`` or ``"weightedmean"``.
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

    An empty text embeds as the zero vector. ``save_pretrained`` writes a folder that any ``SentenceTransformer`` loads,
    without this package.
    """

    def __init__(
        self,
        model: str,
        layer: Layer,
        *,
        norm: Norm = "final",
        pooling: Pooling = "mean",
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
    ) -> None:
        check_choice("norm", norm, NORMS)
        check_choice("pooling", pooling, POOLINGS)
        if max_length is not None and (isinstance(max_length, bool) or max_length < 1):
            raise OptionError(f"`max_length` must be a positive number of tokens, but got {max_length}.")
        if isinstance(adapters, str):
            raise OptionError(f"`adapters` must be a list of adapters, but got a string. Write [{adapters!r}].")
        if device_map is not None and device is not None:
            raise OptionError(f"`device` must be None when `device_map` places the model, but got {device!r}.")
        source: dict[str, Any] = {"revision": revision, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
        cut_model, cut = load_cut(
            model, layer, norm=norm, dtype=_dtype(dtype), adapters=adapters, device_map=device_map, **source
        )
        transformer = layer_module(model, cut_model, cut, source, max_length, chat_template)
        pool = PoolingModule(transformer.get_embedding_dimension(), pooling_mode=_MODES.get(pooling, pooling))
        super().__init__(
            modules=[transformer, pool],
            device=device,
            prompts=dict(prompts) if prompts is not None else None,
            default_prompt_name=default_prompt_name,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
            model_card_data=_CardData(local_files_only=True),
        )
        self.source = model
        self.layer = cut.layer
        self.num_layers = cut.anatomy.num_layers
        self.norm: Norm = norm
        self.pooling: Pooling = pooling
        self._given = {
            "model": base_name(model, gguf_file),
            "revision": revision,
            "bidirectional": bidirectional,
            "adapters": tuple(base_name(adapter) for adapter in adapters),
            "chat_template": chat_template,
            "gguf_file": gguf_file,
        }
        self._truncation_said = False
        if bidirectional:
            self._turn_mask_off(cut)
        self._check_states(cut)

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

    def _create_model_card(self, path: str, *_: Any, **__: Any) -> None:
        """Write our own card: the generated one names this class and guesses the lineage."""
        parameters = sum(parameter.numel() for parameter in self.parameters())
        trained = "generated_from_trainer" in self.model_card_data.tags
        Path(path, "README.md").write_text(
            model_card(self.spec, parameters=parameters, trained=trained), encoding="utf8"
        )

    @classmethod
    def _load_with_module_classes(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as what it is on disk, a plain SentenceTransformer, when the trainer asks for it."""
        return SentenceTransformer._load_with_module_classes(*args, **kwargs)

    # --- encoding ---------------------------------------------------------------------------------------------------

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return embeddings as ``SentenceTransformer.encode`` does, or raise where one is not finite.

        Raises:
            OptionError: when there is nothing to encode.
            NotFiniteError: naming the layer and the first text whose states hold NaN or infinity.
        """
        single = self.is_singular_input(inputs)
        if not single and len(inputs) == 0:
            raise OptionError("`inputs` must hold at least one text, but got an empty list.")
        embeddings = super().encode(inputs, *args, **kwargs)
        self._check_finite([inputs] if single else inputs, embeddings, single)
        return embeddings

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return the features of a batch; empty texts alone get a masked token each, a text cut off is said once."""
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
                    f"Layer {self.layer} of {self._given['model']} gives NaN or infinity for {str(text)[:80]!r} "
                    f"in {self.dtype}. Load it with dtype='float32', or check the weights."
                )

    # --- checks at construction -------------------------------------------------------------------------------------

    def _turn_mask_off(self, cut: Cut) -> None:
        """Turn the causal mask off, and make sure by looking that the first token now sees the last."""
        model: Any = self[0].model
        if cut.layer > 0 and self._sees_ahead():
            raise OptionError(
                f"`bidirectional` must be False for {self._given['model']}: it has no causal mask to turn off."
            )
        model.config.is_causal = False
        for module in model.modules():
            if getattr(module, "is_causal", None) is True:
                module.is_causal = False
        if cut.layer > 0 and not self._sees_ahead():
            raise OptionError(
                f"`bidirectional` must be False for {self._given['model']}: its tokens see only those before them, "
                "whatever its config says (a state-space model, or attention with a mask of its own)."
            )

    @torch.no_grad()
    def _sees_ahead(self) -> bool:
        """Return whether the first token's states depend on the last token."""
        ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=self.device)
        states = self[0]({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["token_embeddings"]
        return not torch.equal(states[0, 0], states[1, 0])

    @torch.no_grad()
    def _check_states(self, cut: Cut) -> None:
        """Raise unless the states that will be pooled are those of the layer, seen by a hook on its block."""
        model: Any = self[0].model
        blocks: Any = model.get_submodule(cut.anatomy.blocks)
        convolved = getattr(model.config, "conv_kernel_size", 0)  # DeBERTa's first layer ends after a convolution
        if not len(blocks) or "text" not in self.modalities or convolved:
            return
        with _watched(blocks, cut) as seen:
            features = {
                key: value.to(self.device)
                for key, value in self.preprocess(["a b c"]).items()
                if isinstance(value, Tensor)
            }
            states = self[0](features)["token_embeddings"]
        expected = seen[0 if cut.layer == 0 else cut.layer - 1]
        for path in cut.anatomy.final if cut.norm == "final" else ():
            expected = model.get_submodule(path)(expected)
        if expected.shape != states.shape or not torch.allclose(
            expected, states, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
        ):
            raise CutError(
                f"{type(model).__name__} gives other states for layer {cut.layer} with norm={cut.norm!r} than its "
                "block does, so something stands between them that is not known here. "
                + ("Try norm='none'." if cut.norm == "final" else "Try norm='final'.")
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
        with torch.device("meta"):
            type(model)(model.config)  # a class learns which outputs it can record when its first model is made


class _CardData(SentenceTransformerModelCardData):
    """Card data whose name and revision, by which mteb files results, follow the encoder as it is when asked."""

    @property
    def model_name(self) -> str | None:
        return result_name(self.model.spec) if isinstance(self.model, LayerEncoder) else None

    @model_name.setter
    def model_name(self, value: str | None) -> None:
        """Pass over what the base class would store."""

    @property
    def base_model_revision(self) -> str | None:
        return result_revision(self.model.spec) if isinstance(self.model, LayerEncoder) else None

    @base_model_revision.setter
    def base_model_revision(self, value: str | None) -> None:
        """Pass over what the base class would store."""

    @property
    def base_model(self) -> str | None:
        return self.model._given["model"] if isinstance(self.model, LayerEncoder) else None  # type: ignore[return-value]

    @base_model.setter
    def base_model(self, value: str | None) -> None:
        """Pass over what the base class would store."""


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    check_choice("dtype", dtype, _DTYPES)
    return _DTYPES[dtype]


@contextlib.contextmanager
def _watched(blocks: Any, cut: Cut) -> Iterator[list[Tensor]]:
    """Collect what enters the first block, for layer 0, or what each pass through a block returns."""
    seen: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    if cut.layer == 0:
        handles = [blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    else:
        handles = [block.register_forward_hook(leave) for block in blocks]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
