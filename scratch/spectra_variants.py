"""Options of the two-stage kernels on a GPU: errors against float64 and times. Not part of the project.

    python scratch/spectra_variants.py            # about two minutes on an H200, prints everything
    python scratch/spectra_variants.py --dry      # on a CPU in Triton's interpreter: only that the script runs

Compiles all variants first in parallel processes (Triton's cache on disk), then times each stage with each option,
puts the fastest options together, and compares errors and times with the kernels of before (scratch/old_triton.py).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from midlayer_encoders.metrics import _token_triton as G
from midlayer_encoders.spectra import _triton as T
from midlayer_encoders.spectra.eigen import _renyi_entropy

spec = importlib.util.spec_from_file_location("old_triton", HERE / "old_triton.py")
O = importlib.util.module_from_spec(spec)
spec.loader.exec_module(O)


class Solved:
    """Instead of `_bisect`, which takes minutes in the interpreter."""

    def __getitem__(self, grid):
        return self

    def __call__(self, diagonal, squares, sizes, totals, values, n, **_):
        values.zero_()
        for row, d, q, size, total in zip(
            values, diagonal.double(), squares.double(), sizes.tolist(), totals, strict=True
        ):
            e = q[1:size].clamp_min(0).sqrt()
            matrix = torch.diag(d[:size]) + torch.diag(e, 1) + torch.diag(e, -1)
            if matrix.isfinite().all():
                row[:size] = torch.linalg.eigvalsh(matrix).flip(-1).clamp_min(0) * total
            else:
                row[:size] = float("nan")


if DRY:
    T._bisect = O._bisect = Solved()
DEV = "cpu" if DRY else "cuda"
BEGAN = time.time()
ROWS = (128,) if DRY else (512, 256, 128)
STAGES = {512: (512, 256, 128), 256: (256, 128), 128: (128,)}


def band(R, C, p, w, s=1, regs=None):
    found = {"ROWS": R, "COLS": C, "PRECISION": p, "num_warps": w, "num_stages": s}
    return found | {"maxnreg": regs} if regs and not DRY else found


def chase(lanes, w):
    return {"LANES": lanes, "num_warps": w}


# (width, initial rows): options
BAND = {
    (16, 512): [band(64, 64, "tf32x3", 4), band(64, 64, "tf32x3", 4, 2), band(64, 64, "tf32x3", 4, 3),
                band(64, 64, "tf32x3", 8), band(64, 64, "tf32x3", 8, 2), band(128, 64, "tf32x3", 8),
                band(64, 128, "tf32x3", 8), band(64, 32, "tf32x3", 4), band(128, 32, "tf32x3", 4),
                band(64, 64, "bf16x6", 4), band(64, 64, "ieee", 8), band(32, 64, "ieee", 4)],
    (32, 512): [band(64, 64, "tf32x3", 8), band(64, 64, "tf32x3", 16), band(64, 32, "tf32x3", 8),
                band(64, 64, "ieee", 16)],
    (16, 256): [band(64, 64, "tf32x3", 4), band(64, 64, "tf32x3", 4, 2), band(64, 32, "tf32x3", 4),
                band(64, 32, "tf32x3", 4, 1, 168), band(64, 32, "tf32x3", 4, 1, 128), band(32, 32, "tf32x3", 4, 1, 128),
                band(32, 64, "tf32x3", 2), band(32, 32, "tf32x3", 2), band(64, 64, "bf16x6", 4),
                band(32, 64, "ieee", 4), band(32, 32, "ieee", 2)],
    (32, 256): [band(64, 64, "tf32x3", 8), band(64, 64, "tf32x3", 4), band(32, 32, "tf32x3", 4)],
    (16, 128): [band(64, 64, "tf32x3", 4), band(32, 32, "tf32x3", 4), band(32, 32, "tf32x3", 2),
                band(32, 32, "tf32x3", 4, 1, 128), band(32, 32, "tf32x3", 2, 1, 128), band(32, 32, "tf32x3", 2, 1, 168),
                band(32, 32, "tf32x3", 1), band(64, 32, "tf32x3", 2), band(32, 32, "ieee", 2), band(32, 32, "bf16x6", 2)],
    (32, 128): [band(32, 32, "tf32x3", 4), band(32, 32, "tf32x3", 2)],
}  # fmt: skip
CHASE = {
    (16, 512): [chase(8, 4), chase(16, 8), chase(4, 2), chase(8, 8)],
    (32, 512): [chase(16, 4), chase(32, 8)],
    (16, 256): [chase(8, 2), chase(16, 4), chase(4, 1)],
    (32, 256): [chase(16, 2), chase(32, 4)],
    (16, 128): [chase(8, 1), chase(16, 2)],
    (32, 128): [chase(16, 1), chase(32, 2)],
}
BATCHES = {512: (64, 128, 512), 256: (128, 512, 1024), 128: (256, 1024, 2048)}
if DRY:
    BAND = {key: [band(32, 32, "ieee", 4)] for key in BAND}
    CHASE = {key: value[:2] for key, value in CHASE.items()}
    BATCHES = {512: (1,), 256: (1,), 128: (1,)}


def milliseconds(call, repeats=5):
    call()
    found = []
    for _ in range(repeats if not DRY else 1):
        if DRY:
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


class Buffers:
    """What `_launch` allocates for a batch of n rows, to call one stage alone. Times do not depend on the numbers."""

    def __init__(self, batch, n, width):
        make = lambda *shape: torch.rand(shape, device=DEV)
        self.batch, self.n, self.width = batch, n, width
        self.work = make(batch, n, n) / n
        self.panel = make(batch, 5, width, n) / n
        self.band = make(batch, n, 2 * width) / n
        self.diagonal, self.squares = make(2, batch, n)
        self.left = torch.full((batch,), n - 1, dtype=torch.int32, device=DEV)

    def reduce(self, size, options):
        low = size // 2 if size > 128 else 0
        T._reduce_to_band[(self.batch,)](
            self.work, self.panel, self.band, self.left, STRIDE=self.n, N=size, LOW=low, WIDTH=self.width, **options
        )

    def chase(self, size, options):
        low = size // 2 if size > 128 else 0
        T._chase[(self.batch,)](
            self.band, self.left, self.diagonal, self.squares,
            STRIDE=self.n, N=size, LOW=low, WIDTH=self.width, **options,
        )  # fmt: skip


def jobs():
    """Yield (name, n, width, size, options) of every stage that is timed."""
    for name, table in (("reduce", BAND), ("chase", CHASE)):
        for n in ROWS:
            for width in (16, 32):
                for size in STAGES[n]:
                    # Stages of 256 and 128 rows inside 512 have another stride; few options are enough for them.
                    options = table[width, size] if size == n else table[width, size][:2]
                    for each in options:
                        yield name, n, width, size, each


def compile_part(part, parts):
    if part < len(ROWS):  # the other kernels
        n = ROWS[part]
        for batch in BATCHES[n]:
            for module in (O, T):
                sizes = torch.full((batch,), n, dtype=torch.int32, device=DEV)
                module.eigenvalues_in_float32(torch.eye(n, device=DEV).repeat(batch, 1, 1), sizes)
    elif part == len(ROWS):
        time_gram()
    for index, (name, n, width, size, options) in enumerate(jobs()):
        if index % parts == part:
            try:
                getattr(Buffers(1, n, width), name)(size, options)
                torch.cuda.synchronize()
            except Exception:
                pass


def short(options):
    return " ".join(str(value) for value in options.values())


def time_stages():
    """Print the times of each stage and option, and return the fastest option of each."""
    best = {}
    print("| stage | n | width | rows from | options | " + "ms by batch (small, wait buffer, large)" + " |")
    for name, n, width, size, options in jobs():
        key = name, n, width, size, options.get("PRECISION", "")
        try:
            found = []
            for batch in BATCHES[n]:
                buffers = Buffers(batch, n, width)
                found.append(milliseconds(lambda: getattr(buffers, name)(size, options)))
                del buffers
            print(
                f"| {name} | {n} | {width} | {size} | {short(options)} | {' '.join(f'{x:.3f}' for x in found)} |",
                flush=True,
            )
            if key not in best or found[-1] < best[key][0]:
                best[key] = found[-1], options
        except Exception as error:
            print(
                f"| {name} | {n} | {width} | {size} | {short(options)} | {type(error).__name__}: {str(error)[:80]!r} |"
            )
    return best


def use(best, n, width, precision):
    """Put the fastest options with this precision into the package's tables; return False if a stage has none."""
    T._WIDTH = width
    for size in STAGES[n]:
        reduce = best.get(("reduce", n, width, size, precision)) or best.get(("reduce", size, width, size, precision))
        chased = best.get(("chase", n, width, size, ""))
        if reduce is None or chased is None:
            return False
        T._BAND_OPTIONS[size], T._CHASE_OPTIONS[size] = reduce[1], chased[1]
    return True


