"""Save an encoder as a folder that any ``SentenceTransformer`` loads, and verify it."""

import logging
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from midlayer_encoders.encoder.build import BuiltEncoder
from midlayer_encoders.encoder.first_module import MemoryModule, UncutTransformer
from midlayer_encoders.encoder.inputs import probe_inputs
from midlayer_encoders.encoder.stock_folder import STOCK_TEMPLATE, stock_form, stock_problem
from midlayer_encoders.encoder.verification import close
from midlayer_encoders.errors import CutError
from midlayer_encoders.files import read_json, write_folder, write_json
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.load import has_automatic_class
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.models.quantized import keep_weights_unchanged
from midlayer_encoders.reading import joined_readings
from midlayer_encoders.validation import check_flag, check_path

LOADER_FILES = ("model.safetensors.index.json", "model.safetensors", "modules.json", "config.json")
"""Files that loaders require, which are written last. vLLM would read the shards that a previous index lists."""

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
                self.check_folder(folder, home, form)
                return
            super(SavableEncoder, self).save(str(folder), *args, **kwargs)
            if self.readings is not None:
                _name_code(folder)
            self.check_folder(folder, home)

        with internals.without_bars():
            return write_folder(home, write, last=LOADER_FILES)

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
        keep_weights_unchanged(plain)
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
            "contain. Use this encoder directly.": isinstance(self[0], UncutTransformer),
            "A plain folder pools every token. Use this encoder directly, or pool all tokens: leave out `skip_first`, "
            "`skip_special` and template_tokens=False.": not self.counting.all,
            f"The states of {name} fill a fixed window, and the pooling of a plain folder cannot leave out those "
            "after the end of the waveform. Use this encoder directly, or pooling='cls'.": fixed_window,
            f"{name} runs without its causal mask only where a batch is padded, which a plain folder does not ensure. "
            "Use this encoder directly, or omit `bidirectional`.": wants_padding(model),
            f"Padding changes the states of a text in {name}, and a plain folder pads batches. Use this encoder "
            "directly, which runs texts of equal length together.": sensitive_to_padding,
            f"{name} is part of an encoder-decoder, which a plain folder loads whole. Use this encoder directly.": (
                internals.lacks_folder(model)
            ),
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
