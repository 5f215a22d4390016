"""No module of `benchmarks/` imports itself through others."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_benchmarks_have_no_import_cycle() -> None:
    paths = sorted((ROOT / "benchmarks").rglob("*.py"))
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    graph = {module: _imported(path) & modules.keys() for module, path in modules.items()}
    assert sum(map(len, graph.values())) > 20
    TopologicalSorter(graph).prepare()  # raises CycleError
