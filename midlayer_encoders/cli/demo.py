"""``midlayer demo``: a sweep from end to end, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from midlayer_encoders.cli import _arguments
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions


@command("Try it")
def demo(out: Annotated[Path, Option(help="Folder for the results.")] = Path("midlayer-results/demo")) -> None:
    """Score all 31 layers of the built-in model (SmolLM2-135M) with two prompts on the built-in tasks, offline.

    Examples:
        midlayer demo
        midlayer demo --out runs/demo
    """
    from midlayer_encoders.cli.sweep import ONE_PASS_METRICS, run_sweep
    from midlayer_encoders.files import check_output_folder
    from midlayer_encoders.models.hub import BUILT_IN, check_model

    check_output_folder(out)
    check_model(BUILT_IN)  # refuses missing weights before anything is read
    encoder = _arguments.load_model(BUILT_IN, EncoderOptions(device="cpu"))
    run_sweep(encoder, ["builtin"], recipes=["plain", "one-word"], metrics=list(ONE_PASS_METRICS), out=out)
