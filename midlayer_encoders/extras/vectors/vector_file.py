"""Write the vectors of inputs to a file, in this process or as units of an executor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midlayer_encoders._types import Layer, Progress
from midlayer_encoders.arguments import TokenBudget, check_budget
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.extras.settings import check_out
from midlayer_encoders.extras.vectors.embedding import EmbedRun
from midlayer_encoders.validation import check_list, check_progress


def embed(
    model: str | LayerEncoder,
    inputs: Sequence[Any],
    out: Path | str,
    *,
    layers: Sequence[Layer] | str = "all",
    prompt_name: str | None = None,
    prompt: str | None = None,
    token_budget: TokenBudget = "auto",
    executor: Any = None,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Write the vectors of inputs at many layers to a file, from one pass over each input, and return its path.

    Vectors are first stored in ``<out>.part``, so that the same call resumes after an interruption. The folder is
    removed when the file is complete; until then the disk holds the vectors twice.

    Args:
        model: a folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        inputs: texts, or images or audio for a model that takes them.
        out: ``.npy`` of shape ``(L, N, D)`` with a ``.json`` next to it, ``.safetensors`` or ``.parquet``.
            Its parent folder must exist.
        layers: ``"all"``, or some layers; they are written in ascending order.
        prompt_name: name of the encoder's prompt for each text; its default prompt by default.
        prompt: text of the prompt.
        token_budget: tokens per batch; ``"auto"`` chooses the fastest size for the device.
        executor: where blocks of inputs are embedded: anything with ``submit(function, *arguments)`` that returns
            something with ``result()`` (``docs/scale.md``); ``None`` for this process. ``model`` is then a name, and
            ``out`` is in a folder that all machines share.
        progress: called with the stages ``"embedding"`` (inputs) and ``"writing"`` (vectors); with an executor, with
            ``"units"``.
        options: as in :class:`~midlayer_encoders.EncoderOptions` if ``model`` is a name; with an encoder they must
            match its own.
    """
    budget = check_budget(token_budget)
    check_progress(progress)
    path = check_out(out)
    items = check_list("inputs", inputs, "inputs")
    if executor is not None:
        from midlayer_encoders.extras.scaling.vector_units import embed_units

        arguments = {
            "out": path,
            "layers": layers,
            "prompt_name": prompt_name,
            "prompt": prompt,
            "token_budget": budget,
        }
        embed_units(model, items, arguments, options, executor, progress)
        return path
    EmbedRun.of(load_encoder(model, options), items, path, layers, prompt_name, prompt, budget, progress).run()
    return path
