"""Every block of Python in a page compiles, and runs with the names that a reader has by then, or is listed with the reason."""

import itertools
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.docs.printed import Block, blocks, not_run_elsewhere, pages
from tests.docs.running import ROOT

NOT_RUN = {
    ("docs/encoders.md", "BitsAndBytesConfig("): "needs bitsandbytes; tests/encoder/test_quantized.py",
    ("docs/encoders.md", "bidirectional=True"): "models and adapters of gigabytes; tests/encoder tests each option",
    ("docs/callbacks.md", ""): "a training run; tests/callbacks has them",
    (
        "docs/encoders.md",
        "CIFAR10",
    ): "mteb would fetch the tasks; examples/mteb_in_five_lines.py and tests/encoder run them",
    ("docs/media.md", "CIFAR10"): "mteb would fetch the images",
    ("docs/media.md", "from_module"): "modules that a reader has; tests/encoder/test_media_exact.py makes some",
    ("docs/export.md", ""): "needs an engine or the hub; tests/export runs them under make test-extras FOR=engines",
    ("docs/scale.md", "import ray"): "needs Ray; tests/scaling does it under make test-extras FOR=scale",
    ("docs/scale.md", "executor="): "starts processes; tests/scaling does",
    ("docs/distill.md", ""): "minutes; tests/tuning/test_distill.py distills, and test_commands.py runs the command",
    (
        "docs/embedding_model.md",
        "",
    ): "loads what the command before it wrote; tests/tuning/test_distill.py loads such a folder",
    ("docs/tuning.md", ""): "minutes; tests/tuning/test_tune.py tunes, and test_commands.py runs the command",
}
"""Blocks that are not run: the page, what the block contains, and why."""

NAMED = {
    "base": "decoder",
    "tuned": "tuned",
    "model": "vit",  # in docs/vision.md
    "runs/my-model": "steps",
    "STSBenchmark": "./mine",
    "Banking77Classification": "./my_reviews",
    "STS12": "./mine",
}
"""What quoted names stand for here, beside the models of ``desk.MODELS``."""

GIVEN = """
import json
import numpy, polars, torch
from safetensors import safe_open
from PIL import Image
from midlayer_encoders import LayerEncoder, sweep
from pathlib import Path
texts, labels = (Path(f"{name}.txt").read_text().splitlines() for name in ("texts", "labels"))
tasks, prompt, digest = ["./mine"], "", "0" * 16
images = photos = [Image.open(f"photos/{n % 12}.png").convert("RGB") for n in range(24)]
array = numpy.asarray(images[0])
waveform = numpy.sin(numpy.arange(8000) / 9).astype("float32")
states, mask = torch.randn(4, 9, 16), torch.ones(4, 9, dtype=torch.bool)
"""
"""What a reader has before the first block of a page."""

BEFORE = {
    ("docs/board.md", "board("): "sweep(model, './mine', metrics=[], out='runs/one')",
    ("docs/media.md", "AbsTaskClassification"): """
recordings = sorted(map(str, Path("recordings").iterdir()))
training_files = test_files = recordings, [("yes", "no")[n % 2] for n, _ in enumerate(recordings)]
""",
    ("docs/selection.md", "selection.confidence"): """
from types import SimpleNamespace
from midlayer_encoders import measure
result = SimpleNamespace(frame=measure(LayerEncoder(model, -1, norm="none"), texts, metrics=["half_match", "curvature"]))
""",
    ("docs/selection.md", "selection.parts"): f"""
result = SimpleNamespace(frame=polars.read_csv({str(ROOT / "benchmarks/recipes/results/smollm2.csv")!r}))
""",
    (
        "docs/dims.md",
        'precision="int8")',
    ): "LayerEncoder(model, 6, truncate_dim=4).save_pretrained('small'); texts = texts * 5",
    ("docs/store.md", "EmbeddingStore("): "embeddings = numpy.zeros((31, len(texts), 576))",
    ("docs/vectors.md", "safe_open("): "embed(encoder, texts, 'vectors.safetensors')",
}
"""What a reader has done before a block: by the page, and what the block contains."""


@pytest.mark.parametrize("page", pages())
def test_python_compiles(page: str) -> None:
    wrong = []
    for block in python(page):
        try:
            compile(block.text, block.page, "exec")
        except SyntaxError as error:
            wrong.append(f"{page}:{block.line + (error.lineno or 1) - 1}: {error.msg}: {error.text}")
    assert not wrong, "\n".join(wrong)


def python(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.kind in ("python", "py")]


def is_run(block: Block) -> bool:
    return not any(page == block.page and part in block.text for page, part in NOT_RUN)


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in not_run_elsewhere() if any(map(is_run, python(page)))])
def test_python_runs_as_printed(page: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.docs.desk import make_desk

    make_desk(tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setenv("HOME", str(tmp_path))  # a block writes to ~/.cache
    names: dict[str, Any] = {"model": str(models / "decoder"), "name": str(models / "decoder")}
    exec(GIVEN, names)
    wrong = []
    for block in filter(is_run, python(page)):
        try:
            exec("\n".join(code for (at, part), code in BEFORE.items() if at == page and part in block.text), names)
            exec(compile(here(block.text, models), block.page, "exec"), names)
        except Exception as error:
            own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == block.page]
            wrong.append(f"{page}:{block.line + (own or [1])[-1] - 1}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def here(text: str, models: Path) -> str:
    """Return a block with what is on the desk in the place of the models and tasks that it names."""
    from tests.docs.desk import MODELS

    def stand_in(match: re.Match[str]) -> str:
        name = (MODELS | NAMED).get(match[1])
        if name is None:
            return match[0]
        return repr(name if name.startswith("./") else str(models / name))

    text = text.replace("dims=[64, 128, 256]", "dims=[4, 8]")  # of the 16 of a tiny model
    return re.sub(r'"([^"\n]+)"', stand_in, text)


def test_what_is_not_run_is_still_there() -> None:
    printed = list(itertools.chain.from_iterable(map(python, pages())))
    for page, part in NOT_RUN:
        assert any(block.page == page and part in block.text for block in printed), (page, part)
