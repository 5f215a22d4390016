"""Measure the structure of the package: subpackages, levels, import cycles and sizes; and draw its import diagram.

    python benchmarks/structure.py              # print the table
    python benchmarks/structure.py --docs       # write it and the diagram to docs/architecture.md
    python benchmarks/structure.py --check      # fail if a size is above its limit, and lower a limit that is too high

Imports are read from the source, including those inside functions and under TYPE_CHECKING. Only what an import of a
class loads leaves those out. The limits are in ``structure_limits.json``; they only go down.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "midlayer_encoders"
PAGE = ROOT / "docs" / "architecture.md"
LIMITS = Path(__file__).with_name("structure_limits.json")
ENTRIES = {
    "LayerEncoder": f"{PACKAGE}.encoder.sentence_transformers_encoder",
    "LayerMetricsCallback": f"{PACKAGE}.callbacks.lightning",
}
DIAGRAM = ROOT / "docs" / "figures" / "subpackages.svg"


@dataclass(frozen=True)
class Function:
    """A function: its dotted name, its length and its number of arguments."""

    name: str
    lines: int
    arguments: int


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    paths = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for path in sorted((ROOT / "callbacks").glob("*.py")):  # imported as midlayer_encoders.callbacks
        name = f"{PACKAGE}.callbacks" + ("" if path.stem == "__init__" else f".{path.stem}")
        paths[name] = path
    return paths


def imported(tree: ast.AST, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports anywhere in its syntax tree."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = f"{PACKAGE}.callbacks.{node.module}" if node.level else node.module  # callbacks
            parts = {f"{module}.{alias.name}" for alias in node.names}
            names |= {part for part in parts if part in known} or {module}
    return {name for name in names if name in known}


def imported_at_once(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports while it is imported, with the packages they are in."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    statements = list(tree.body)
    for node in statements:  # grows
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            statements += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef | ast.ExceptHandler):
            statements += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)
            ]
    tree.body = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = imported(tree, known)
    packages = {module.rsplit(".", depth)[0] for module in modules for depth in range(1, module.count(".") + 1)}
    return modules | packages


def loaded(module: str, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that an import of a module loads."""
    modules = {module, PACKAGE}
    queue = list(modules)
    while queue:
        new = imported_at_once(known[queue.pop()], known) - modules
        modules |= new
        queue += new
    return modules


def sizes_loaded(known: Mapping[str, Path]) -> dict[str, int]:
    """Return the code lines of the whole package, and of what an import of each entry loads."""
    lines = {module: code_lines(path) for module, path in known.items()}
    sizes = {name: sum(map(lines.__getitem__, loaded(module, known))) for name, module in ENTRIES.items()}
    return {"all": sum(lines.values()), **sizes}


def check(sizes: Mapping[str, int]) -> None:
    """Exit with the sizes above their limits, or lower the limits to the sizes."""
    limits = json.loads(LIMITS.read_text(encoding="utf8"))
    if larger := [f"{name}: {size:,}, limit {limits[name]:,}" for name, size in sizes.items() if size > limits[name]]:
        sys.exit(
            "More code lines than before; make room elsewhere (benchmarks/structure_limits.json): " + "; ".join(larger)
        )
    if sizes != limits:
        LIMITS.write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf8")
    print("code lines:", ", ".join(f"{name} {size:,}" for name, size in sizes.items()))


def subpackage(module: str) -> str:
    """Return the name of the top-level subpackage that contains a module."""
    return module.split(".")[1] if "." in module else "__init__"


def code_lines(path: Path) -> int:
    """Return the number of code lines, without comments, docstrings and blank lines."""
    lines: set[int] = set()
    with tokenize.open(path) as file:
        before = tokenize.NEWLINE
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING):
                continue
            if token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT):
                continue  # a docstring
            before = token.type
            if token.type not in (tokenize.NEWLINE, tokenize.ENDMARKER):
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def functions(module: str, path: Path) -> Iterator[Function]:
    """Yield every function of a module; ``self`` and ``cls`` do not count as arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            count += (node.args.vararg is not None) + (node.args.kwarg is not None)
            yield Function(f"{module}.{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1, count)


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the import cycles: the strongly connected components of several nodes, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                components.append(sorted(part))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def contract() -> dict[str, list[str]]:
    """Return the contract of the package's levels."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(contract for contract in contracts if contract.get("containers") == [PACKAGE])


def doors() -> set[tuple[str, str]]:
    """Return the modules of the core that import a part of the extras inside a function, with that part."""
    pairs = [line.split(" -> ") for line in contract()["ignore_imports"]]
    return {(module, extra) for module, extra in pairs}


def levels() -> list[list[str]]:
    """Return the levels of the import contract, top first, without optional subpackages."""
    layers = contract()["layers"]
    names = [re.split(r"\s*[|:]\s*", layer) for layer in layers]
    required = [[name for name in level if not name.startswith("(")] for level in names]
    return [level for level in required if level]