PER_KIND = 1 if DRY else 8


def kinds(n):
    generator = torch.Generator().manual_seed(n)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEV)

    W = 1024
    states, direction, rank = normal(PER_KIND, n, W), normal(PER_KIND, 1, W), max(1, n // 4)
    low_rank = normal(PER_KIND, n, rank) @ normal(PER_KIND, rank, W)
    sink, sinks = states.clone(), states + direction
    sink[:, 0] = 1000 * direction[:, 0]
    for token, scale in ((0, 1000), (n // 3, 500), (n // 2, 700)):
        sinks[:, token] = scale * direction[:, 0] + normal(PER_KIND, W)
    repeats = torch.randint(0, max(1, n // 8), (n,), generator=generator).to(DEV)
    yield "normal", states
    yield "power law", states / torch.arange(1, W + 1, device=DEV)
    yield "common mean", states + 5 * direction
    yield "nearly equal", states + 100 * direction
    yield "massive first", sink
    yield "three massive", sinks
    yield "rank n/4", low_rank
    yield "rank one", torch.linspace(0.5, 1.5, n, device=DEV)[:, None] * direction
    yield "equal", direction.expand(-1, n, -1)
    yield "repeated", states[:, repeats]
    few = torch.randint(0, max(1, n // 32), (n,), generator=generator).to(DEV)
    yield "repeated n/32", states[:, few]
    yield "blocks", torch.kron(torch.eye(n // 2, device=DEV), torch.ones(2, 2, device=DEV)).expand(PER_KIND, -1, -1)
    yield "identity", torch.eye(n, device=DEV).expand(PER_KIND, -1, -1)


def cases(n):
    """Return (kind, gram, sizes, exact eigenvalues)."""
    sizes = torch.tensor([n, n, n, n - 1, n - n // 3, n // 2 + 1, n // 2, 19], dtype=torch.int32)[:PER_KIND]
    found = []
    for kind, states in kinds(n):
        if DRY and kind not in ("normal", "repeated"):
            continue
        gram = states @ states.mT
        gram = (gram.tril() + gram.tril(-1).mT).contiguous()
        exact = torch.zeros(len(sizes), n, dtype=torch.float64)
        for row, matrix, size in zip(exact, gram.cpu().double(), sizes.tolist(), strict=True):
            row[:size] = torch.linalg.eigvalsh(matrix[:size, :size]).flip(-1).clamp_min(0)
        found.append((kind, gram, sizes.to(DEV), exact))
    return found


def errors(solve, given):
    """Return the largest error in nats by kind, and the largest of an eigenvalue relative to the trace."""
    nats, relative = {}, 0.0
    for kind, gram, sizes, exact in given:
        values = solve(gram, sizes).double().cpu()
        again = solve(gram, sizes).double().cpu()
        assert torch.equal(values, again), f"{kind}: two runs differ"
        nats[kind] = float((_renyi_entropy(values, 1.0) - _renyi_entropy(exact, 1.0)).abs().max())
        relative = max(relative, float(((values - exact).abs().amax(-1) / exact.sum(-1)).max()))
    return nats, relative


def report(n, best):
    given = cases(n)
    states = torch.randn(max(BATCHES[n]), n, 1024, device=DEV)
    gram = states @ states.mT
    del states
    variants = {"old": (O, lambda: True)}
    for width, precision in itertools.product((16, 32), ("tf32x3", "bf16x6", "ieee")):
        variants[f"band {width} {precision}"] = (T, lambda w=width, p=precision: use(best, n, w, p))
    for name, (module, prepare) in variants.items():
        if not prepare():
            continue
        rows = {"register_rows": 64} if module is T and n == 128 else {}
        solve = lambda m, s: module.eigenvalues_in_float32(m, s, **rows)
        try:
            nats, relative = errors(solve, given)
            worst = sorted(nats, key=nats.get)[::-1][:3]
            shown = ", ".join(f"{kind} {nats[kind]:.1e}" for kind in worst)
            times = []
            for batch in BATCHES[n]:
                full = torch.full((batch,), n, dtype=torch.int32, device=DEV)
                mixed = torch.randint(n // 2, n + 1, (batch,), dtype=torch.int32, device=DEV)
                part = gram[:batch]
                one, two = milliseconds(lambda: solve(part, full)), milliseconds(lambda: solve(part, mixed))
                module._SCRATCH_BYTES *= 4
                three = milliseconds(lambda: solve(part, full))
                module._SCRATCH_BYTES //= 4
                times.append(f"{batch}: {1e3 * one / batch:.2f} ({1e3 * two / batch:.2f}, {1e3 * three / batch:.2f})")
            print(f"| {n} | {name} | {' ; '.join(times)} | {shown} | {relative:.1e} |", flush=True)
            if module is T and len(gram) >= 4:
                bad = gram[:4].clone()
                bad[1, 3, 7] = bad[1, 7, 3] = float("nan")
                bad[3, 5, 5] = float("inf")
                many = torch.tensor([n, n, n, n], dtype=torch.int32, device=DEV)[: len(bad)]
                nan = solve(bad, many).sum(-1).isnan().tolist()
                if nan != [False, True, False, True][: len(bad)]:
                    print(f"  NaN WRONG: {nan}")
                picked = {size: (short(T._BAND_OPTIONS[size]), short(T._CHASE_OPTIONS[size])) for size in STAGES[n]}
                print(f"  options {picked}", flush=True)
        except Exception as error:
            print(f"| {n} | {name} | {type(error).__name__}: {str(error)[:150]!r} |", flush=True)


def time_gram():
    """Options of `_gram`, for one layer of 32768 tokens of 1024 in bf16."""
    for length in (128, 256, 512):
        states = torch.randn(32768 // length, length, 1024, device=DEV, dtype=torch.bfloat16)
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=DEV)
        order, sizes = G._order(mask)
        means = states.float().mean(1)
        gram = torch.empty(len(states), length, length, device=DEV)
        shape = 1024, states.stride(0), states.stride(1), length
        for tile, cols, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (2, 3)):
            if (tile, warps) == (128, 4):
                continue
            grid = (len(states) * (-(-length // tile)) ** 2,)
            try:
                found = milliseconds(
                    lambda: G._gram[grid](
                        states, order, sizes, means, gram, *shape,
                        ROWS=tile, COLS=cols, CENTER=True, num_warps=warps, num_stages=stages,
                    )
                )  # fmt: skip
                print(
                    f"| gram {length} | tile {tile} cols {cols} warps {warps} stages {stages} | {found:.3f} ms |",
                    flush=True,
                )
            except Exception as error:
                print(
                    f"| gram {length} | {tile} {cols} {warps} {stages} | {type(error).__name__}: {str(error)[:80]!r} |"
                )


def main():
    if "--compile" in sys.argv:
        part, parts = map(int, sys.argv[sys.argv.index("--compile") + 1].split("/"))
        compile_part(part, parts)
        return
    if not DRY:
        parts = min(12, os.cpu_count() or 1)
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--compile", f"{part}/{parts}"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for part in range(parts)
        ]
        for worker in workers:
            try:
                worker.wait(timeout=150)
            except subprocess.TimeoutExpired:
                worker.kill()
        print(f"compiled after {time.time() - BEGAN:.0f} s, {torch.cuda.get_device_name()}", flush=True)
    best = time_stages()
    print(f"stages timed after {time.time() - BEGAN:.0f} s")
    print(
        "| n | variant | us per matrix by batch: full (mixed sizes, four times the scratch) | largest errors, nats | of the trace |"
    )
    for n in ROWS:
        report(n, best)
    print(f"variants after {time.time() - BEGAN:.0f} s")
    if not DRY:
        time_gram()
    print(f"done after {time.time() - BEGAN:.0f} s")


main()
