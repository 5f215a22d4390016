"""Compare every layer of a cut model with the uncut model, for every model type that transformers registers.

    python -m benchmarks.quality.census --workers 2                 # all types; results/census.jsonl, benchmarks/results/families.md
    python -m benchmarks.quality.census --resume                    # only types that have no result yet
    python -m benchmarks.quality.census --types bloom esm --print   # some types; print every result

For each type, a tiny random model is saved to a folder. Hooks that do not use this package read the blocks of the uncut
model. A ``LayerEncoder`` of every layer and both norms is compared with them on a single input, on a padded batch of
mixed lengths (one longer than any window), and after an export that is loaded without this package. For causal models,
``bidirectional=True`` is verified block by block, with padding. Each type runs in a separate process with a time limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.data import RESULTS
from benchmarks.pages import table
from tests.support.tiny_folders import tokenizer
from tests.support.tiny_types import (
    INPUTS,
    PADDED,
    TEXTS,
    TOLERANCE,
    NotBuiltError,
    build,
    error,
    first_line,
    joint,
    prepared,
    processor_of,
    registered,
    uncut_of,
)
from tests.support.uncut import NoStackError, Uncut, find_stack, reach

FOUND = RESULTS / "census.jsonl"
PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "families.md"
NORMS = ("final", "none")
LONGEST = 300  # time limit per type, in seconds


def examine(model_type: str, folder: Path) -> dict[str, Any]:
    """Return the results for one type; the expected vectors of exports are saved for :func:`examine_exports`."""
    found: dict[str, Any] = {"type": model_type, "layers": {}, "exports": [], "bidirectional": None}
    try:
        model, medium, processor = build(model_type, folder / "whole")
    except NotBuiltError as reason:
        return {**found, "not_built": str(reason)}
    found["medium"], found["class"] = medium, type(model).__name__
    towers = ("text", "image") if joint(model) else (None,)
    for tower in towers:
        if tower is not None:
            medium = tower
            processor = (
                processor_of(model_type, tower, "", model.config.vision_config) if tower == "image" else processor
            )
        _examine_part(found, model, medium, processor, tower, folder)
    return found


def _examine_part(
    found: dict[str, Any], model: Any, medium: str, processor: Any, tower: str | None, folder: Path
) -> None:
    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.errors import MidlayerError

    whole, part, items = str(folder / "whole"), uncut_of(model, tower), INPUTS[medium]()
    always = medium == "text" and model.config.model_type in PADDED
    padded = part.config.max_position_embeddings if always else 0  # type: ignore[union-attr]
    given = [prepared(processor, medium, item, padded) for item in items]
    if model.config.model_type == "vit_mae":  # it shuffles its patches by noise even without masking
        patches = (model.config.image_size // model.config.patch_size) ** 2
        given = [{**one, "noise": torch.arange(float(patches))[None]} for one in given]
    expected: dict[str, list[list[Tensor]]] | None = None
    try:
        uncut = find_stack(part, given[0])
        states = [uncut.layers(one) for one in given]
        if padded:  # keep only the real tokens
            sizes = [int(one["attention_mask"].sum()) for one in given]
            states = [
                {norm: [layer[:, :size] for layer in layers] for norm, layers in one.items()}
                for one, size in zip(states, sizes, strict=True)
            ]
        expected = {norm: [[one[norm][k] for one in states] for k in range(uncut.num_layers + 1)] for norm in NORMS}
        if not all(bool(s.isfinite().all()) for norm in NORMS for layer in expected[norm] for s in layer):
            expected, found["no_oracle"] = None, "its states are not finite with random weights"
    except NoStackError as reason:
        found["no_stack"] = str(reason)
    except Exception as reason:
        found["no_oracle"] = f"{type(reason).__name__}: {first_line(reason)}"
    pooling = "cls" if str(model.main_input_name) == "input_features" else "mean"
    for norm in NORMS:
        for layer in range(uncut.num_layers + 1) if expected is not None else [-1]:
            key = f"{tower} {norm} {layer}" if tower else f"{norm} {layer}"
            try:
                encoder = LayerEncoder(whole, layer, norm=norm, pooling=pooling, tower=tower, device="cpu")
                if expected is None:
                    encoder.encode(items, show_progress_bar=False)
                    found["layers"][key] = {"unchecked": True}
                    continue
                layers = expected[norm] if layer == uncut.num_layers else None
                path = folder / f"{tower}-{norm}-{layer}"
                found["layers"][key] = result = _compare(encoder, items, pooling, expected[norm][layer], layers, path)
                if "export_refused" not in result:
                    found["exports"].append({"folder": str(path), "key": key, "medium": medium})
            except MidlayerError as reason:
                found["layers"][key] = {"refused": str(reason), "kind": type(reason).__name__}
            except Exception as reason:
                found["layers"][key] = {
                    "raised": f"{type(reason).__name__}: {first_line(reason)}", "trace": traceback.format_exc()[-1500:],
                }  # fmt: skip
    if medium == "text" and expected is not None:
        found["bidirectional"] = _bidirectional(folder, uncut, processor, tower)


def _compare(
    encoder: Any, items: list[Any], pooling: str, expected: list[Tensor], layers: list[list[Tensor]] | None, path: Path
) -> dict[str, Any]:
    """Return the errors of an encoder's vectors, of all ``layers`` from one pass, and why its export to a path is refused."""
    from midlayer_encoders.errors import MidlayerError

    vectors = [states[0].mean(dim=0) if pooling == "mean" else states[0, 0] for states in expected]
    features = encoder.preprocess([items[0]])
    with torch.no_grad():
        made = encoder[0](dict(features))["token_embeddings"]
        tokens = error(made[:, : expected[0].shape[1]], expected[0])
    longest = 2  # the longest text; other media also have three inputs
    alone = error(encoder.encode(items[longest], show_progress_bar=False), vectors[longest])
    together = encoder.encode(items, show_progress_bar=False)
    found: dict[str, Any] = {"alone": alone, "tokens": tokens, "padded": error(together, torch.stack(vectors))}
    if layers is not None:
        try:
            found["one pass"] = _read_together(encoder, items, pooling, layers)
        except MidlayerError as reason:
            found["one_pass_refused"] = str(reason)
    try:
        encoder.save_pretrained(str(path))
        np.save(path / "expected.npy", torch.stack(vectors).numpy())
    except MidlayerError as reason:
        found["export_refused"] = str(reason)
    return found


