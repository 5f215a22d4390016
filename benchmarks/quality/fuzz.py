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
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from benchmarks.data import RESULTS

PAGE = RESULTS / "fuzz.md"
SHARES = {"folder": 6, "remote": 7, "module": 5, "gguf": 2}
"""Cases of each kind out of 20."""
OUTCOMES = ("exact", "refused", "wrong", "traceback", "hang")
_SECONDS = 120  # for a case that takes a fraction of a second, on a machine that does other things too
_START_SECONDS = 600  # for the imports
_CHUNK = 500
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


def work(numbered: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """Run cases in this process and yield one record before and after each."""
    import logging
    import warnings

    import torch

    from tests.fuzz.random_models import run_case

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for kind, number in numbered:
        yield {"case": f"{kind}:{number}"}
        outcome, description, error = run_case(kind, number)
        yield {"case": f"{kind}:{number}", "outcome": outcome, "description": description, "error": error}


def run_chunk(numbered: list[tuple[str, int]], record: queue.Queue[dict[str, Any]]) -> None:
    """Run cases in a process, and go on after a case that kills or stops it."""
    while numbered:
        with tempfile.TemporaryDirectory() as cache:  # of the code of folders and of converted GGUF files
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.quality.fuzz", "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **_ENVIRONMENT, "HF_MODULES_CACHE": cache, "MIDLAYER_GGUF_CACHE": f"{cache}/gguf"},
            )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(numbered))
            process.stdin.close()
            is_late = False
            current = ""
            done = 0

            def stop(process: subprocess.Popen[str] = process) -> None:
                nonlocal is_late
                is_late = True
                process.kill()

            while True:
                timer = threading.Timer(_SECONDS if current else _START_SECONDS, stop)
                timer.start()
                line = process.stdout.readline()
                timer.cancel()
                if not line:
                    break
                entry = json.loads(line)
                current = entry["case"]
                if "outcome" in entry:
                    done += 1
                    record.put(entry)
            process.wait()
            if not current:
                record.put({"fatal": f"A process ended with {process.returncode} before its first case."})
                return
            if done < len(numbered):
                outcome = "hang" if is_late else "traceback"
                error = f"no progress in {_SECONDS} s" if is_late else f"the process ended with {process.returncode}"
                record.put({"case": current, "outcome": outcome, "description": "", "error": error})
                done += 1
            numbered = numbered[done:]


def run(numbered: list[tuple[str, int]], processes: int) -> list[dict[str, Any]]:
    """Return the records of all cases."""
    chunks: queue.Queue[list[tuple[str, int]]] = queue.Queue()
    for start in range(0, len(numbered), _CHUNK):
        chunks.put(numbered[start : start + _CHUNK])
    record: queue.Queue[dict[str, Any]] = queue.Queue()

    def take() -> None:
        while True:
            try:
                chunk = chunks.get_nowait()
            except queue.Empty:
                return
            run_chunk(chunk, record)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    records: list[dict[str, Any]] = []
    while len(records) < len(numbered):
        entry = record.get()
        if "fatal" in entry:
            raise SystemExit(entry["fatal"])
        records.append(entry)
        if entry["outcome"] not in ("exact", "refused"):
            print(json.dumps(entry), flush=True)
        if len(records) % 1000 == 0:
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
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        for entry in work(json.load(sys.stdin)):
            print(json.dumps(entry), flush=True)
        return
    if args.case:
        kind, _, number = args.case.partition(":")
        for entry in work([(kind, int(number))]):
            print(json.dumps(entry, indent=2))
        return
    start = time.perf_counter()
    records = run(cases(args.first, args.cases), args.processes)
    text = page(records, time.perf_counter() - start, args.processes)
    print(text)
    if args.first == 0 and args.cases >= 20_000:
        PAGE.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
