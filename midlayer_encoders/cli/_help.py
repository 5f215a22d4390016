"""The order of the commands in ``midlayer --help``, by what people do, and two examples of each."""

from __future__ import annotations

from typing import Any

import typer

__all__ = ["EXAMPLES", "arrange", "command_names"]

EXAMPLES: dict[str, dict[str, tuple[str, ...]]] = {
    "Try it": {
        "demo": ("midlayer demo", "midlayer demo --out runs/demo"),
        "demo-vision": ("midlayer demo-vision", "midlayer demo-vision --out runs/digits --epochs 5"),
    },
    "Find the layer": {
        "select": (
            "midlayer select MODEL --texts texts.txt",
            "midlayer select MODEL --texts texts.txt --labels labels.txt --recipes all",
        ),
        "sweep": (
            "midlayer sweep MODEL --tasks ./reviews.jsonl --out runs/reviews",
            "midlayer sweep built-in --tasks builtin --recipes plain,one-word",
        ),
        "board": ("midlayer board runs/one runs/two", "midlayer board runs --max-params 100M --max-ms 5"),
        "report": ("midlayer report runs/reviews", "midlayer report runs/reviews --json"),
    },
    "Use it": {
        "export": (
            "midlayer export MODEL --layer 17 --out encoder",
            "midlayer export MODEL --layer 0.7 --for onnx --out encoder-onnx",
        ),
        "embed": (
            "midlayer embed MODEL --texts texts.txt --out vectors.parquet",
            "midlayer embed MODEL --texts texts.txt --layers 0,0.5,-1 --out v.npy",
        ),
        "tune": (
            "midlayer tune MODEL --layer 17 --pairs pairs.jsonl --out tuned",
            "midlayer tune MODEL --layer 17 --pairs pairs.csv --lora 16 --out tuned",
        ),
    },
    "Look inside": {
        "metrics": (
            "midlayer metrics MODEL --texts texts.txt --out runs/metrics",
            "midlayer metrics MODEL --images photos/ --metrics paper --out runs/m",
        ),
        "probe": (
            "midlayer probe MODEL --data classes/ --out runs/probe",
            "midlayer probe MODEL --data train.csv --kind linear --out runs/probe",
        ),
        "compare": (
            "midlayer compare BASE TUNED --texts texts.txt --out runs/compare",
            "midlayer compare MODEL@step1000 MODEL --texts t.txt --out runs/compare",
        ),
        "progression": (
            "midlayer progression checkpoints/ --texts texts.txt --out runs/steps",
            "midlayer progression MODEL --revisions step1,step512 --texts t.txt --out r",
        ),
        "reproduce": (
            "midlayer reproduce fig2 --model built-in --texts texts.txt",
            "midlayer reproduce all --model MODEL --out runs/paper",
        ),
    },
    "Keep house": {
        "cache": ("midlayer cache runs/reviews/embeddings", "midlayer cache STORE --unused-days 30 --dry-run"),
    },
}
"""By heading and command: lines to copy. A test parses each as the command would."""


def command_names(app: typer.Typer) -> list[str]:
    """Return the names of an application's commands, in order."""
    return [_name(one) for one in app.registered_commands]


def _name(command: Any) -> str:
    return str(command.name or command.callback.__name__)


def arrange(app: typer.Typer) -> None:
    """Put the commands of an application in this order, under these headings, with their examples."""
    places = {name: (heading, lines) for heading, group in EXAMPLES.items() for name, lines in group.items()}
    known = {_name(one): one for one in app.registered_commands}
    for name, (heading, lines) in places.items():
        if name in known:
            known[name].rich_help_panel = heading
            known[name].epilog = "\n\n".join(["Examples:", *lines])
    order = [*(name for name in places if name in known), *(name for name in known if name not in places)]
    app.registered_commands = [known[name] for name in order]
