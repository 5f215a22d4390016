"""The units of :func:`~midlayer_encoders.embed`: plan a chunk of inputs, embed a block of them, and write the file."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from midlayer_encoders._types import Progress, Stage, content_digest
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.extras.scaling.blocks import Planner, embed_block
from midlayer_encoders.extras.scaling.units import Unit, run_units
from midlayer_encoders.extras.vectors.embedding import CHUNK, EmbedRun
from midlayer_encoders.files import read_artifact, read_json, write_file


@dataclass(frozen=True)
class EmbedUnit:
    """One step of writing vectors: plan the chunk ``item``, embed the block ``item`` of it, or write the file.

    Attributes:
        request: file with the arguments of the call; the chunks of its inputs lie beside it.
        step: ``"plan"``, ``"embed"`` or ``"write"``.
        chunk: number of the chunk.
        item: file of the block.
    """

    request: Path
    step: Literal["plan", "embed", "write"]
    chunk: int = 0
    item: str = ""

    @property
    def label(self) -> str:
        """What an error is about."""
        return f"inputs from {self.chunk * CHUNK}" if self.step != "write" else "the file"

    @property
    def outcome(self) -> Path:
        """The file that the unit writes last; it lists the blocks of a plan."""
        return self.request.with_name(f"{self.step}-{self.chunk}-{self.item.removesuffix('.block')}.json")

    @property
    def is_done(self) -> bool:
        """Whether the step is done."""
        return self.outcome.is_file()

    @property
    def blocks(self) -> list[str]:
        """The blocks of a chunk that is planned."""
        return read_artifact(self.outcome, read_json) or []

    def run(self) -> None:
        """Do the step."""
        if self.is_done:  # another process has done it meanwhile
            return
        arguments, encoder = _loaded(self.request)
        if self.step == "write":
            paths = sorted(self.request.parent.glob("chunk-*.pkl"), key=lambda path: int(path.stem.partition("-")[2]))
            inputs = [item for path in paths for item in pickle.loads(path.read_bytes())]
            EmbedRun.of(encoder, inputs, **arguments).run()  # it finds the vectors, and removes the folder
            return
        chunk = pickle.loads(self.request.with_name(f"chunk-{self.chunk}.pkl").read_bytes())
        run = EmbedRun.of(encoder, chunk, **arguments)
        embedder = run.embedder(self.chunk, Stage(None, "embedding"))
        written: list[str] = []
        if self.step == "plan":
            planner = Planner.of(embedder, self.request.parent)
            planner(chunk, run.keys(0, len(chunk)), run.prompt)
            written = planner.flush()
        else:
            embed_block(self.request.with_name(self.item), embedder)
        write_file(self.outcome, json.dumps(written).encode())
        if self.step == "embed":
            self.request.with_name(self.item).unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _loaded(path: Path) -> tuple[dict[str, Any], Any]:
    model, arguments, options = cloudpickle.loads(path.read_bytes())
    return arguments, load_encoder(model, options)


def embed_units(
    model: Any,
    inputs: Sequence[Any],
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    executor: Any,
    progress: Progress | None,
) -> None:
    """Write the vectors of inputs as units of an executor; ``arguments`` are those of the call in one process."""
    if not isinstance(model, str):
        raise OptionError("`model` must be a folder or hub name with an executor: each of its processes loads it.")
    out = Path(arguments["out"]).absolute()
    request = cloudpickle.dumps((model, {**arguments, "out": out}, dict(options)))
    chunks = [inputs[start : start + CHUNK] for start in range(0, len(inputs), CHUNK)]
    digest = content_digest(b"".join([request, *(content_digest(pickle.dumps(chunk)).encode() for chunk in chunks)]), 8)
    folder = out.with_name(f"{out.name}.part") / "units" / digest
    path = folder / "request.pkl"
    write_file(path, request)
    for number, chunk in enumerate(chunks):
        write_file(folder / f"chunk-{number}.pkl", pickle.dumps(chunk))
    stage = Stage(progress, "units")
    plans = [EmbedUnit(path, "plan", number) for number in range(len(chunks))]

    def run(units: Sequence[Unit]) -> None:
        if errors := run_units(units, executor, stage=stage):
            first, error = next(iter(errors.items()))
            raise MidlayerError(f"{first.label}: {error} Run the same call again to repeat what is missing.")

    run(plans)
    run([EmbedUnit(path, "embed", plan.chunk, name) for plan in plans for name in plan.blocks])
    run([EmbedUnit(path, "write")])
    shutil.rmtree(folder.parents[1], ignore_errors=True)
