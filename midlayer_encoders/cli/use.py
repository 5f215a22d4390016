"""``midlayer export``, ``embed``, ``tune`` and ``distill``: write and train cut models, and write vectors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from midlayer_encoders._types import Precision
from midlayer_encoders.arguments import check_budget
from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli.find import STAGES
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError, pluralize
from midlayer_encoders.extras.settings import DistillSettings, TuneSettings, check_arguments, check_out, checked_folder

if TYPE_CHECKING:
    from midlayer_encoders.extras.export import Target
    from midlayer_encoders.extras.training import TuneResult
    from midlayer_encoders.tasks.training_rows import TrainingRows

_TITLES = {"training": "steps trained", "teacher": "texts read by the teacher"} | {
    f"{when}: {stage}": f"{title}, {when}" for when in ("teacher", "before", "after") for stage, title in STAGES.items()
}


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
    precision: Annotated[Precision, Option(help="Quantization recorded in the model card.")] = "float32",
    center: Annotated[Path | None, Option(help="File with a text per line, whose mean vector is subtracted.")] = None,
    overwrite: Annotated[bool, Option(help="Write into a folder that is not empty.")] = False,
    options: EncoderOptions,
) -> None:
    """Write a model cut at a layer to a folder for SentenceTransformer or another engine.

    Examples:
        midlayer export MODEL --layer 17 --out encoder
        midlayer export MODEL --layer 0.7 --for onnx --out encoder-onnx
    """
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

    encoder = LayerEncoder(model, layer, **options.non_defaults())
    cast(Any, encoder.model_card_data).precision = precision
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    exported = exporting.export_for(encoder, cast("Target", target), out, **flags)
    by_name = encoder.layers if isinstance(encoder.layers, Mapping) else {}
    number = ", ".join(f"{name} {number}" for name, number in by_name.items()) or encoder.layer
    shape = {"layer": number, "num_layers": encoder.num_layers, "parameters": parameters}
    _output.print_json(**{**asdict(exported), "folder": out, **shape})
    position = number if by_name else f"{number} of {encoder.num_layers}"
    _output.print_text(f"Layer {position}, {parameters / 1e6:.1f}M parameters, is in {out}.")
    if stock:
        _output.print_text(STOCK_NOTE)
    if exported.engine is not None:
        measure = "one minus cosine" if target == "gguf" else "relative error"
        int8_text = "" if exported.int8_cosine is None else f"; 8-bit: cosine {exported.int8_cosine:.4f}"
        comparison = f"({measure} {exported.error:.1e}{int8_text})"
        _output.print_text(f"{exported.engine} gives the encoder's vectors on sample inputs {comparison}.")
    if target == "vllm":
        _output.print_text(f"Serve it with:\n  {exporting.serving_line(encoder, out)}", wrap=False)
    if target == "sentence-transformers":
        _print_loading(out, ", trust_remote_code=True" if encoder.needs_trust(stock=stock) else "")
        if precision != "float32":
            _output.print_text(f'A folder does not quantize. Encode with: encode(texts, precision="{precision}")')
        line = mteb_line(encoder.spec, stock=stock)
        _output.print_text(f"mteb reads no name from a folder. Before evaluating it, set:\n  {line}", wrap=False)


def _print_loading(folder: Path, more: str = "") -> None:
    line = f"SentenceTransformer({json.dumps(str(folder), ensure_ascii=False)}{more})"
    _output.print_text(f"Load it with:\n  {line}", wrap=False)


@command("Use it")
def embed(
    *,
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
    budget: Any = int(token_budget) if token_budget.lstrip("-").isdigit() else token_budget
    check_out(out)
    check_budget(budget)
    kind, _, items = inputs.read()
    items = items[: inputs.limit]
    source: Any = model
    if execution.executor is None:
        source, options = _arguments.load_model(model, options), EncoderOptions()
    from midlayer_encoders.extras import vectors

    unit = "waveforms" if kind == "audio" else kind
    titles = {"embedding": f"Embedding {unit}", "writing": "Writing vectors", "units": "units done"}
    with _progress.show_progress(titles) as progress, execution.open(out.with_name(f"{out.name}.jobs")) as executor:
        settings: dict[str, Any] = {"layers": layers, "token_budget": budget, "executor": executor}
        written = vectors.embed(source, items, out, progress=progress, **settings, **options.non_defaults())
    _output.print_json(path=written, inputs=len(items), kind=kind)
    _output.print_text(f"Vectors of {pluralize(len(items), unit.removesuffix('s'))} are in {written}.", wrap=False)


@dataclass(kw_only=True)
class Training:
    """Flags of every kind of training except its settings."""

    model: _arguments.Model
    layer: _arguments.LayerNumber
    out: Annotated[Path, Option(help="Folder for model, page and frames: new, or of an interrupted run.")]
    data: _arguments.Data
    tasks: Annotated[str, Option(help="Tasks scored before and after: names, builtin or paths; or none.")] = "builtin"

    def __post_init__(self) -> None:
        checked_folder(self.out)

    def run(
        self,
        function: str,
        data: Path | None,
        rows: TrainingRows,
        *,
        settings: TuneSettings | DistillSettings,
        options: EncoderOptions,
        **keywords: Any,
    ) -> None:
        """Train a model with progress, and print its scores and the line that loads it.

        Args:
            function: ``tune`` or ``distill``.
            data: its third argument.
            rows: the rows of that data, to reject wrong settings and tasks before torch is imported.
            settings: of the training.
            options: of the encoder.
            keywords: other arguments of the function.
        """
        from midlayer_encoders.tasks.training_rows import scored_tasks

        tasks = () if self.tasks == "none" else self.tasks.split(",")
        rows.split(settings.held_out, settings.seed)
        scored_tasks(tasks, self.data.columns(), rows)
        _arguments.check_model(self.model, options)
        from midlayer_encoders.extras import training  # imports torch

        keywords |= {
            "out": self.out,
            "tasks": tasks,
            "settings": settings,
            **asdict(self.data),
            **options.non_defaults(),
        }
        with _progress.show_progress(_TITLES) as progress:
            result: TuneResult = getattr(training, function)(
                self.model, self.layer, data, progress=progress, **keywords
            )
        words, folder = result.words(), result.folder
        values: dict[str, Any] = {"folder": folder, "model": result.model_folder, "words": words, "notes": result.notes}
        _output.print_outcome([words, *result.notes], report=folder / "report.html", **values)
        _print_loading(result.model_folder)


@command("Use it", dtype="float32")
def tune(
    *,
    training: Training,
    settings: TuneSettings,
    pairs: Annotated[
        Path | None, Option(help="Anchors and positives, scored pairs, or labeled texts; see docs/tuning.md.")
    ] = None,
    texts: Annotated[Path | None, Option(help="With --objective mntp: a text per line, or a column text.")] = None,
    options: EncoderOptions,
) -> None:
    """Cut a model at a layer, fine-tune it, and show how every layer changed; a stopped run continues.

    Examples:
        midlayer tune MODEL --layer 17 --pairs pairs.jsonl --out tuned
        midlayer tune MODEL --layer 17 --pairs pairs.csv --lora 16 --out tuned
    """
    from midlayer_encoders.tasks.training_rows import read_rows

    rows = read_rows(pairs, texts, training.data.columns(), objective=settings.objective)
    training.run("tune", pairs, rows, texts=texts, settings=settings, options=options)


@command("Use it", dtype="float32")
def distill(
    *,
    training: Training,
    settings: DistillSettings,
    texts: Annotated[Path, Option(help="A text per line, or a table with a column text; no labels are needed.")],
    limit: _arguments.Limit = None,
    teacher: Annotated[str | None, Option(help="Another embedding model; by default MODEL itself, uncut.")] = None,
    teacher_layer: Annotated[
        Any, Option(parser=_arguments.parse_layer, metavar="TEXT", help="Layer of the teacher, as in --layer.")
    ] = "-1",
    teacher_recipe: Annotated[str | None, Option(help="Recipe of the teacher, such as word-echo.")] = None,
    options: EncoderOptions,
) -> None:
    """Cut a model at a layer, and train it from texts alone to return the vectors of the whole model.

    Every layer is scored before and after; a stopped run continues.

    Examples:
        midlayer distill MODEL --layer 12 --texts texts.txt --out small
        midlayer distill LM --layer -1 --texts t.txt --teacher-recipe echo --out e
    """
    from midlayer_encoders.tasks.training_rows import read_training_texts

    rows = read_training_texts(texts, training.data.columns(), limit)
    of_teacher = {"teacher": teacher, "teacher_layer": teacher_layer, "teacher_recipe": teacher_recipe}
    training.run("distill", texts, rows, limit=limit, settings=settings, options=options, **of_teacher)
