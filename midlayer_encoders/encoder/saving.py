"""Save an encoder as a folder that any ``SentenceTransformer`` loads, and verify it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Transformer, WeightedLayerPooling
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import nn

from midlayer_encoders.encoder.build import BuiltEncoder
from midlayer_encoders.encoder.first_module import CombinedLayers, LayersTransformer, MemoryModule
from midlayer_encoders.encoder.inputs import probe_features, probe_inputs
from midlayer_encoders.encoder.older_versions import LOADER_FILES, make_readable_by_older
from midlayer_encoders.encoder.stock_folder import STOCK_TEMPLATE, stock_form, stock_problem
from midlayer_encoders.encoder.verification import close, temporarily
from midlayer_encoders.errors import CutError
from midlayer_encoders.files import read_json, write_folder, write_json
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.cut import with_empty_decoder
from midlayer_encoders.models.load import has_automatic_class
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.reading import joined_readings
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.validation import check_flag, check_path

# Characters that tokenizers normalize, split or mark in different ways.
_UNUSUAL_TEXT = "Cafe\u0301 ½ 12345  <s> don't\n\tDon’t straße 東京 한국 👍🏽 ﬁ \u00a0x_y"

CODE_NOTE = (
    f"The folder contains the code that reads two places, {Path(joined_readings.__file__).name}: load it with "
    "trust_remote_code=True."
)
_STOCK_HINT = " A folder without code, at the cost of points: save_pretrained(path, stock=True)."
STOCK_NOTE = "The folder contains no code, and another encoder than this one: docs/recipes.md says what it costs."

logger = logging.getLogger(__name__)


class SavableEncoder(BuiltEncoder):
    """A ``LayerEncoder``'s methods that write a plain folder."""

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
            self.save_files(path, *args, stock=stock, **kwargs)

    def save_pretrained(self, path: str, *args: Any, stock: bool = False, **kwargs: Any) -> None:
        """Write a folder like :meth:`save`, and log whether it contains code, unless it is a checkpoint."""
        self.save(path, *args, stock=stock, **kwargs)
        if path is not None and self.readings is not None and not self.transformer.training:
            logger.warning(STOCK_NOTE if stock else CODE_NOTE + ("" if stock_problem(self) else _STOCK_HINT))

    def save_files(self, path: str, *args: Any, stock: bool = False, **kwargs: Any) -> tuple[str, ...]:
        """Write a folder like :meth:`save`, and return the relative paths of its files."""
        self.check_export()
        home = Path(path)
        form = stock_form(self) if check_flag("stock", stock) else None

        def write(folder: Path) -> None:
            if form is not None:
                SentenceTransformer.save(form, str(folder), *args, **kwargs)
                if (folder / "README.md").exists():  # the card of the base class describes no layer
                    text = self.model_card_text(stock_template=STOCK_TEMPLATE)
                    (folder / "README.md").write_text(text, encoding="utf8")
                make_readable_by_older(folder, form.max_seq_length)
                self.check_folder(folder, home, form)
                return
            with self._complete_on_disk(), _plain_on_disk(self):
                super(SavableEncoder, self).save(str(folder), *args, **kwargs)
            if self.mixture and (folder / "README.md").exists():  # rewrite the card, which described other modules
                call = inspect.signature(SentenceTransformer.save).bind(self, str(folder), *args, **kwargs)
                self._create_model_card(str(folder), call.arguments.get("model_name"))
            if self.readings is not None:
                _name_code(folder)
            make_readable_by_older(folder, self.max_seq_length)
            self.check_folder(folder, home)

        with internals.without_bars():
            return write_folder(home, write, last=LOADER_FILES)

    @contextmanager
    def _complete_on_disk(self) -> Iterator[None]:
        """Make the first module save an encoder inside its encoder-decoder, which is the only class that loads it."""
        first: Any = self[0]
        model = first.model
        save = first.save
        if not internals.lacks_folder(model):
            yield
            return
        complete: Any = with_empty_decoder(model)
        if complete is None:
            raise CutError(
                f"{type(model).__name__} is part of an encoder-decoder, which a plain folder loads whole, and which "
                "needs a second text (`decoder_input_ids`). Use this encoder directly."
            )
        output = next(iter(first.modality_config.values()))["method_output_name"]
        renamed = f"encoder_{output}" if isinstance(output, str) else [f"encoder_{output[0]}", output[1]]
        entries = {key: {**entry, "method_output_name": renamed} for key, entry in first.modality_config.items()}
        complete.config.output_hidden_states = not isinstance(output, str)

        def save_complete(*args: Any, **kwargs: Any) -> None:
            with temporarily(first, model=complete, modality_config=entries):
                save(*args, **kwargs)

        first.save = save_complete  # of this module only: the card describes the encoder
        try:
            with turn(model):
                yield
        finally:
            del first.save

    def check_folder(self, folder: Path, home: Path, form: SentenceTransformer | None = None) -> None:
        """Raise unless ``SentenceTransformer`` gives the vectors of this encoder, or of its stock form, from a folder.

        Args:
            folder: the folder as it was written.
            home: the folder that it will become, for errors.
            form: the stock form, if the folder contains it.
        """
        source: Any = form or self
        if self.transformer.training or self.tower_layers:
            return
        probes = probe_inputs(self.media, self.sampling_rate, self.tokenizer)
        inputs = [probe for probe in probes if probe is not None]
        plain: Any = SentenceTransformer(
            str(folder),
            device=str(self.device),
            model_kwargs={"dtype": self.dtype},
            trust_remote_code=self.needs_trust(stock=form is not None),
        )
        options: dict[str, Any] = {"batch_size": 1, "convert_to_tensor": True, "show_progress_bar": False}
        expected = source.encode(inputs, **options).float()
        is_equal = close(expected, plain.encode(inputs, **options).float(), self.dtype)
        if is_equal and self.tokenizer is not None:
            is_equal = _unusual_ids(source) == _unusual_ids(plain)
        if not is_equal:
            raise CutError(
                f"The folder {home} would give other vectors than this encoder: transformers loads "
                f"{type(self.transformer).__name__} or its tokenizer differently. Use this encoder directly."
            )

    def check_export(self) -> None:
        """Raise if no plain folder gives this encoder's vectors, and name the reason."""
        model: Any = self[0].model
        name = type(model).__name__
        if isinstance(self[0], MemoryModule):
            self[0].save("a folder")
        fixed_window = getattr(model, "main_input_name", "") == "input_features" and self.pooling != "cls"
        sensitive_to_padding = self.media == ["text"] and suffers_from_padding(model)
        problems = {
            f"{name} is not cut, because a cut would change its layers: hooks read them, which a plain folder does not "
            "contain. Use this encoder directly.": getattr(self[0], "uncut", False),
            "A plain folder pools every token. Use this encoder directly, or pool all tokens: leave out `skip_first`, "
            "`skip_special` and template_tokens=False.": not self.counting.all,
            f"The states of {name} fill a fixed window, and the pooling of a plain folder cannot leave out those "
            "after the end of the waveform. Use this encoder directly, or pooling='cls'.": fixed_window,
            f"{name} runs without its causal mask only where a batch is padded, which a plain folder does not ensure. "
            "Use this encoder directly, or omit `bidirectional`.": wants_padding(model),
            f"Padding changes the states of a text in {name}, and a plain folder pads batches. Use this encoder "
            "directly, which runs texts of equal length together.": sensitive_to_padding,
            f"{name} has no automatic class in transformers, which a plain folder needs. Use this encoder directly, "
            "or export the joint model without `tower`.": not has_automatic_class(model.config),
        }
        for problem, applies in problems.items():
            if applies:
                raise CutError(problem)
        if suffers_from_padding(model) or internals.has_mask_of_states(model):
            logger.warning("A plain folder pools the padding of shorter waveforms: encode with batch_size=1 there.")


