"""What the site adds to Sphinx: formulas as MathML, the page of commands, a page at the top of the site."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.logging import getLogger
from sphinx.util.nodes import make_refnode

_log = getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the parts."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _whole_sentences, priority=400)  # before napoleon
    app.connect("missing-reference", _by_public_name)
    app.connect("env-check-consistency", _check_public_names)
    app.connect("doctree-read", _readme_stands_alone)
    app.connect("build-finished", _lead_to_the_start)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


# --- formulas ---------------------------------------------------------------------------------------------------------


def _inline(writer: Any, node: nodes.math) -> None:
    _write(writer, node, "inline")


def _block(writer: Any, node: nodes.math_block) -> None:
    _write(writer, node, "block")


def _write(writer: Any, node: nodes.Element, display: str) -> None:
    from latex2mathml.converter import convert

    tag = "span" if display == "inline" else "div"
    made = convert(node.astext(), display=display)
    writer.body.append(f'<{tag} class="math">{made}</{tag}>')
    raise nodes.SkipNode


# --- the reference ----------------------------------------------------------------------------------------------------

_PACKAGE = Path(__file__).parents[1] / "midlayer_encoders"
PUBLIC = (
    "", ".callbacks", ".metrics", ".tasks", ".selection", ".sweeping", ".recipes", ".frame", ".report",
    ".comparing", ".metrics.eigen", ".reading.media_inputs", ".sweeping.store", ".extras.export", ".extras.probing",
    ".extras.training",
)  # fmt: skip
"""Modules whose every public name must be in the reference, under this module or another."""


def _whole_sentences(_: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Keep napoleon from reading what stands before the first colon of an attribute's sentence as its type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def _by_public_name(app: Sphinx, env: BuildEnvironment, node: Any, inside: nodes.TextElement) -> nodes.Element | None:
    """Resolve a name as it is written in a docstring, ``SweepResult``, to where the reference has it."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not ("." not in target or target.startswith("midlayer_encoders")):
        return None
    for full, found in env.domains.python_domain.objects.items():
        if full.rpartition(".")[2] == target.rpartition(".")[2]:
            return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, inside, full)
    return None


def _check_public_names(_: Sphinx, env: BuildEnvironment) -> None:
    known = {full.rpartition(".")[2] for full in env.domains.python_domain.objects}
    for name in PUBLIC:
        module = import_module(f"midlayer_encoders{name}")
        for missing in set(_public_names(module)) - known:
            _log.warning("%s.%s is public, and in no page of docs/api", module.__name__, missing)


def _public_names(module: ModuleType) -> list[str]:
    """Return the names of ``__all__``, or those that a module without one defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    source = inspect.getsource(module)
    return re.findall(r"^(?:class |def )?([A-Za-z]\w*)\b(?:[:(]|.* = )", source, re.MULTILINE)


# --- the page of commands ---------------------------------------------------------------------------------------------


def _fill(_: Sphinx, name: str, source: list[str]) -> None:
    """Put into a page what is read from the package: ``<!-- commands -->``, ``<!-- constants of tasks -->``."""
    if name == "docs/commands":
        source[0] = source[0].replace("<!-- commands -->", _commands())
    if name.startswith("docs/api/"):
        source[0] = re.sub("<!-- constants of ([a-z_.]+) -->", lambda match: _constants(match[1]), source[0])


def _constants(subpackage: str) -> str:
    """Return the constants and types of a subpackage, which autodoc documents only where they are assigned."""
    lines = []
    module = import_module(f"midlayer_encoders.{subpackage}")
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            continue
        own = Path(inspect.getfile(module))
        files = sorted(own.parent.rglob("*.py")) if own.stem == "__init__" else [own]
        for file in (*files, _PACKAGE / "arguments.py", _PACKAGE / "extras" / "settings.py"):
            if re.search(rf"^{name}\b.*=", file.read_text(encoding="utf8"), re.MULTILINE):
                short = len(repr(value)) < 200 and " object at " not in repr(value)
                place = ".".join(file.relative_to(_PACKAGE).with_suffix("").parts).removesuffix(".__init__")
                lines += [f".. autodata:: midlayer_encoders.{place}.{name}"]
                lines += [] if short else ["   :no-value:"]
                break
    return "\n".join(["```{eval-rst}", *lines, "```"])


def _commands() -> str:
    """Return every command, its arguments and options as Markdown; the encoder's options, which many share, once."""
    import typer

    from midlayer_encoders.cli import app

    group = typer.main.get_command(app)
    shared: dict[str, str] = {}
    parts = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        own = []
        for one in (each for each in command.params if each.name != "help_all"):
            if getattr(one, "rich_help_panel", None) == "Encoder":
                shared.setdefault(*_row(one))
            elif not getattr(one, "hidden", False) and one.name != "help":
                own.append(_row(one))
        takes = any(getattr(one, "rich_help_panel", None) == "Encoder" for one in command.params)
        parts += [f"## midlayer {name}", _flags_as_code((command.help or "").strip()), _table(own)]
        parts += ["Takes [the encoder's options](#the-encoder-s-options) too." if takes else ""]
        if examples := re.findall(r"midlayer [^\n\[\]]+", command.epilog or ""):
            parts += ["\n".join(["```sh", *map(str.strip, examples), "```"])]
    return "\n\n".join([*parts, "## The encoder's options", _table(list(shared.items()))])


def _flags_as_code(text: str) -> str:
    """Return a text whose flags are code, in which two hyphens stay two."""
    return re.sub(r"(?<![`\w-])--[a-z][a-z-]*", r"`\g<0>`", text)


def _row(one: Any) -> tuple[str, str]:
    """Return how an argument or option is written, and what it means."""
    name = (
        ", ".join(f"`{word}`" for word in (*one.opts, *one.secondary_opts))
        if one.param_type_name == "option"
        else f"`{one.name.upper()}`"
    )
    words = _flags_as_code((one.help or "").rstrip(".").replace("|", "\\|").replace("<", "&lt;"))
    default = one.default
    if one.required:
        words += "; required"
    elif default not in (None, False, (), []) and not callable(default):
        words += f"; by default `{default}`"
    return name, words


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {words} |" for name, words in rows)]) if rows else ""


# --- where the site begins --------------------------------------------------------------------------------------------


def _readme_stands_alone(app: Sphinx, _: nodes.document) -> None:
    """The README is read so that its links are checked; the site has a first page of its own."""
    app.env.metadata["README"]["orphan"] = True


def _lead_to_the_start(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        start = "docs/index.html"
        lead = f'<meta http-equiv="refresh" content="0; url={start}"><a href="{start}">{app.config.project}</a>'
        page = f'<!doctype html><meta charset="utf8">{lead}\n'
        (app.outdir / "index.html").write_text(page, encoding="utf8")
