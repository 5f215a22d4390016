"""``midlayer demo``: a model as it comes, at its best layer and with a prompt, offline."""

from pathlib import Path
from typing import Annotated

from typer import Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.recipes import PLAIN


@command("Try it")
def demo(out: Annotated[Path, Option(help="Folder for the results.")] = Path("midlayer-results/demo")) -> None:
    """Compare the built-in model (SmolLM2-135M) as it comes, at its best layer and with a prompt, offline.

    Examples:
        midlayer demo
        midlayer demo --out runs/demo
    """
    from midlayer_encoders import select_layer, sweep
    from midlayer_encoders.cli._demo_story import rank_descriptions, story_lines
    from midlayer_encoders.cli.sweep import STAGES, result_values
    from midlayer_encoders.encoder.options import python_line, shell_line
    from midlayer_encoders.files import check_output_folder
    from midlayer_encoders.models.hub import BUILT_IN, check_model
    from midlayer_encoders.sweeping import SweepSettings
    from midlayer_encoders.tasks.docstrings import builtin_data

    check_output_folder(out)
    check_model(BUILT_IN)  # refuses missing weights before anything is read
    encoder = _arguments.load_model(BUILT_IN, EncoderOptions(device="cpu"))
    chosen = select_layer(encoder)  # a causal model: a recipe and a layer
    recipe, layer = chosen.keywords["recipe"], chosen.layer
    with _progress.show_progress(STAGES) as progress:
        # On tasks this small, worker processes would import mteb for longer than they score.
        settings = SweepSettings(workers=1)
        result = sweep(encoder, "builtin-small", recipes=[PLAIN, recipe], out=out, settings=settings, progress=progress)
    page = result.to_html()
    options = EncoderOptions(recipe=recipe)
    python = python_line(BUILT_IN, layer, options)
    shell = shell_line(BUILT_IN, layer, options, out="encoder")
    data = builtin_data("DocstringDescriptionReranking", "builtin-small")
    ranked = rank_descriptions(encoder, data, out, [(PLAIN, encoder.num_layers), (recipe, layer)])
    for line in story_lines(result, recipe, layer, ranked):
        _output.print_text(line, wrap=False)
    export = _output.print_encoder_lines({"Python": python, "shell": shell})
    _output.print_report(page)
    _output.print_result(**result_values(result), folder=out, report=page, failures={}, export=export)
