"""A class for pipelines that call an object with batches, such as ``map_batches`` of Ray Data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midlayer_encoders._types import Layer
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.reading.media_inputs import check_taken
from midlayer_encoders.validation import check_text, check_texts


class LayerEmbedder:
    """Add the vectors of texts at many layers to a batch, one column ``layer_K`` per layer.

    A batch is a dict of arrays, a pandas ``DataFrame`` or a pyarrow ``Table``, and so is the result. The vectors are
    those of :meth:`~midlayer_encoders.LayerEncoder.encode_layers` for the texts of the batch, in float32.

    Args:
        model: a folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        layers: ``"all"``, or some layers.
        text_column: column of the texts.
        prompt_name: name of the encoder's prompt for each text; its default prompt by default.
        prompt: text of the prompt.
        options: as in :class:`~midlayer_encoders.EncoderOptions` if ``model`` is a name.
    """

    def __init__(
        self,
        model: str | LayerEncoder,
        *,
        layers: Sequence[Layer] | str = "all",
        text_column: str = "text",
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> None:
        self.text_column = check_text("text_column", text_column)
        self.encoder = load_encoder(model, options)
        check_taken("text", self.encoder.media, "a text", model=self.encoder.name)
        self.prompt = self.encoder.prompt_text(prompt_name, prompt, [""])
        self.layers = self.encoder.vector_reader(layers, prompt=self.prompt).layers

    def __call__(self, batch: Any) -> Any:
        """Return the batch with a column of vectors ``(N, D)`` for each layer."""
        names = list(batch.column_names if hasattr(batch, "column_names") else batch)
        if self.text_column not in names:
            hint = did_you_mean(self.text_column, names)
            raise OptionError(f"`text_column` must be one of {', '.join(names)}, but got {self.text_column!r}.{hint}")
        column = batch[self.text_column]
        cells = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
        cells = [str(cell) if isinstance(cell, str) else cell for cell in cells]  # strings of NumPy
        texts = check_texts(self.text_column, cells, minimum=0)
        vectors = self.encoder.encode_layers(texts, self.layers, prompt=self.prompt)
        columns = {f"layer_{layer}": rows for layer, rows in zip(self.layers, vectors, strict=True)}
        if hasattr(batch, "append_column"):  # pyarrow
            from midlayer_encoders.extras.vectors.embedding import vector_column

            for name, rows in columns.items():
                batch = batch.append_column(name, vector_column(rows))
            return batch
        if hasattr(batch, "assign"):  # pandas
            return batch.assign(**{name: list(rows) for name, rows in columns.items()})
        return {**batch, **columns}