def _read_together(encoder: Any, items: list[Any], pooling: str, layers: list[list[Tensor]]) -> float:
    """Return the error of all layers, read in one pass as in a sweep, relative to the uncut model."""
    from midlayer_encoders.reading.batches import batches_of
    from midlayer_encoders.reading.reader import layer_reader

    vectors = layer_reader(encoder).vectors(items, batches_of(encoder, items))
    wanted = [torch.stack([s[0].mean(dim=0) if pooling == "mean" else s[0, 0] for s in states]) for states in layers]
    return max(error(made, one) for made, one in zip(vectors, wanted, strict=True))


def _padded(processor: Any) -> dict[str, Tensor]:
    ids = [processor(text)["input_ids"] for text in TEXTS]
    longest = max(map(len, ids))
    rows = [row + [0] * (longest - len(row)) for row in ids]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in ids]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def _bidirectional(folder: Path, uncut: Uncut, processor: Any, tower: str | None) -> dict[str, Any] | None:
    """Return the effect of ``bidirectional=True`` on a causal model, or None if the model is not causal."""
    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.errors import MidlayerError

    batch = _padded(processor)
    row = 0
    length = int(batch["attention_mask"][row].sum())
    try:
        plain = reach(uncut.model, uncut.blocks, batch, row, length)
    except Exception as reason:
        return {"unknown": f"{type(reason).__name__}: {first_line(reason)}"}
    if all(one[0] for one in plain):
        return None
    try:
        encoder = LayerEncoder(str(folder / "whole"), -1, bidirectional=True, tower=tower, device="cpu")
    except MidlayerError as reason:
        return {"refused": str(reason)}
    except Exception as reason:
        return {"raised": f"{type(reason).__name__}: {first_line(reason)}"}
    inner = encoder.transformer
    anatomy = encoder.anatomy
    try:
        now = reach(inner, anatomy.blocks, batch, row, length)
        blind = [k + 1 for k, one in enumerate(now) if not one[0] or (one[1] and not one[2])]
        together = encoder.encode(TEXTS, show_progress_bar=False)
        alone = np.stack([encoder.encode(text, show_progress_bar=False) for text in TEXTS])
        return {"blind": blind, "padded": error(together, torch.as_tensor(alone))}
    except Exception as reason:
        return {"raised": f"{type(reason).__name__}: {first_line(reason)}"}


