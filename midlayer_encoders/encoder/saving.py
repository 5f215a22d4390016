"""Save an encoder as a folder that any ``SentenceTransformer`` loads, and verify it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from midlayer_encoders.encoder.identity import DescribedEncoder
from midlayer_encoders.encoder.inputs import probe_inputs
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.encoder.older_versions import LOADER_FILES, make_readable_by_older
from midlayer_encoders.encoder.several_layers import plain_on_disk
from midlayer_encoders.encoder.verification import close
from midlayer_encoders.errors import CutError
from midlayer_encoders.files import write_folder
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.cut import with_empty_decoder
from midlayer_encoders.models.load import has_automatic_class
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.validation import check_path

logger = logging.getLogger(__name__)


class SavableEncoder(DescribedEncoder):
    """A ``LayerEncoder``'s methods that write a plain folder."""

    def save(self, path: str | None, *args: Any, **kwargs: Any) -> None:
        """Write a folder that any ``SentenceTransformer`` loads, or raise if it would give other vectors.

        The folder is written and verified beside ``path``, and then replaces it; unrelated files in it stay.

        Raises:
            CutError: naming the reason.
            FolderError: if a file is in its place.
            DiskFullError: if the disk is full.
        """
        check_path("path", path)
        if path is not None:  # which the base class allows
            self.save_files(path, *args, **kwargs)

    def save_files(self, path: str, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Write a folder like :meth:`save`, and return the relative paths of its files."""
        self.check_export()
        home = Path(path)

        def write(folder: Path) -> None:
            with self._complete_on_disk(), plain_on_disk(self):
                super(SavableEncoder, self).save(str(folder), *args, **kwargs)
            if self.mixture and (folder / "README.md").exists():  # rewrite the card, which described other modules
                call = inspect.signature(SentenceTransformer.save).bind(self, str(folder), *args, **kwargs)
                self._create_model_card(str(folder), call.arguments.get("model_name"))
            make_readable_by_older(folder, self.max_seq_length)
            self.check_folder(folder, home)

        return write_folder(home, write, last=LOADER_FILES)

    @contextmanager
    def _complete_on_disk(self) -> Iterator[None]:
        """Make the first module save an encoder inside its encoder-decoder, which is the only class that loads it."""
        first: Any = self[0]
        model, entries, save = first.model, first.modality_config, first.save
        if not internals.lacks_folder(model):
            yield
            return
        complete: Any = with_empty_decoder(model)
        if complete is None:
            raise CutError(
                f"{type(model).__name__} is the encoder of an encoder-decoder, and a plain folder loads the complete "
                "model, which asks for a second text (`decoder_input_ids`). Use this encoder directly."
            )
        renamed = {key: {**entry, "method_output_name": _encoder_output(entry)} for key, entry in entries.items()}
        from_hidden_states = any(isinstance(entry["method_output_name"], list) for entry in renamed.values())
        complete.config.output_hidden_states = from_hidden_states

        def save_complete(*args: Any, **kwargs: Any) -> None:
            first.model, first.modality_config = complete, renamed
            try:
                save(*args, **kwargs)
            finally:
                first.model, first.modality_config = model, entries

        first.save = save_complete  # of this module only: the card describes the encoder
        try:
            with turn(model):
                yield
        finally:
            del first.save

    def check_folder(self, folder: Path, home: Path) -> None:
        """Raise unless ``SentenceTransformer`` gives this encoder's vectors from ``folder``, written for ``home``."""
        if self.transformer.training or self.tower_layers:
            return
        probes = probe_inputs(self.media, self.sampling_rate, self.tokenizer)
        inputs = [probe for probe in probes if probe is not None]
        plain: Any = SentenceTransformer(
            str(folder),
            device=str(self.device),
            model_kwargs={"dtype": self.dtype},
            trust_remote_code=self.options.trust_remote_code,
        )
        options: dict[str, Any] = {"batch_size": 1, "convert_to_tensor": True, "show_progress_bar": False}
        expected = self.encode(inputs, **options).float()
        if not close(expected, plain.encode(inputs, **options).float(), self.dtype):
            raise CutError(
                f"The folder {home} would give other vectors than this encoder when sentence-transformers loads it: "
                f"transformers loads {type(self.transformer).__name__} or its tokenizer differently from a folder. Use "
                "this encoder directly; nothing was written."
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
            "A plain folder pools every token of a text, and `skip_first` and `template_tokens=False` exclude some. "
            "Use this encoder directly, or pooling='last' with all tokens.": not self.counting.all,
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


def _encoder_output(entry: dict[str, Any]) -> Any:
    """Return the name of an encoder's output in the output of its encoder-decoder."""
    name = entry["method_output_name"]
    return f"encoder_{name}" if isinstance(name, str) else [f"encoder_{name[0]}", name[1]]
