"""Would a library do what the Triton kernels do? Spectra against CuPy and torch, norms and rotations against liger-kernel.

    python -m benchmarks.speed.libraries    # on a GPU with Triton, CuPy and liger-kernel; writes results/libraries.md

Spectra are of random Gram matrices in float64, microseconds for a matrix, and the largest error of an eigenvalue relative
to LAPACK's in units of the largest one. A pass is the whole forward pass of a random Llama of 24 blocks of width 1024 in
bfloat16: as transformers composes it, with the package's fused blocks, with them but for the kernel that rotates, and
as liger-kernel changes it (its norm and its rotation alone).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.data import RESULTS
from benchmarks.timing import alternate, device_name
from midlayer_encoders.extras.kernels.fused_blocks import _Rotation
from midlayer_encoders.metrics.eigen import eigenvalues
from midlayer_encoders.reading.fused import fused_blocks

TOKENS = 32768
ROUNDS = 5


def gram_matrices(rows: int) -> Tensor:
    """Return the Gram matrices of random rows, shape ``(TOKENS / rows, rows, rows)``."""
    states = torch.randn(TOKENS // rows, rows, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(rows))
    states = torch.nn.functional.normalize(states, dim=-1).double()
    return states @ states.mT


def spectra(rows: int) -> dict[str, tuple[float, float]]:
    """Return microseconds for a matrix and the largest error of each method."""
    import cupy

    matrices = gram_matrices(rows)
    expected = torch.linalg.eigvalsh(matrices[:16].cpu()).cuda()
    runs: dict[str, Callable[[], Tensor]] = {
        "ours, exact": lambda: eigenvalues(matrices, method="exact"),
        "ours, fast": lambda: eigenvalues(matrices.float(), method="fast"),
        "CuPy": lambda: torch.from_dlpack(cupy.linalg.eigvalsh(cupy.from_dlpack(matrices))),
        "torch": lambda: torch.linalg.eigvalsh(matrices[:32]),
    }
    errors = {
        name: float(((run()[:16].double().sort().values - expected).abs().amax() / expected.amax()).item())
        for name, run in runs.items()
    }
    counts = {"torch": min(32, len(matrices))}
    seconds = alternate(runs, ROUNDS)
    return {name: (1e6 * seconds[name] / counts.get(name, len(matrices)), errors[name]) for name in runs}


def llama() -> Any:
    """Return a random Llama, as transformers makes it."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=2752, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return LlamaModel(config).to("cuda", torch.bfloat16).eval()


def liger_llama() -> Any:
    """Return the same model with liger-kernel's norm and rotation."""
    from liger_kernel.transformers import LigerRMSNorm, liger_rotary_pos_emb
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb
    modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb = LigerRMSNorm, liger_rotary_pos_emb
    try:
        return llama(), (modeling_llama, plain, (LigerRMSNorm, liger_rotary_pos_emb))
    finally:
        modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb = plain


@torch.inference_mode()
def passes(texts: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Return milliseconds of a pass, and the largest difference of a state from transformers'."""
    plain, (changed, (module, own, theirs)) = llama(), liger_llama()
    ids = torch.randint(0, 4096, (texts, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def fused() -> Tensor:
        with fused_blocks(plain):
            return plain(ids).last_hidden_state  # type: ignore[no-any-return]

    def liger() -> Tensor:
        module.apply_rotary_pos_emb = theirs[1]
        try:
            return changed(ids).last_hidden_state  # type: ignore[no-any-return]
        finally:
            module.apply_rotary_pos_emb = own[1]

    def without_rotation() -> Tensor:
        with mock.patch.object(_Rotation, "_is_ready", return_value=False):
            return fused()

    runs = {
        "transformers": lambda: plain(ids).last_hidden_state, "ours": fused,
        "ours, without the rotation": without_rotation, "liger-kernel": liger,
    }  # fmt: skip
    expected = runs["transformers"]().float()
    for _ in range(3):  # the rotation is used once another thread has compiled it
        for run in runs.values():
            run()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        torch.cuda.synchronize()
    errors = {name: float((run().float() - expected).abs().amax()) for name, run in runs.items()}
    seconds = alternate(runs, 20)
    return {name: (1e3 * seconds[name], errors[name]) for name in runs}


def table(head: str, rows: dict[str, dict[str, tuple[float, float]]], digits: int) -> list[str]:
    names = list(next(iter(rows.values())))
    lines = [f"| {head} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return lines + [
        f"| {label} | " + " | ".join(f"{row[name][0]:.{digits}f} ({row[name][1]:.0e})" for name in names) + " |"
        for label, row in rows.items()
    ]


def main() -> None:

    import cupy

    lines = [
        "# The Triton kernels and libraries that do the same", "",
        f"`python -m benchmarks.speed.libraries`: {device_name('cuda')}, torch {torch.__version__}, CuPy {cupy.__version__}, "
        f"liger-kernel {version('liger-kernel')}.", "",
        "Microseconds for a matrix, float64 but for *fast*, and the largest error:", "",
        *table("rows", {str(rows): spectra(rows) for rows in (64, 128, 256, 512)}, 2), "",
        "Milliseconds of a pass of 24 blocks of width 1024, and the largest difference of a state:", "",
        *table("pass", {f"{n} x {length} tokens": passes(n, length) for n, length in ((32, 256), (128, 64), (8, 512))}, 2),
    ]  # fmt: skip
    (RESULTS / "libraries.md").write_text("\n".join(lines) + "\n", encoding="utf8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
