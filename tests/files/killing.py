"""Kills every scenario after every call that changes a file, runs it again, and counts what was lost or stuck.

``python -m tests.files.killing`` prints the table of benchmarks/results/reliability.md. Names of scenarios limit it to these:
``sweep:5`` takes every fifth point of one, ``sweep:5:2`` every fifth from the second on.
"""

import argparse
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

# Before any library starts threads of its own, which a fork does not survive.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

from tests.files.injection import Injection, Mode
from tests.files.scenarios import SCENARIOS, Scenario

PATIENCE = 120.0  # seconds after which a run is stuck


@dataclass
class Ended:
    """How a forked run ended: what it returned, or its error in words, and what it logged."""

    killed: bool = False
    value: Any = None
    error: str = ""
    ours: bool = False
    logged: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)


def forked(run: Scenario, out: Path, point: int = 0, mode: Mode = "count") -> Ended:
    """Run a scenario in a process of its own, from where this one is."""
    reports = out.with_name("told.json")
    reports.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(run, out, point, mode, reports)
    deadline = time.monotonic() + PATIENCE
    while (exit_info := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Ended(error=f"stuck for {PATIENCE:.0f} s")
        time.sleep(0.005)
    if os.WIFSIGNALED(exit_info[1]):
        return Ended(killed=True)
    return Ended(**json.loads(reports.read_text()))


def _child(run: Scenario, out: Path, point: int, mode: Mode, reports: Path) -> None:
    import warnings

    from midlayer_encoders.errors import MidlayerError

    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    warnings.simplefilter("ignore")
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("midlayer_encoders").addHandler(handler)
    injection, exit_info = Injection(out, point, mode), Ended(logged=logged)
    exit_info.calls = injection.calls
    kept_open = open
    injection.install()
    try:
        exit_info.value = run(out)
    except Exception as error:
        exit_info.error, exit_info.ours = f"{type(error).__name__}: {error}", isinstance(error, MidlayerError)
        if not exit_info.ours:
            exit_info.error += "\n" + traceback.format_exc()
    exit_info.modules = [name for name in sys.modules if not name.startswith("_")]
    with kept_open(reports, "w") as file:
        json.dump(vars(exit_info), file, default=str)
    os._exit(0)


@dataclass
class Found:
    """What a scenario's points showed."""

    points: int = 0
    lost: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def points_of(name: str, *, all_values: int = 1, modes: tuple[Mode, ...] = ("kill", "full"), first: int = 1) -> Found:
    """Kill one scenario at its points, or fill its disk, and return what the run after it found."""
    result = Found()
    memory = Path("/dev/shm")  # where a flush takes no time
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as home:
        run = SCENARIOS[name](_made(Path(home, "data")))
        complete = forked(run, _made(Path(home, "whole", "out")))
        if complete.error:
            raise RuntimeError(complete.error)
        _warm(complete.modules)
        out = Path(home, "killed", "out")
        if name == "resumed":
            modes = ("kill",)  # a run that has ended without its last write, which was logged, is not run again
        for mode in modes:
            for point in range(first, len(complete.calls) + 1, all_values):
                _point(
                    run, out, point, mode, complete, result, f"{name}, {mode} at {point} ({complete.calls[point - 1]})"
                )
        _cleared(run, out, result, name)
    return result


def _warm(modules: list[str]) -> None:
    """Do once, before all forks, what takes long the first time: imports, and the fonts of figures."""
    for module in modules:
        with suppress(Exception):
            importlib.import_module(module)
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figure.add_subplot().set_title("A title")
    figure.savefig(BytesIO(), format="png")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _point(run: Scenario, out: Path, point: int, mode: Mode, complete: Ended, actual: Found, case: str) -> None:
    shutil.rmtree(out.parent, ignore_errors=True)
    _made(out)
    actual.points += 1
    hit = forked(run, out, point, mode)
    if mode == "full" and hit.error and not (hit.ours and "is full" in hit.error and str(out) in hit.error):
        actual.wrong.append(f"{case}: {hit.error}")
    left = len(_left(out))
    if left > (2 if mode == "kill" else "unlink" in case or "rmdir" in case):  # a file of a folder that is beside too
        actual.wrong.append(f"{case}: {left} temporary files")
    repeated = forked(run, out)
    if repeated.error:
        actual.stuck.append(f"{case}: {repeated.error}")
    elif repeated.value != complete.value:
        actual.lost.append(f"{case}: {repeated.value} instead of {complete.value}")
    if repeated.logged or list(out.rglob("*.broken")):
        actual.wrong.append(f"{case}: {repeated.logged}")


def _left(out: Path) -> list[Path]:
    return list(out.parent.rglob(".*.tmp"))


def _cleared(run: Scenario, out: Path, actual: Found, name: str) -> None:
    """What killed runs left is gone after a run an hour later."""
    stray = out / f".{'a' * 32}.tmp"
    stray.write_text("half")
    for path in _left(out):
        os.utime(path, (time.time() - 7200,) * 2)
    forked(run, out)
    if stray.exists() and name not in ("export", "store", "resumed"):
        actual.wrong.append(f"{name}: {[str(path) for path in _left(out)]} stay for ever")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    table: dict[str, Found] = {}
    for words in arguments.names or SCENARIOS:
        start = time.monotonic()
        name, arrays, first = (*words.split(":"), "1", "1")[:3]
        table[name] = item = points_of(name, all_values=int(arrays), first=int(first))
        if not arguments.json:
            seconds = time.monotonic() - start
            counts = (item.points, len(item.lost), len(item.stuck), len(item.wrong), f"{seconds:.0f} s")
            print("|", " | ".join(map(str, (name, *counts))), "|", flush=True)  # noqa: T201
            for words in (*item.lost[:3], *item.stuck[:3], *item.wrong[:3]):
                print(words[:1500], file=sys.stderr, flush=True)  # noqa: T201
    if arguments.json:
        print(json.dumps({name: vars(item) for name, item in table.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
