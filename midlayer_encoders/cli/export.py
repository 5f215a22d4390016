"""``midlayer export`` and ``embed``: write a cut model to a folder, or the vectors of every layer to a file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Context, Option

from midlayer_encoders._types import Precision
from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError, counted

if TYPE_CHECKING:
    from midlayer_encoders.extras.export import Target


@command("Use it", device="cpu")
def export(
    *,
    model: _arguments.Model,
    layer: _arguments.LayerNumber,
    out: Annotated[Path, Option(help="Folder to write; it must be new or empty.")],
    target: Annotated[
        str, Option("--for", help="sentence-transformers, vllm, onnx or gguf; see docs/export.md.")
    ] = "sentence-transformers",
    int8: Annotated[bool, Option("--int8", help="onnx: also write an 8-bit graph. gguf: Q8_0, not F16.")] = False,
    stock: Annotated[bool, Option("--stock", help="word-echo: write the nearest encoder without code.")] = False,
    precision: Annotated[Precision, Option(help="Of stored vectors: noted on the card.")] = "float32",
    center: Annotated[Path | None, Option(help="File with a text per line, whose mean vector is subtracted.")] = None,
    overwrite: Annotated[bool, Option(help="Write into a folder that is not empty.")] = False,
    options: EncoderOptions,
) -> None:
    """Write a model cut at a layer to a folder for SentenceTransformer or another engine.

    Examples:
        midlayer export MODEL --layer 17 --out encoder
        midlayer export MODEL --layer 0.7 --for onnx --out encoder-onnx
    """
    from midlayer_encoders.extras.settings import check_arguments
    from midlayer_encoders.tasks.text_lists import read_texts

    flags = {"overwrite": overwrite, "int8": int8, "stock": stock}
    if precision != "float32" and target != "sentence-transformers":
        raise OptionError(f"`--precision` cannot be combined with --for {target}, which writes no code for it.")
    check_arguments(target, out, **flags)
    if center is not None:
        options = replace(options, center=tuple(read_texts(center)))
    _arguments.check_model(model, options)
    from midlayer_encoders.encoder.saving import STOCK_NOTE
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.encoder.spec import mteb_line
    from midlayer_encoders.extras import export as exporting  # imports torch

    encoder = LayerEncoder(model, layer, **options.changed())
    cast(Any, encoder.model_card_data).precision = precision
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    exported = exporting.export_for(encoder, cast("Target", target), out, **flags)
    by_name = encoder.layers if isinstance(encoder.layers, Mapping) else {}
    layer_numbers = ", ".join(f"{name} {number}" for name, number in by_name.items())
    shape = {"layer": layer_numbers or encoder.layer, "num_layers": encoder.num_layers, "parameters": parameters}
    _output.print_result(**{**asdict(exported), "folder": out, **shape})
    position = layer_numbers or f"{encoder.layer} of {encoder.num_layers}"
    _output.print_text(f"Layer {position}, {parameters / 1e6:.1f}M parameters, is in {out}.")
    if stock:
        _output.print_text(STOCK_NOTE)
    if exported.engine is not None:
        measure = "one minus cosine" if target == "gguf" else "relative error"
        int8_text = "" if exported.int8_cosine is None else f"; 8-bit: cosine {exported.int8_cosine:.4f}"
        comparison = f"({measure} {exported.error:.1e}{int8_text})"
        _output.print_text(f"{exported.engine} gives the encoder's vectors on sample inputs {comparison}.")
    if target == "vllm":
        _output.print_text("Serve it with:")
        _output.print_text(f"  {exporting.serving_line(encoder, out)}", wrap=False)
    if target == "sentence-transformers":
        _output.print_text("Load it with:")
        trust = ", trust_remote_code=True" if encoder.needs_trust(stock=stock) else ""
        _output.print_text(f"  SentenceTransformer({json.dumps(str(out), ensure_ascii=False)}{trust})", wrap=False)
        if precision != "float32":
            _output.print_text(f'A folder does not quantize. Encode with: encode(texts, precision="{precision}")')
        _output.print_text("mteb reads no name from a folder. Before evaluating it, set:")
        _output.print_text(f"  {mteb_line(encoder.spec, stock=stock)}", wrap=False)


@command("Use it")
def embed(
    *,
    context: Context,
    model: _arguments.Model,
    out: Annotated[Path, Option(help="vectors.npy, .safetensors or .parquet.")],
    inputs: _arguments.Inputs,
    layers: _arguments.Layers = "all",
    token_budget: Annotated[str, Option(help="Tokens in a batch; auto finds the fastest size.")] = "auto",
    execution: _arguments.Execution,
    options: EncoderOptions,
) -> None:
    """Write the vectors of texts, images or audio at many layers to a file, from one pass of the model.

    Examples:
        midlayer embed MODEL --texts texts.txt --out vectors.parquet
        midlayer embed MODEL --texts texts.txt --layers 0,0.5,-1 --out v.npy
    """
    from midlayer_encoders.arguments import check_budget
    from midlayer_encoders.extras.settings import check_out

    budget: Any = int(token_budget) if token_budget.lstrip("-").isdigit() else token_budget
    check_out(out)
    check_budget(budget)
    kind, _, items = inputs.read(context)
    items = items[: inputs.limit]
    source: Any = model
    if execution.executor is None:
        source, options = _arguments.load_model(model, options), EncoderOptions()
    from midlayer_encoders.extras import vectors

    unit = "waveforms" if kind == "audio" else kind
    titles = {"embedding": f"Embedding {unit}", "writing": "Writing vectors", "units": "units done"}
    with _progress.show_progress(titles) as progress, execution.open(out.with_name(f"{out.name}.jobs")) as executor:
        settings: dict[str, Any] = {"layers": layers, "token_budget": budget, "executor": executor}
        written = vectors.embed(source, items, out, progress=progress, **settings, **options.changed())
    _output.print_result(path=written, inputs=len(items), kind=kind)
    _output.print_text(f"Vectors of {counted(len(items), unit.removesuffix('s'))} are in {written}.", wrap=False)