def table(known: Mapping[str, Path], module_graph: Mapping[str, set[str]], graph: Mapping[str, set[str]]) -> str:
    """Return the numbers as a Markdown table."""
    defined = [function for module, path in known.items() for function in functions(module, path)]
    longest = max(defined, key=lambda function: function.lines)
    widest = sorted(defined, key=lambda function: -function.arguments)
    over = [function for function in widest if function.arguments > 12]
    names = {subpackage(module) for module in known if "." in module}
    sizes = sizes_loaded(known)
    rows = {
        "top-level subpackages and modules": f"{len(names)}",
        "levels": f"{len(levels())}",
        "import cycles between modules (including annotations)": f"{len(cycles(module_graph))}",
        "import cycles between subpackages": f"{len(cycles(graph))}",
        "imports of an extra by the core, inside functions": f"{len(doors())}",
        "code lines (without comments, docstrings and blank lines)": f"{sizes['all']:,}",
        "of these, loaded by `LayerEncoder`": f"{sizes['LayerEncoder']:,}",
        "of these, loaded by `LayerMetricsCallback`": f"{sizes['LayerMetricsCallback']:,}",
        "longest function": f"{longest.lines} lines, `{longest.name.removeprefix(PACKAGE + '.')}`",
        "longest argument list": f"{widest[0].arguments}, `{widest[0].name.removeprefix(PACKAGE + '.')}`",
        "functions with more than 12 arguments": ", ".join(
            f"`{function.name.removeprefix(PACKAGE + '.')}` ({function.arguments})" for function in over
        )
        or "none",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def size_table(sizes: Mapping[str, int]) -> str:
    """Return the code lines of each subpackage as a Markdown table, the largest first."""
    rows = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"| `{name}` | {size:,} |" for name, size in rows]
    return "\n".join(["| subpackage | code lines |", "|---|---|", *lines])


def diagram(graph: Mapping[str, set[str]], sizes: Mapping[str, int]) -> str:
    """Return an SVG of the subpackages by level, with a line from each down to those that it imports."""
    tall, wide, high = 84, 132, 40
    rows = levels()
    width = max(len(level) for level in rows) * (wide + 24) + 24
    places = {
        name: (
            (width - len(level) * (wide + 24)) / 2 + 12 + column * (wide + 24) + wide / 2,
            24 + row * tall + high / 2,
        )
        for row, level in enumerate(rows)
        for column, name in enumerate(level)
    }
    style = (
        "text{font:13px system-ui,sans-serif;text-anchor:middle;fill:#1b1f24}.n{font-size:10px;fill:#57606a}"
        "rect{fill:#f6f8fa;stroke:#57606a}path{fill:none;stroke:#8b949e;stroke-width:.7;opacity:.55}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.n{fill:#9198a1}rect{fill:#161b22;stroke:#9198a1}}"
    )
    lines, boxes = [], []
    for name, others in sorted(graph.items()):
        for other in sorted(others):
            if name in places and other in places and other not in rows[-1]:  # all import that level
                (x, y), (u, v) = places[name], places[other]
                y, v = y + high / 2, v - high / 2
                lines.append(
                    f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {(y + v) / 2:.0f} {u:.0f} {(y + v) / 2:.0f} {u:.0f} {v:.0f}"/>'
                )
    for name, (x, y) in places.items():
        boxes.append(
            f'<rect x="{x - wide / 2:.0f}" y="{y - high / 2:.0f}" width="{wide}" height="{high}" rx="6"/>'
            f'<text x="{x:.0f}" y="{y:.0f}">{name}</text>'
            f'<text class="n" x="{x:.0f}" y="{y + 14:.0f}">{sizes.get(name, 0):,} lines</text>'
        )
    height = 48 + len(rows) * tall - (tall - high)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Subpackages by level"><style>{style}</style>{"".join(lines)}{"".join(boxes)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--docs", action="store_true", help="write the table and the diagram to docs/architecture.md")
    parser.add_argument("--check", action="store_true", help="compare the sizes with their limits")
    arguments = parser.parse_args()
    known = modules()
    if arguments.check:
        check(sizes_loaded(known))
        return
    module_graph = {
        module: imported(ast.parse(path.read_text(encoding="utf8")), known) - {module} for module, path in known.items()
    }
    graph: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    for module, others in module_graph.items():
        others = {other for other in others if (module, other) not in doors()}
        name = subpackage(module)
        graph.setdefault(name, set()).update({subpackage(other) for other in others} - {name, "__init__"})
        sizes[name] = sizes.get(name, 0) + code_lines(known[module])
    graph.pop("__init__", None)
    text = table(known, module_graph, graph)
    print(text)
    if arguments.docs:
        DIAGRAM.write_text(diagram(graph, sizes), encoding="utf8")
        page = PAGE.read_text(encoding="utf8")
        for marker, content in {"structure": text, "sizes": size_table(sizes)}.items():
            start, end = f"<!-- {marker} -->\n", f"<!-- /{marker} -->"
            head, rest = page.split(start)
            page = head + start + content + "\n" + end + rest.split(end)[1]
        PAGE.write_text(page, encoding="utf8")


if __name__ == "__main__":
    main()