def _unusual_ids(encoder: SentenceTransformer) -> list[int]:
    ids: list[int] = encoder.tokenizer(_UNUSUAL_TEXT, verbose=False)["input_ids"]
    return ids


def _name_code(folder: Path) -> None:
    """Name the folder's copy of the pooling of two readings in its ``modules.json``."""
    source = Path(joined_readings.__file__)
    modules = read_json(folder / "modules.json")
    for entry in modules:
        if entry["type"].endswith(f".{joined_readings.JoinedReadings.__name__}"):
            entry["type"] = f"{source.stem}.{joined_readings.JoinedReadings.__name__}"
    write_json(folder / "modules.json", modules)


# --- several layers ---------------------------------------------------------------------------------------------------


@contextmanager
def _plain_on_disk(encoder: SentenceTransformer) -> Iterator[None]:
    """Replace the modules of an encoder of several layers by plain ones while it is saved.

    Raises:
        CutError: if no plain modules combine the layers in the same way.
    """
    first: Any = encoder[0]
    if not isinstance(first, LayersTransformer):
        yield
        return
    _, pooling, combined, *later = cast(Any, list(encoder))
    plain = [first, *_plain_modules(first, pooling, combined, *_hidden_state_indices(first)), *later]
    with (
        turn(first.model),
        temporarily(first.model.config, output_hidden_states=True),
        temporarily(first, __class__=Transformer),
        temporarily(encoder, _modules={str(number): module for number, module in enumerate(plain)}),
    ):
        yield


