"""``midlayer embed`` and ``metrics``: vectors and metrics of every layer on texts, images or audio."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

from typer import BadParameter, Context, Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import counted

_METRIC_FILES = ["metrics.parquet", "metrics.csv", "metrics.png"]


@command("Use it")
def embed(
    *,
    context: Context,
    model: _arguments.Model,
    out: Annotated[Path, Option(help="vectors.npy, .safetensors or .parquet; with --ray a new folder.")],
    texts: _arguments.OptionalTexts = None,
    images: _arguments.OptionalImages = None,
    audio: _arguments.OptionalAudio = None,
    skip_bad: _arguments.SkipBad = False,
    layers: _arguments.Layers = "all",
    engine: _arguments.EngineName = "transformers",
    text_column: _arguments.TextColumn = None,
    limit: _arguments.Limit = None,
    token_budget: Annotated[str, Option(help="Tokens in a batch; auto finds the fastest size.")] = "auto",
    devices: _arguments.Devices = 1,
    num_nodes: _arguments.NumNodes = 1,
    ray: Annotated[bool, Option("--ray", help="Embed parquet (--texts) in actors of Ray, on a cluster.")] = False,
    concurrency: Annotated[int | None, Option(min=1, help="With --ray: actors; by default one per GPU or CPU.")] = None,
    batch_size: Annotated[int, Option(min=1, help="With --ray: texts in a file of the output.")] = 1024,
    options: EncoderOptions,
) -> None:
    """Write the vectors of texts, images or audio at many layers to a file, from one pass of the model.

    Examples:
        midlayer embed MODEL --texts texts.txt --out vectors.parquet
        midlayer embed MODEL --texts texts.txt --layers 0,0.5,-1 --out v.npy
    """
    from midlayer_encoders import vectors

    budget: Any = int(token_budget) if token_budget.lstrip("-").isdigit() else token_budget
    if ray:
        reason = "with --ray, which writes vectors of texts: run it without --ray"
        _arguments.refuse_flags(context, reason, "images", "audio", "skip_bad", "engine")
        _arguments.refuse_flags(context, "with --ray: use --concurrency", "devices", "num_nodes")
        if texts is None:
            raise BadParameter("name the parquet file or folder with --texts", param_hint="--ray")
        _embed_with_ray(
            model,
            texts,
            out,
            layers=layers,
            text_column=text_column or "text",
            token_budget=budget,
            batch_size=batch_size,
            concurrency=concurrency,
            limit=limit,
            **options.changed(),
        )
        return
    _arguments.refuse_flags(context, "without --ray", "concurrency", "batch_size")
    _arguments.writes_results(devices, num_nodes)
    vectors.check_out(out)  # before anything is loaded
    paths = {"texts": texts, "images": images, "audio": audio}
    kind, _, inputs = _arguments.read_inputs(context, paths, text_column=text_column, skip_bad=skip_bad)
    inputs = inputs[:limit]
    encoder = _arguments.load_model(model, options, devices=devices, num_nodes=num_nodes)
    unit = "waveforms" if kind == "audio" else kind
    number = counted(len(inputs), unit.removesuffix("s"))
    with _progress.show_progress({"embedding": f"Embedding {unit}", "writing": "Writing vectors"}) as progress:
        written = vectors.embed(
            encoder,
            inputs,
            out,
            layers=layers,
            engine=engine,
            token_budget=budget,
            devices=devices,
            num_nodes=num_nodes,
            progress=progress,
        )
    _output.print_result(path=written, inputs=len(inputs), kind=kind)
    _output.print_text(f"Vectors of {number} are in {written}.", wrap=False)


def _embed_with_ray(model: str, source: Path, out: Path, **arguments: Any) -> None:
    """Embed parquet files with Ray, and print where the vectors are."""
    import pyarrow.dataset

    from midlayer_encoders.vectors import ray

    # Ray prints lines about lost workers, which it replaces.
    with _progress.show_progress({"embedding": "Embedding texts"}) as progress, redirect_stdout(io.StringIO()):
        written = ray.embed_parquet(model, source, out, progress=progress, **arguments)
    num_texts = pyarrow.dataset.dataset(written).count_rows()
    _output.print_result(path=written, inputs=num_texts, kind="texts")
    _output.print_text(f"Vectors of {counted(num_texts, 'text')} are in {written}.", wrap=False)


@command("Look inside", norm="none")
def metrics(
    *,
    context: Context,
    model: _arguments.Model,
    out: _arguments.Out = None,
    texts: _arguments.OptionalTexts = None,
    images: _arguments.OptionalImages = None,
    audio: _arguments.OptionalAudio = None,
    skip_bad: _arguments.SkipBad = False,
    metric_names: _arguments.MetricNames = "paper",
    layers: _arguments.Layers = "all",
    text_column: _arguments.TextColumn = None,
    wikitext: Annotated[bool, Option(help="Drop headings and paragraphs under 30 tokens.")] = False,
    limit: _arguments.Limit = None,
    seed: _arguments.Seed = 0,
    devices: _arguments.Devices = 1,
    num_nodes: _arguments.NumNodes = 1,
    options: EncoderOptions,
) -> None:
    """Measure every layer of a model on your texts, images or audio.

    Examples:
        midlayer metrics MODEL --texts texts.txt --out runs/metrics
        midlayer metrics MODEL --images photos/ --metrics all --out runs/m
    """
    from midlayer_encoders import measure
    from midlayer_encoders.measuring import num_passes
    from midlayer_encoders.media.text_lists import wikitext_paragraphs
    from midlayer_encoders.report import write_metrics_figure
    from midlayer_encoders.report.results import write_frame

    is_first = _arguments.writes_results(devices, num_nodes)
    out = _arguments.results_folder(out, "metrics", model)
    names = _arguments.parse_metrics(metric_names)
    passes = num_passes(names)  # refuses an unknown name before the model is loaded
    paths = {"texts": texts, "images": images, "audio": audio}
    kind, path, inputs = _arguments.read_inputs(context, paths, text_column=text_column, skip_bad=skip_bad)
    encoder = _arguments.load_model(model, options, devices=devices, num_nodes=num_nodes)
    if wikitext:  # counts the tokens of the whole paragraph, whatever --max-length is
        inputs = wikitext_paragraphs(inputs, lambda line: len(encoder.tokenizer(line, verbose=False)["input_ids"]))
    inputs = inputs[:limit]
    number = counted(len(inputs), "waveform" if kind == "audio" else kind.removesuffix("s"))
    title = f"{number}, {counted(passes, 'pass', 'passes')}"
    with _progress.show_progress({"measuring": title}) as progress:
        frame = measure(
            encoder,
            inputs,
            metrics=names,
            layers=layers,
            seed=seed,
            dataset=path.stem,
            devices=devices,
            num_nodes=num_nodes,
            progress=progress,
        )
    if not is_first:
        return
    for name in ("metrics.parquet", "metrics.csv"):
        write_frame(frame, out / name)
    write_metrics_figure(frame, out / "metrics.png")
    values = frame.select("layer", "name", "value")
    _output.print_result(folder=out, files=_METRIC_FILES, values=values.to_dicts())
    _output.print_by_layer({(layer, name): f"{value:.4g}" for layer, name, value in values.iter_rows()})
    _output.print_text(f"Written to {out}: {', '.join(_METRIC_FILES)}", wrap=False)