def examine_exports(exports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the error of each exported folder relative to the uncut model, with imports of this package blocked."""
    for name in [name for name in sys.modules if name.split(".")[0] == "midlayer_encoders"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Blocked())
    from sentence_transformers import SentenceTransformer

    found: dict[str, Any] = {}
    for one in exports:
        try:
            plain = SentenceTransformer(one["folder"], device="cpu")
            batch = 1 if one["medium"] == "audio" else 32
            vectors = plain.encode(INPUTS[one["medium"]](), batch_size=batch, show_progress_bar=False)
            found[one["key"]] = error(vectors, torch.as_tensor(np.load(Path(one["folder"], "expected.npy"))))
        except Exception as reason:
            found[one["key"]] = f"{type(reason).__name__}: {first_line(reason)}"
    return found


class Blocked:
    """Import finder that blocks this package."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Raise an ImportError for modules of this package."""
        if name.split(".")[0] == "midlayer_encoders":
            raise ImportError(f"imports of {name} are blocked")


# --- the verdict ------------------------------------------------------------------------------------------------------


_UNPREPARED = "must hold a tokenizer or processor"
# Errors of models that need more than a text, an image or a waveform: a grid of patches, boxes, a video, a prompt.
_OTHER_INPUTS = re.compile(r"missing \d+ required positional|[Yy]ou (have to|must) specify|expected 5, got 4")
_FAILED = "does not run on what its processor makes of a short input"


def verdict(found: Mapping[str, Any]) -> tuple[str, str]:
    """Return the verdict on a type and its reason."""
    if "not_built" in found:
        return "not examined", found["not_built"]
    if "failed" in found:
        return "raised", found["failed"]
    bad: list[str] = []
    raised: list[str] = []
    refused: dict[str, str] = {}
    exact = 0
    for key, one in found["layers"].items():
        if "raised" in one:
            raised.append(f"{key}: {one['raised']}")
        elif "refused" in one:
            refused[key] = one["refused"]
        elif "unchecked" in one:
            bad.append(f"{key}: not refused, but {found.get('no_stack') or found.get('no_oracle')}")
        else:
            wrong = [
                f"{name} {one[name]:.1e}"
                for name in ("alone", "tokens", "padded", "one pass")
                if not one.get(name, 0.0) < TOLERANCE
            ]
            export = found.get("exported", {}).get(key)
            if isinstance(export, str):
                raised.append(f"{key} exported: {export}")
            elif export is not None and not export < TOLERANCE:
                wrong.append(f"exported {export:.1e}")
            if wrong:
                bad.append(f"{key}: {', '.join(wrong)}")
            else:
                exact += 1
    both = found.get("bidirectional") or {}
    if "raised" in both:
        raised.append(f"bidirectional: {both['raised']}")
    if both.get("blind"):
        bad.append(f"bidirectional: blocks {both['blind']} stay causal")
    if both.get("padded", 0) > TOLERANCE:
        bad.append(f"bidirectional: padded {both['padded']:.1e}")
    why = next(iter(refused.values()), _FAILED)
    if "no_oracle" in found and not exact and not raised and _FAILED in why:
        if refused and _OTHER_INPUTS.search(found["no_oracle"]):
            return "refused", f"needs more than a text, an image or a waveform: {found['no_oracle']}"
        return "not examined", f"the uncut model does not run on the census's input: {found['no_oracle']}"
    if bad:
        return "wrong", "; ".join(bad)
    if raised:
        return "raised", "; ".join(raised)
    if not exact:
        return (
            ("not examined", f"its folder has no tokenizer or processor: {why}")
            if any(_UNPREPARED in text for text in refused.values())
            else ("refused", why)
        )
    if refused:
        return "some layers", f"except {', '.join(refused)}: {next(iter(refused.values()))}"
    return "exact", ""


# --- all types --------------------------------------------------------------------------------------------------------


def _stage(target: Any, args: tuple[Any, ...], path: str) -> None:
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    import logging

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    made = target(*args)
    Path(path).write_text(json.dumps(made))


def in_process(
    target: Any, args: tuple[Any, ...], path: Path, limit: float = LONGEST
) -> Iterator[dict[str, Any] | None]:
    """Run a function in a separate process: yield None until it ends, then its result or the reason of its failure."""
    process = multiprocessing.get_context("fork").Process(target=_stage, args=(target, args, str(path)))
    process.start()
    start = time.monotonic()
    while process.is_alive():
        if time.monotonic() - start > limit:
            process.kill()
            process.join()
            yield {"failed": f"took over {limit:.0f} s"}
            return
        yield None
    process.join()
    yield json.loads(path.read_text()) if path.exists() else {"failed": f"the process ended with {process.exitcode}"}


def steps(model_type: str) -> Iterator[dict[str, Any] | None]:
    """Examine a type and its exports: yield None until it is done, then the results."""
    folder = Path(tempfile.mkdtemp(prefix="census-"))
    start = time.monotonic()
    try:
        found: dict[str, Any] = {}
        for one in in_process(examine, (model_type, folder), folder / "found.json"):
            if one is None:
                yield None
            else:
                found = {"type": model_type, "layers": {}, **one}
        if found.get("exports"):
            for one in in_process(examine_exports, (found.pop("exports"),), folder / "exported.json"):
                if one is None:
                    yield None
                elif "failed" in one:
                    found["failed"] = f"exports: {one['failed']}"
                else:
                    found["exported"] = one
        found.pop("exports", None)
        found["seconds"] = round(time.monotonic() - start, 1)
        found["verdict"], found["why"] = verdict(found)
        yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def census(types: Sequence[str], workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the results for each type, several at a time, until the time limit."""
    import sentence_transformers  # noqa: F401  (shared by the forked processes)

    import midlayer_encoders.encoder.sentence_transformers_encoder  # noqa: F401

    with torch.device("meta"):
        nn.Linear(2, 2)  # imports slow modules once, before the processes fork
    from transformers import AutoModel, AutoProcessor, AutoTokenizer  # noqa: F401

    tokenizer()
    end = time.monotonic() + seconds
    waiting = list(types)[::-1]
    running: list[Iterator[dict[str, Any] | None]] = []
    while waiting or running:
        while waiting and len(running) < workers and time.monotonic() < end:
            running.append(steps(waiting.pop()))
        if not running:
            return
        for one in list(running):
            found = next(one)
            if found is not None:
                running.remove(one)
                one.close()  # type: ignore[attr-defined]
                yield found
        time.sleep(0.02)


TITLES = {
    "exact": "Exact",
    "some layers": "Exact for some layers",
    "refused": "Refused",
    "not examined": "Not examined",
    "wrong": "Wrong",
    "raised": "Other exceptions",
}


LABELS = {"some layers": "exact at some layers", "wrong": "wrong", "raised": "other exceptions"}


def page(lines: Sequence[Mapping[str, Any]], missing: int) -> str:
    """Return the text of ``benchmarks/results/families.md``."""
    import sentence_transformers
    import transformers

    groups = {name: [one for one in lines if one["verdict"] == name] for name in TITLES}
    counts = ", ".join(
        f"{len(group)} {LABELS.get(name, name)}"
        for name, group in groups.items()
        if (group or name in LABELS) and name != "not examined"
    )
    versions = (
        f"transformers {transformers.__version__} (with sentence-transformers {sentence_transformers.__version__} and "
        f"torch {torch.__version__})"
    )
    text = [
        "# Model families",
        "",
        *textwrap.wrap(
            f"The supported model types. Of the {len(lines) + missing} types that {versions} registers, "
            f"{len(lines) - len(groups['not examined'])} were examined: {counts}. The other "
            f"{missing + len(groups['not examined'])} were not examined.",
            118,
        ),
        "",
        *textwrap.wrap(
            "`python -m benchmarks.quality.census` builds a tiny random model of each type and compares every layer, with both "
            "norms, with hooks on the blocks of the uncut model: on a single input, on a padded batch, on all layers from "
            "one pass, and after an export that is loaded without this package. For causal models it also verifies "
            "`bidirectional=True`. Composite models are represented by their language model, joint models by both towers. "
            "*Refused* is a decision of this package; *not examined* means that the census has no valid tiny config, "
            "processor or library for the type. "
            "[`census.jsonl`](../benchmarks/results/census.jsonl) holds all results.",
            118,
            break_on_hyphens=False,
            break_long_words=False,
        ),
    ]
    for name, title in TITLES.items():
        if not groups[name]:
            continue
        text += ["", f"## {title} ({len(groups[name])})", ""]
        if name == "exact":
            head = ["type", "class", "medium", "exported folder", "`bidirectional`"]
            rows = [[one["type"], one["class"], one["medium"], exported(one), both_ways(one)] for one in groups[name]]
        else:
            head, rows = ["type", "reason"], [[one["type"], reason(one)] for one in groups[name]]
        text.append(table(head, rows).rstrip("\n"))
    return "\n".join(text) + "\n"


def reason(found: Mapping[str, Any]) -> str:
    """Return why a type is not exact, as a table cell without paths of temporary folders."""
    why = re.sub(r"'[^']*census-[^']*'|\S*/census-\S*", "the model", found["why"])
    return " ".join(why.split()).replace("|", "\\|")[:400]


def exported(found: Mapping[str, Any]) -> str:
    """Return whether the exported folders of a type are exact."""
    refused = [one["export_refused"] for one in found["layers"].values() if "export_refused" in one]
    return "exact" if not refused else "refused" if len(refused) == len(found["layers"]) else "some layers"


def both_ways(found: Mapping[str, Any]) -> str:
    """Return whether a type supports ``bidirectional=True``."""
    both = found.get("bidirectional")
    return "" if both is None else "refused" if "refused" in both else "unknown" if "unknown" in both else "yes"


def main() -> None:
    """Run the census."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", help="model types; all by default")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="skip types that have a result")
    parser.add_argument("--seconds", type=float, default=1e9, help="time after which no further type is started")
    parser.add_argument("--out", type=Path, default=FOUND)
    parser.add_argument("--print", action="store_true", help="print each result and write nothing")
    given = parser.parse_args()
    old = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    for one in old:
        one["verdict"], one["why"] = verdict(one)
    types = given.types or registered()
    if given.resume:
        done = {one["type"] for one in old}
        types = [name for name in types if name not in done]
    lines = {one["type"]: one for one in old} if given.resume or given.types else {}
    for found in census(types, given.workers, given.seconds):
        print(f"{found['verdict']:12} {found['type']:28} {found['seconds']:5.1f} s  {found['why'][:300]}", flush=True)
        if given.print:
            print(json.dumps(found, indent=1))
            continue
        lines[found["type"]] = found
        with given.out.open("a") as out:
            out.write(json.dumps(found) + "\n")
    if not given.print:
        given.out.write_text("".join(json.dumps(lines[name]) + "\n" for name in sorted(lines)))
        if given.out == FOUND:
            PAGE.write_text(page([lines[name] for name in sorted(lines)], len(registered()) - len(lines)))


if __name__ == "__main__":
    main()
