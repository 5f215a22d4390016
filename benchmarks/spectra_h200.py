"""Times and errors of ``midlayer_encoders.metrics.eigen`` on a GPU, compared with ``torch.linalg.eigvalsh``.

    python benchmarks/spectra_h200.py --out benchmarks/results

Writes ``spectra_h200.md`` and ``spectra_h200.json``. Times are device times of calls queued one after another, as
after a forward pass, in microseconds per matrix; "one layer" is a batch of 32768 tokens. Errors are the largest
differences from LAPACK's float64 on the CPU over all matrices of a kind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The device machine does not install the package.

from midlayer_encoders.metrics.eigen import eigenvalues, spectral_entropy
from midlayer_encoders.metrics.row_metrics import rank_of_gram

ROWS = (32, 64, 128, 256, 512)
WIDTH = 1024
TOKENS = 32768
PER_KIND = 32


def kinds(n: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield token states ``(PER_KIND, n, WIDTH)`` with every kind of spectrum that is hard in float32."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    states = normal(PER_KIND, n, WIDTH)
    direction = normal(PER_KIND, 1, WIDTH)
    rank = max(1, n // 4)
    low_rank = normal(PER_KIND, n, rank) @ normal(PER_KIND, rank, WIDTH)
    sink, sinks, low_rank_sink = states.clone(), states + direction, low_rank.clone()
    sink[:, 0] = 1000 * direction[:, 0]
    for token, scale in ((0, 1000), (n // 3, 500), (n // 2, 700)):
        sinks[:, token] = scale * direction[:, 0] + normal(PER_KIND, WIDTH)
    low_rank_sink[:, 0] = 1e4 * direction[:, 0]
    repeats = torch.randint(0, max(1, n // 8), (n,), generator=generator, device="cuda")
    yield "normal", states
    yield "power law", states / torch.arange(1, WIDTH + 1, device="cuda")
    yield "common mean", states + 5 * direction
    yield "nearly equal", states + 100 * direction
    yield "massive first token", sink
    yield "three massive tokens", sinks
    yield "rank n/4", low_rank
    yield "rank n/4, massive first token", low_rank_sink
    yield "rank one", torch.linspace(0.5, 1.5, n, device="cuda")[:, None] * direction
    yield "equal", direction.expand(-1, n, -1)
    yield "repeated tokens", states[:, repeats]


def errors(n: int) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return errors of each kind: entropy in float32, eigenvalues in float64, effective rank in float64."""
    generator = torch.Generator("cuda").manual_seed(n)
    sizes = torch.tensor([n, n, n, n, n - 1, n - n // 3, n // 2 + 1, n // 2], device="cuda").repeat(PER_KIND // 8)
    nats, largest, ranks = {}, {}, {}
    for kind, states in kinds(n, generator):
        gram = states @ states.mT
        gram = gram.tril() + gram.tril(-1).mT  # A product in float32 is not quite symmetric.
        fast = spectral_entropy(gram, sizes, method="fast").cpu()
        exact = spectral_entropy(gram.cpu(), sizes.cpu(), method="exact")
        nats[kind] = float((fast - exact).abs().max())
        gram = states.double() @ states.double().mT
        gram = gram.tril() + gram.tril(-1).mT
        values = eigenvalues(gram, sizes, method="exact").cpu()
        lapack = eigenvalues(gram.cpu(), sizes.cpu(), method="exact")
        largest[kind] = float(((values - lapack).abs().amax(-1) / lapack[:, 0]).max())
        rank, lapack_rank = rank_of_gram(gram, sizes, "exact").cpu(), rank_of_gram(gram.cpu(), sizes.cpu(), "exact")
        ranks[kind] = float((rank / lapack_rank - 1).abs().max())
    return nats, largest, ranks


def microseconds(call: Callable[[], object], *, calls: int, repeats: int = 7) -> float:
    """Return the median device time of one of ``calls`` calls in a row."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def times(n: int) -> dict[str, float]:
    from midlayer_encoders.extras.kernels.spectra import eigenvalues_by_kernels

    found: dict[str, float] = {}
    for name, batch in (("one layer", TOKENS // n), ("8 layers", 8 * TOKENS // n)):
        states = torch.randn(batch, n, WIDTH, device="cuda")
        gram = states @ states.mT
        full = torch.full((batch,), n, dtype=torch.int32, device="cuda")
        mixed = torch.randint(n // 2, n + 1, (batch,), dtype=torch.int32, device="cuda")
        calls = {
            f"fast, {name}": partial(eigenvalues_by_kernels, gram, full, torch.float32),
            f"fast, {name}, mixed": partial(eigenvalues_by_kernels, gram, mixed, torch.float32),
            f"exact, {name}": partial(eigenvalues_by_kernels, gram, full, torch.float64),
            f"exact, {name}, mixed": partial(eigenvalues_by_kernels, gram, mixed, torch.float64),
        }
        if name == "one layer":
            calls |= {
                "entropy call": partial(spectral_entropy, gram, full),
                "entropy call, unchecked": partial(spectral_entropy, gram, full, check=False),
            }
        found |= {label: microseconds(call, calls=8) / batch for label, call in calls.items()}
    few = gram[:16].double()
    found["eigvalsh"] = microseconds(lambda: torch.linalg.eigvalsh(few), calls=1, repeats=3) / len(few)
    if n == 32:  # Up to 32 rows cuSOLVER has a batched routine.
        found["eigvalsh"] = microseconds(lambda: torch.linalg.eigvalsh(gram.double()), calls=1) / len(gram)
    return found


def table(rows: list[str], cells: dict[int, dict[str, float]], spec: str) -> str:
    lines = ["| | " + " | ".join(f"n = {n}" for n in cells) + " |", "|---|" + "---:|" * len(cells)]
    lines += [f"| {row} | " + " | ".join(format(cells[n][row], spec) for n in cells) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    out: Path = parser.parse_args().out
    torch.manual_seed(0)
    import triton

    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    timed = {n: times(n) for n in ROWS}
    for found in timed.values():
        for method in ("fast", "exact"):
            found[f"eigvalsh / {method}, one layer"] = found["eigvalsh"] / found[f"{method}, one layer"]
    both = {n: errors(n) for n in ROWS}
    wrong, wrong_values, wrong_ranks = ({n: both[n][part] for n in ROWS} for part in range(3))
    for by_size in (wrong, wrong_values, wrong_ranks):
        for found in by_size.values():
            found["**largest**"] = max(found.values())
    text = f"""# Spectra on a GPU

Time and error of `method="fast"` (float32), whose documented error bound is 1e-5 nats, and of `method="exact"`
(float64). `python benchmarks/spectra_h200.py` on {device}.

## Microseconds per matrix

{table(list(timed[32]), timed, ".2f")}

- `one layer`: the matrices of {TOKENS} tokens ({TOKENS} / n of them) in one call.
- `mixed`: sizes from n / 2 to n in one call.
- `entropy call`: the public function, including host work; the checked version waits for the device.
- `eigvalsh`: `torch.linalg.eigvalsh` in float64.

## Error of the entropy relative to float64, in nats

{table(list(wrong[32]), wrong, ".1e")}

## Error of exact eigenvalues relative to LAPACK, as a share of the largest eigenvalue

{table(list(wrong_values[32]), wrong_values, ".1e")}

## Relative error of the effective rank from exact eigenvalues

Eigenvalues near the limit below which they count as rounding make it larger: their square roots are not small.

{table(list(wrong_ranks[32]), wrong_ranks, ".1e")}
"""
    out.mkdir(parents=True, exist_ok=True)
    (out / "spectra_h200.md").write_text(text)
    (out / "spectra_h200.json").write_text(
        json.dumps(
            {"device": device, "us": timed, "nats": wrong, "values": wrong_values, "ranks": wrong_ranks}, indent=1
        )
    )
    print(text)


if __name__ == "__main__":
    main()
