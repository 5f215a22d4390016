"""Encode texts with random models and compare every vector with the uncut model.

    python -m benchmarks.quality.fuzz                              # 20,000 cases; results/fuzz.md
    python -m benchmarks.quality.fuzz --cases 1000 --first 20000   # other cases, printed only
    python -m benchmarks.quality.fuzz --case remote:58             # one case

A case is a random tiny model, layer, norm, pooling and list of texts, all drawn from its kind and number: a folder of
an architecture of transformers, a folder with its own code, a module in memory, or a GGUF file. The expected vectors
come from plain transformers and NumPy (tests/fuzz/random_models.py). Cases run in processes that are replaced after
every 500; a process that makes no progress is killed, and its case counts as a hang.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.data import RESULTS

PAGE = RESULTS / "fuzz.md"
SHARES = {"folder": 6, "remote": 7, "module": 5, "gguf": 2}
"""Cases of each kind out of 20."""
OUTCOMES = ("exact", "refused", "wrong", "traceback", "hang")
_SECONDS = 120  # for a case that takes a fraction of a second, on a machine that does other things too
_START_SECONDS = 600  # for the imports
_CHUNK = 500
SPAWN = multiprocessing.get_context("spawn")
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def cases(first: int, count: int) -> list[tuple[str, int]]:
    """Return the kinds and numbers of cases, mixed in proportion to their shares."""
    pattern = [kind for kind, share in SHARES.items() for _ in range(share)]
    return [(pattern[number % len(pattern)], number) for number in range(first, first + count)]


def work(numbered: list[tuple[str, int]], send: Callable[[dict[str, Any]], object]) -> None:
    """Run cases in this process and send a record before and after each."""
    import torch

    from tests.fuzz.random_models import run_case

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for kind, number in numbered:
        send({"case": f"{kind}:{number}"})
        outcome, description, error = run_case(kind, number)
        send({"case": f"{kind}:{number}", "outcome": outcome, "description": description, "error": error})


def start_worker(numbered: list[tuple[str, int]], cache: str, writer: Connection) -> None:
    """Run cases in a process of their own, whose code of folders and converted GGUF files is cached in a folder."""
    os.environ |= {"HF_MODULES_CACHE": cache, "MIDLAYER_GGUF_CACHE": f"{cache}/gguf"}
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        work(numbered, writer.send)


def run_chunk(numbered: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the records of cases that run in a process, and go on after a case that kills or stops it."""
    records: list[dict[str, Any]] = []
    while len(records) < len(numbered):
        reader, writer = SPAWN.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as cache:
            process = SPAWN.Process(target=start_worker, args=(numbered[len(records) :], cache, writer))
            process.start()
            writer.close()
            current, is_late = "", False
            try:
                while not (is_late := not reader.poll(_SECONDS if current else _START_SECONDS)):
                    entry = reader.recv()
                    current = entry["case"]
                    if "outcome" in entry:
                        records.append(entry)
            except EOFError:  # the process has ended
                pass
            if is_late:
                process.kill()
            process.join()
        if not current:
            raise RuntimeError(f"A process ended with {process.exitcode} before its first case.")
        if len(records) < len(numbered):
            outcome = "hang" if is_late else "traceback"
            error = f"no progress in {_SECONDS} s" if is_late else f"the process ended with {process.exitcode}"
            records.append({"case": current, "outcome": outcome, "description": "", "error": error})
    return records


def run(numbered: list[tuple[str, int]], processes: int) -> list[dict[str, Any]]:
    """Return the records of all cases."""
    os.environ |= _ENVIRONMENT
    records: list[dict[str, Any]] = []
    with ThreadPoolExecutor(processes) as pool:  # each thread waits for a process
        for some in pool.map(run_chunk, (numbered[k : k + _CHUNK] for k in range(0, len(numbered), _CHUNK))):
            records += some
            for one in some:
                if one["outcome"] not in ("exact", "refused"):
                    print(json.dumps(one))
            print(len(records), dict(Counter(entry["outcome"] for entry in records)), flush=True)
    return records


def page(records: list[dict[str, Any]], seconds: float, processes: int) -> str:
    """Return the results page."""
    counts = Counter((entry["case"].partition(":")[0], entry["outcome"]) for entry in records)
    kinds = {
        "folder": "folders of 16 architectures of transformers",
        "remote": "folders with their own code",
        "module": "modules in memory",
        "gguf": "GGUF files",
    }
    rows = [
        [label, str(sum(counts[kind, outcome] for outcome in OUTCOMES)), *(str(counts[kind, o]) for o in OUTCOMES)]
        for kind, label in kinds.items()
    ]
    totals = [str(sum(int(row[column]) for row in rows)) for column in range(1, len(OUTCOMES) + 2)]
    rows.append(["all", *totals])
    refusals = Counter(_reason(entry["error"]) for entry in records if entry["outcome"] == "refused")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers"))
    lines = [
        "# Random models compared with the uncut model",
        "",
        f"`python -m benchmarks.quality.fuzz`: {len(records):,} cases in {seconds / 60:.0f} minutes with {processes} "
        f"processes, {packages}.",
        "A case is a random tiny model, layer, norm, pooling, padding side and list of texts. Every vector is compared",
        "with the states of the uncut model on each text alone, pooled in NumPy. *Refused* is an error of the package",
        "that names the reason; half of the models with their own code scale by the number of blocks, skip connections",
        "or change states between blocks on purpose, and a third of the modules in memory pad without a mask.",
        "",
        "| | cases | exact | refused | wrong vector | raw traceback | hang |",
        "|---|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "Reasons of refusals:",
        "",
        "| cases | error |",
        "|---|---|",
        *(f"| {count} | {reason} |" for reason, count in refusals.most_common(12)),
        "",
    ]
    return "\n".join(lines)


def _reason(error: str) -> str:
    """Return the start of an error without its numbers."""
    words = "".join("N" if character.isdigit() else character for character in error.partition(". ")[0])
    return " ".join(words.split())[:100].replace("|", "\\|")


def main() -> None:
    """Run the cases and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--case")
    args = parser.parse_args()
    if args.case:
        kind, _, number = args.case.partition(":")
        work([(kind, int(number))], lambda entry: print(json.dumps(entry, indent=2)))
        return
    start = time.perf_counter()
    records = run(cases(args.first, args.cases), args.processes)
    text = page(records, time.perf_counter() - start, args.processes)
    print(text)
    if args.first == 0 and args.cases >= 20_000:
        PAGE.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
