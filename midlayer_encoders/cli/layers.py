"""``midlayer embed``, ``metrics`` and ``probe``: vectors, metrics and classifiers of every layer."""

import io
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import BadParameter, Context, Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import counted

_PROBE_STAGES = {"reading": "examples read", "training": "epochs, all layers together"}
_METRIC_FILES = ["metrics.parquet", "metrics.csv", "metrics.png"]


@command("Use it")
def embed(
    *,
    context: Context,
    model: _arguments.Model,
    out: Annotated[Path, Option(help="vectors.npy, .safetensors or .parquet; with --ray a new folder.")],
    inputs: _arguments.Inputs,
    layers: _arguments.Layers = "all",
    engine: _arguments.EngineName = "transformers",
    token_budget: Annotated[str, Option(help="Tokens in a batch; auto finds the fastest size.")] = "auto",
    shared: _arguments.Sharing,
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
        actors = {"batch_size": batch_size, "concurrency": concurrency}
        _embed_with_ray(model, inputs, out, layers=layers, token_budget=budget, **actors, **options.changed())
        return
    _arguments.refuse_flags(context, "without --ray", "concurrency", "batch_size")
    shared.writes_results()
    vectors.check_out(out)  # before anything is loaded
    kind, _, items = inputs.read(context)
    items = items[: inputs.limit]
    encoder = _arguments.load_model(model, options, **asdict(shared))
    unit = "waveforms" if kind == "audio" else kind
    number = counted(len(items), unit.removesuffix("s"))
    with _progress.show_progress({"embedding": f"Embedding {unit}", "writing": "Writing vectors"}) as progress:
        written = vectors.embed(
            encoder, items, out, layers=layers, engine=engine, token_budget=budget, progress=progress, **asdict(shared)
        )
    _output.print_result(path=written, inputs=len(items), kind=kind)
    _output.print_text(f"Vectors of {number} are in {written}.", wrap=False)


def _embed_with_ray(model: str, inputs: _arguments.Inputs, out: Path, **arguments: Any) -> None:
    """Embed parquet files with Ray, and print where the vectors are."""
    import pyarrow.dataset

    from midlayer_encoders.vectors import ray

    if inputs.texts is None:
        raise BadParameter("name the parquet file or folder with --texts", param_hint="--ray")
    arguments |= {"text_column": inputs.text_column or "text", "limit": inputs.limit}
    # Ray prints lines about lost workers, which it replaces.
    with _progress.show_progress({"embedding": "Embedding texts"}) as progress, redirect_stdout(io.StringIO()):
        written = ray.embed_parquet(model, inputs.texts, out, progress=progress, **arguments)
    num_texts = pyarrow.dataset.dataset(written).count_rows()
    _output.print_result(path=written, inputs=num_texts, kind="texts")
    _output.print_text(f"Vectors of {counted(num_texts, 'text')} are in {written}.", wrap=False)


@command("Look inside", norm="none")
def metrics(
    *,
    context: Context,
    model: _arguments.Model,
    out: _arguments.Out = None,
    inputs: _arguments.Inputs,
    metric_names: _arguments.MetricNames = "paper",
    layers: _arguments.Layers = "all",
    wikitext: Annotated[bool, Option(help="Drop headings and paragraphs under 30 tokens.")] = False,
    seed: _arguments.Seed = 0,
    shared: _arguments.Sharing,
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

    is_first = shared.writes_results()
    out = _arguments.results_folder(out, "metrics", model)
    names = _arguments.parse_metrics(metric_names)
    passes = num_passes(names)  # refuses an unknown name before the model is loaded
    kind, path, items = inputs.read(context)
    encoder = _arguments.load_model(model, options, **asdict(shared))
    if wikitext:  # counts the tokens of the whole paragraph, whatever --max-length is
        items = wikitext_paragraphs(items, lambda line: len(encoder.tokenizer(line, verbose=False)["input_ids"]))
    items = items[: inputs.limit]
    number = counted(len(items), "waveform" if kind == "audio" else kind.removesuffix("s"))
    title = f"{number}, {counted(passes, 'pass', 'passes')}"
    with _progress.show_progress({"measuring": title}) as progress:
        frame = measure(
            encoder,
            items,
            metrics=names,
            layers=layers,
            seed=seed,
            dataset=path.stem,
            progress=progress,
            **asdict(shared),
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


@command("Look inside")
def probe(
    *,
    context: Context,
    model: _arguments.Model,
    data: Annotated[Path, Option(help="A folder for each class, or a file with the columns text and label.")],
    out: _arguments.Out = None,
    test: Annotated[Path | None, Option(help="Test data; by default a fifth of each class.")] = None,
    text_column: _arguments.TextColumn = None,
    label_column: _arguments.LabelColumn = None,
    kind: Annotated[Literal["attentive", "linear"], Option(help="The classifier.")] = "attentive",
    layers: _arguments.Layers = "all",
    epochs: Annotated[int, Option(help="Maximum number of epochs; each layer keeps its best.")] = 30,
    batch_size: Annotated[int, Option(help="Examples per step.")] = 256,
    learning_rate: Annotated[float, Option(help="Initial learning rate of AdamW.")] = 1e-3,
    keep_gb: Annotated[float, Option(help="Memory for token states; beyond it each epoch runs again.")] = 4.0,
    skip_bad: _arguments.SkipBad = False,
    seed: _arguments.Seed = 0,
    shared: _arguments.Sharing,
    options: EncoderOptions,
) -> None:
    """Train a small classifier on every frozen layer and show which layer separates the classes best.

    Examples:
        midlayer probe MODEL --data classes/ --out runs/probe
        midlayer probe MODEL --data train.csv --kind linear --out runs/probe
    """
    from midlayer_encoders import probing
    from midlayer_encoders.probing.examples import check_examples_path, read_examples
    from midlayer_encoders.probing.probe import UNUSED_SETTINGS
    from midlayer_encoders.tasks.table_files import Columns

    is_first = shared.writes_results()
    out = _arguments.results_folder(out, "probe", model)
    reason, names = UNUSED_SETTINGS[kind]
    names += ("pooling", "truncate_dim") if kind == "attentive" else ()
    _arguments.refuse_flags(context, f"with `--kind {kind}`, which {reason}", *names)
    settings = probing.ProbeSettings(
        epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, keep_gb=keep_gb, seed=seed
    )
    for path in (data, test):
        if path is not None:
            check_examples_path(path)
    encoder = _arguments.load_model(model, options, **asdict(shared))
    bad = "skip" if skip_bad else "refuse"
    read = partial(read_examples, media=encoder.media, bad=bad, columns=Columns(text_column, label_column))
    inputs, labels = read(data)
    test_inputs, test_labels = read(test) if test is not None else ([], [])
    with _progress.show_progress(_PROBE_STAGES) as progress:
        result = probing.probe(
            encoder,
            inputs,
            labels,
            test_inputs=test_inputs,
            test_labels=test_labels,
            kind=kind,
            layers=layers,
            settings=settings,
            dataset=data.stem,
            progress=progress,
            **asdict(shared),
        )
    if not is_first:
        return
    result.save(out)
    names = ("dataset", "kind", "best_layer", "chance")
    _output.print_result(
        folder=out,
        report=out / "report.html",
        **{name: getattr(result, name) for name in names},
        words=result.verdict(),
        layers=result.table.to_dicts(),
    )
    rows = []
    for layer, accuracy, low, high, validation, epoch in result.table.iter_rows():
        shares = (f"{100 * accuracy:.1f}", f"{100 * low:.1f} to {100 * high:.1f}", f"{100 * validation:.1f}")
        rows.append([str(layer), *shares, str(epoch)])
    title = f"{result.dataset}: {result.kind} probe, accuracy in percent"
    best = result.table["layer"].to_list().index(result.best_layer)
    columns = ["layer", "accuracy", "95 % interval", "validation", "best epoch"]
    _output.print_table(columns, rows, title=title, bold=best)
    _output.print_text(f"{result.verdict()} Guessing gives {100 * result.chance:.1f}.")
    files = ", ".join([*result.tables(), "probe.png", "report.html"])
    _output.print_text(f"Written to {out}: {files}", wrap=False)