@torch.no_grad()
def _hidden_state_indices(first: LayersTransformer) -> tuple[list[int], int]:
    """Return the indices of the layers among the model's hidden states, and the number of hidden states.

    Hidden states differ between families, so they are compared with the states of the layers.
    """
    model: Any = first.model
    name = type(model).__name__
    if internals.lacks_folder(model):
        raise CutError(
            f"{name} is part of an encoder-decoder, of which a plain folder reads one layer. Use this encoder directly."
        )
    probe, _ = probe_features(first)
    with ExitStack() as without_dropout:
        for module in model.modules():
            without_dropout.enter_context(temporarily(module, training=False))
        states = first(dict(probe))["token_embeddings"].chunk(len(first.layers), dim=-1)
        with temporarily(model.config, output_hidden_states=True):
            hidden = tuple(Transformer.forward(first, dict(probe)).get("all_layer_embeddings") or ())
    indices: list[int] = []
    for layer, expected in zip(first.layers, states, strict=True):
        # The nearest: with massive activations, the states of two layers may both be close.
        distances = [
            float((expected - entry).norm()) if entry.shape == expected.shape else torch.inf for entry in hidden
        ]
        index = min(range(len(hidden)), key=distances.__getitem__, default=0)
        if not hidden or index in indices or not close(expected, hidden[index]):
            reason = "it is not among the hidden states"
            if first.norm == "final" and first.anatomy.final:
                reason = "a plain folder cannot apply the final norm to each layer (norm='none' may be exported)"
            raise CutError(
                f"Layers {', '.join(map(str, first.layers))} of {name} cannot be combined in a plain folder: layer "
                f"{layer} is not available because {reason}. Use this encoder directly, or export one layer."
            )
        indices.append(index)
    if len({entry.shape for entry in hidden[min(indices) :]}) > 1:
        raise CutError(f"The hidden states of {name} have several widths, which a plain folder cannot combine.")
    return indices, len(hidden)


def _plain_modules(
    first: LayersTransformer, pooling: Any, combined: CombinedLayers, indices: Sequence[int], count: int
) -> list[nn.Module]:
    """Return the plain modules after the transformer for the layers at these indices of ``count`` hidden states."""
    mode = pooling.pooling_mode
    width = combined.embedding_dimension
    if not pooling.include_prompt:
        raise CutError("A plain folder of several layers pools the tokens of a prompt. Use this encoder directly.")
    if combined.combine == "mean":
        if mode == "max":
            raise CutError(
                "A plain folder averages layers before pooling='max'. Use another pooling, or combine='concat'."
            )
        shares = dict(zip(indices, combined.weights, strict=True))
        return [_weighted_mean(width, count, shares), PoolingModule(width, pooling_mode=mode)]
    if mode == "cls":
        raise CutError("A plain folder cannot concatenate layers with pooling='cls'. Use the mean of the layers.")
    width //= len(indices)
    modules: list[nn.Module] = []
    for number, index in enumerate(indices, 1):
        # `Pooling` reads "cls_token_embeddings" as the first token and puts it before its own vector.
        output = "cls_token_embeddings" if number < len(indices) else "sentence_embedding"
        modes = mode if number == 1 else ("cls", mode)
        modules += [_weighted_mean(width, count, {index: 1.0}), PoolingModule(width, pooling_mode=modes)]
        if number < len(indices) or number > 2:  # the last one declares the width of the vector
            size = number * width
            copied: dict[str, Any] = {"init_weight": torch.eye(size), "module_output_name": output}
            modules.append(Dense(size, size, bias=False, activation_function=nn.Identity(), **copied))
    return [module.to(next(first.parameters()).device) for module in modules]


def _weighted_mean(width: int, count: int, shares: dict[int, float]) -> nn.Module:
    """Return a module that takes the weighted mean of hidden states, with weights by index."""
    start = min(shares)
    weights = nn.Parameter(torch.tensor([shares.get(index, 0.0) for index in range(start, count)]))
    return WeightedLayerPooling(width, num_hidden_layers=count - 1, layer_start=start, layer_weights=weights)
