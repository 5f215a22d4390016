"""Every digest and key changes with each of its parts: a part that is left out would return a stale result."""

import ast
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

import midlayer_encoders
from benchmarks.paper.setting import Setting
from midlayer_encoders import EncoderOptions, EncoderSpec, LayerEncoder
from midlayer_encoders._types import content_digest
from midlayer_encoders.comparing.checkpoints import Checkpoint, files_fingerprint
from midlayer_encoders.comparing.progression import _Step
from midlayer_encoders.extras.gguf import cache as gguf_cache
from midlayer_encoders.extras.gguf.file import GgufFile, read_gguf
from midlayer_encoders.extras.scaling.sweep_units import sweep_units
from midlayer_encoders.extras.settings import TuneSettings
from midlayer_encoders.extras.training.runs import Run
from midlayer_encoders.extras.vectors.embedding import EmbedJob
from midlayer_encoders.metrics.media_views import _generator
from midlayer_encoders.metrics.text_views import augment
from midlayer_encoders.recipes import Recipe, recipes_of
from midlayer_encoders.sweeping import mteb_jobs, task_scoring
from midlayer_encoders.sweeping.compression import Compression
from midlayer_encoders.sweeping.embedder import Embedder, item_key, map_identity, open_store, store_key
from midlayer_encoders.sweeping.layer_sweep import SingleSweep, _folder_name
from midlayer_encoders.sweeping.mteb_jobs import score_identity
from midlayer_encoders.sweeping.request import SweepSettings
from midlayer_encoders.sweeping.store import text_key
from midlayer_encoders.sweeping.sweeps import Sweep
from midlayer_encoders.tasks import resolve_tasks
from midlayer_encoders.tasks.sampled_tasks import _rank
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.tables import Columns
from midlayer_encoders.tasks.task_data import TaskData
from midlayer_encoders.tasks.training_rows import TrainingRows
from tests.support.tiny_folders import TEXTS
from tests.sweeping.scoring import write_sts_task

ROOT = Path(midlayer_encoders.__file__).parents[1]
ROOMS = ("midlayer_encoders", "callbacks", "benchmarks/paper")
HASHES = {"blake2b", "sha256", "sha1", "md5", "crc32", "adler32", "file_digest", "content_digest", "_digest"}
COVERED_BY = {  # tests of other files that change each part
    "midlayer_encoders/encoder/description.py": "tests/encoder/test_keys.py",
    "midlayer_encoders/encoder/digests.py": "tests/encoder/test_files_digest.py",
    "midlayer_encoders/encoder/spec.py": "tests/encoder/test_keys.py",
    "midlayer_encoders/files.py": "tests/tuning/test_damage.py",
    "midlayer_encoders/extras/scaling/units.py": "tests/scaling/test_vectors.py",
    "midlayer_encoders/frame/schema.py": "tests/report/test_results.py",
    "midlayer_encoders/extras/gguf/cache.py": "tests/models/test_gguf_cache.py",
    "midlayer_encoders/report/pages.py": "tests/report/test_sweep_page.py",
    "midlayer_encoders/sweeping/store.py": "tests/store/test_damage.py",
    "midlayer_encoders/sweeping/mteb_jobs.py": "tests/sweeping/test_resume.py",
    "callbacks/_measurement.py": "tests/callbacks/test_resume.py",
}
DIGESTS: dict[str, Callable[[Any], Any]] = {}
"""By function, a test that yields the digest of a base and then that of each change."""


def digest(
    path: str, *functions: str, root: str = "midlayer_encoders"
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a generator of digests for functions of a file in a folder."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        DIGESTS.update({f"{root}/{path}:{function}": make for function in functions})
        return make

    return register


def changed_fields(base: Any, changes: dict[str, Any], without_effect: set[str] = frozenset()) -> Iterator[Any]:  # type: ignore[assignment]
    """Yield an object and its copies with one changed field each; every field must be listed."""
    assert {field.name for field in fields(base)} == changes.keys() | without_effect
    yield base
    for name, value in changes.items():
        assert getattr(base, name) != value
        yield replace(base, **{name: value})


@digest("_types.py", "content_digest")
def content_digests(_: Any) -> Iterator[str]:
    yield content_digest("a")
    yield content_digest("b")
    yield content_digest("a", 4)


@digest("_types.py", "EncoderSpec.digest")
def spec_digests(world: Any) -> Iterator[str]:
    spec = LayerEncoder(world.folder, 2, device="cpu").spec
    for changed in changed_fields(spec, {field.name: "another" for field in fields(EncoderSpec)}):
        yield changed.digest
    for number, (name, _) in enumerate(spec.parts):
        yield replace(spec, parts=(*spec.parts[:number], (name, "another"), *spec.parts[number + 1 :])).digest


@digest("encoder/spec.py", "encoder_spec")
def encoder_digests(world: Any) -> Iterator[str]:
    encoder = LayerEncoder(world.folder, 2, device="cpu", prompts={"a": "x: ", "b": "y: "}, default_prompt_name="a")
    yield encoder.spec.digest
    for name, value in {
        "default_prompt_name": "b", "prompts": {"a": "z: ", "b": "y: "}, "max_seq_length": 9, "truncate_dim": 4,
        "similarity_fn_name": "dot",
    }.items():  # fmt: skip
        before = getattr(encoder, name)
        setattr(encoder, name, value)
        yield encoder.spec.digest
        setattr(encoder, name, before)
    assert encoder.spec.digest == LayerEncoder(world.folder, 2, **encoder.options.non_defaults()).spec.digest


@digest("tasks/sampled_tasks.py", "_rank")
def ranks(_: Any) -> Iterator[str]:
    yield from (_rank(1), _rank("1"), _rank("2"), _rank(2))


@digest("sweeping/store.py", "text_key")
def text_keys(_: Any) -> Iterator[str]:
    yield from (text_key("a"), text_key("b"), text_key("a", "b"), text_key("ba"), text_key("", "ba"))


@digest("sweeping/embedder.py", "item_key")
def item_keys(_: Any) -> Iterator[str]:
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    yield item_key("a text")
    yield item_key("a text", "prompt")
    yield item_key(Image.fromarray(pixels))
    yield item_key(Image.fromarray(pixels + 1))
    yield item_key(Image.fromarray(pixels.reshape(6, 4, 3)))
    for samples in (np.zeros(8, dtype=np.float32), np.ones(8, dtype=np.float32)):
        yield item_key((samples, 16000))
        yield item_key((samples, 8000))


@digest("sweeping/embedder.py", "Embedder.plan")
def plan_files(world: Any) -> Iterator[str]:
    encoder = LayerEncoder(world.folder, -1, device="cpu")
    store = open_store(world.path, encoder.spec, [1], encoder, "float32")
    for items, budget in ((TEXTS, 64), (TEXTS[1:], 64), (TEXTS[::-1], 64), (TEXTS, 96)):
        before = {path.name for path in store.folder.glob("plans/*")}
        keys = {item_key(text): text for text in items}
        Embedder(encoder, store, budget).plan(keys, set(range(len(items))), "")
        (new,) = {path.name for path in store.folder.glob("plans/*")} - before
        yield new


@digest("sweeping/embedder.py", "store_key")
def store_keys(world: Any) -> Iterator[str]:
    spec = LayerEncoder(world.folder, 2, device="cpu").spec
    assert store_key(replace(spec, layer=3, similarity="dot")) == store_key(spec)  # which change no stored vector
    yield store_key(spec, "float16")
    for name in {field.name for field in fields(spec)} - {"layer", "similarity"}:
        yield store_key(replace(spec, **{name: "another"}))
    yield store_key(spec)


@digest("sweeping/embedder.py", "map_identity", "mapped_store")
def map_identities(_: Any) -> Iterator[dict[str, Any]]:
    recipe = Recipe(name="a", center=True)
    yield map_identity(recipe, ["a", "b"])
    yield map_identity(recipe, ["a", "c"])
    yield map_identity(recipe, ["b", "a"])
    yield map_identity(replace(recipe, normalize=True), ["a", "b"])
    yield map_identity(Recipe(name="a"), ["a", "b"])


@digest("sweeping/layer_sweep.py", "_folder_name")
def recipe_folders(_: Any) -> Iterator[str]:
    yield from (_folder_name(name).lower() for name in ("Mine", "mine", "m ne", "m_ne", "x" * 80, "x" * 81))


@digest("sweeping/layer_sweep.py", "SingleSweep._metrics_key")
def metrics_keys(world: Any) -> Iterator[str]:
    spec = LayerEncoder(world.folder, 2, device="cpu").spec
    request = SimpleNamespace(metrics=("cka",), settings=SimpleNamespace(views=2))
    job = SimpleNamespace(spec=spec, layers=(0, 1), request=request)
    yield (base := SingleSweep._metrics_key(job, ["a", "b"]))
    assert SingleSweep._metrics_key(job, ["a", "b"]) == base
    yield SingleSweep._metrics_key(job, ["b", "a"])
    for owner, name, value in (
        (job, "layers", (0, 2)), (job, "spec", replace(spec, weights_digest="another")),
        (request, "metrics", ("cka", "curvature")), (request.settings, "views", 3),
    ):  # fmt: skip
        before = getattr(owner, name)
        setattr(owner, name, value)
        yield SingleSweep._metrics_key(job, ["a", "b"])
        setattr(owner, name, before)


@digest("sweeping/mteb_jobs.py", "score_identity")
def score_headers(world: Any) -> Iterator[dict[str, Any]]:
    (task,) = resolve_tasks(write_sts_task(world.path))
    yield (header := score_identity(task, "a"))
    parts = {"format", "task", "data", "main_score", "splits", "subsets", "store", "mteb", "settings"}
    assert header.keys() == parts
    path = world.path / "scores.json"
    path.write_bytes(task_scoring.dump_with_checksum({"of": header, "scores": {"a": [1.0, None]}}))
    assert task_scoring._read_scores(path, header=header) == {"a": pytest.approx([1.0, float("nan")], nan_ok=True)}
    for name in parts:
        assert task_scoring._read_scores(path, header=header | {name: "another"}) == {}
    for name in ("seed", "n_experiments", "any_setting_of_a_task"):
        setattr(task, name, 77)
        yield score_identity(task, "a")
    task._eval_splits = ["another"]
    yield score_identity(task, "a")
    yield score_identity(task, "b")
    world.monkeypatch.setattr(mteb_jobs, "version", lambda _: "0.0")
    yield score_identity(task, "a")


@digest("extras/vectors/embedding.py", "EmbedJob._metadata", "EmbedJob.run_on")
def digests_of_inputs(world: Any) -> Iterator[str]:
    encoder = LayerEncoder(world.folder, -1, device="cpu")
    for inputs, prompt in ((TEXTS, ""), (TEXTS[1:], ""), (TEXTS[::-1], ""), (TEXTS, "a: ")):
        job = EmbedJob(encoder, {}, world.path, [1, 2], None, prompt, "auto")
        yield job._metadata(*job._keys_and_prompt(inputs))["inputs_digest"]


@digest("comparing/progression.py", "_Step.path", "_texts_digest")
def step_files(world: Any) -> Iterator[str]:
    settings: dict[str, Any] = {"metrics": "paper", "layers": "all", "views": 16, "seed": 0, "dataset": "texts"}
    checkpoint = Checkpoint("step1", 1, "hub/name", "step1")
    step = _Step(checkpoint, "model", settings, TEXTS, [], EncoderOptions(), world.path)
    changes: list[dict[str, Any]] = [{}, *({"settings": settings | {name: "another"}} for name in settings)]
    changes += [{"model": "another"}, {"texts": TEXTS[1:]}, {"texts": [*TEXTS[1:], TEXTS[0]]}]
    changes += [{"options": EncoderOptions(max_length=9)}, {"checkpoint": replace(checkpoint, revision="step2")}]
    for change in changes:
        yield str(replace(step, **change).path)


@digest("comparing/checkpoints.py", "files_fingerprint")
def fingerprints(world: Any) -> Iterator[str]:
    folder = world.path / "model"
    folder.mkdir()
    path = folder / "weights"
    path.write_text("abc")
    os.utime(path, ns=(0, 0))
    yield files_fingerprint(folder)
    path.write_text("abd")
    os.utime(path, ns=(0, 0))  # the change time differs
    yield files_fingerprint(folder)
    os.utime(path, ns=(0, 1))
    yield files_fingerprint(folder)
    path.rename(folder / "renamed")
    yield files_fingerprint(folder)
    (folder / "more").write_text("")
    yield files_fingerprint(folder)
    yield files_fingerprint(folder / "absent")


@digest("extras/gguf/cache.py", "_name")
def converted_folders(world: Any) -> Iterator[str]:
    file = GgufFile({}, {}, "a")
    yield gguf_cache._name(file)
    yield gguf_cache._name(file._replace(digest="b"))
    world.monkeypatch.setattr(gguf_cache, "_GENERATION", -1)
    yield gguf_cache._name(file)
    for name in ("transformers", "gguf", "tokenizers"):
        world.monkeypatch.setattr(importlib.metadata, "version", lambda package, name=name: str(package == name))
        yield gguf_cache._name(file)


@digest("extras/gguf/file.py", "_with_tensors")
def gguf_headers(world: Any) -> Iterator[str]:
    gguf = pytest.importorskip("gguf")
    path = world.path / "model.gguf"
    for name, tensor, factor in (("a", "v", 1.0), ("b", "v", 1.0), ("a", "w", 1.0), ("a", "v", 2.0)):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name(name)
        writer.add_tensor(tensor, np.ones(32, np.float32))
        writer.add_tensor("rope_freqs.weight", np.full(32, factor, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield read_gguf(path).digest


@digest("metrics/media_views.py", "_generator")
def generator_draws(_: Any) -> Iterator[float]:
    for arguments in (
        (0, 0, (2,), b"ab"),
        (1, 0, (2,), b"ab"),
        (0, 1, (2,), b"ab"),
        (0, 0, (1, 2), b"ab"),
        (0, 0, (2,), b"ac"),
    ):
        yield _generator(*arguments).random()


@digest("metrics/text_views.py", "augment")
def text_views(_: Any) -> Iterator[list[str]]:
    text = "the quick brown fox jumps over the lazy dog near the river bank"
    first, second = augment([text, text], views=2, seed=0)
    yield from (first[0], first[1], second[0], second[1])
    yield from augment([text, text], views=1, seed=1)[0]


@digest("extras/scaling/sweep_units.py", "sweep_units")
def unit_identities(world: Any) -> Iterator[str]:
    sources = task_sources(["DocstringNearnessSTS", "STS12", "STS13"])
    plain, word = recipes_of("recipes", ["plain", "one-word"])
    (world.path / "config.json").write_text("{}")
    request = Sweep(str(world.path), sources, recipes=[plain, word], out=world.path / "out", device="cpu")
    assert request.sources == sources
    changes: dict[str, Any] = {
        "model": "n", "options": {"revision": "step1"}, "layers": [1], "metrics": ["cka"], "baselines": False,
        "compressions": (Compression(), Compression(8)), "settings": SweepSettings(workers=2), "recipes": [word, plain],
        "store": "shared",
    }  # fmt: skip
    # These have none on a task, except its name.
    read = {"text_column", "label_column", "drop_empty", "dims", "precisions"}  # into columns and compressions
    without_effect = read | {"tasks", "sources", "columns", "limit", "out", "progress", "executor", "center_texts"}
    assert vars(request).keys() == changes.keys() | without_effect

    def identity(request: Sweep, step: str = "score", recipe: str | None = "plain", item: int = 0) -> str:
        units = {(unit.step, *unit.items): unit.outcome.name for unit in sweep_units("m", request)}
        return units[(step, recipe, item) if step == "score" else (step,)]

    yield identity(request)
    for name, value in changes.items():
        yield identity(request.change(**{name: value}))
    yield identity(request, item=1)
    yield identity(request, recipe="one-word")
    for change in ({"eval_splits": ("train",)}, {"hf_subsets": ("fr",)}):
        yield identity(request.change(sources=[replace(sources[1], **change)]))
    yield identity(request, "plan", None)
    yield identity(request.change(sources=sources[:2]), "plan", None)
    finish = request, request.change(sources=sources[:2]), request.change(recipes=[plain]), request.change(recipes=None)
    for each in finish:
        yield identity(each, "finish", None)
    (world.path / "config.json").write_text("[1]")  # another model under its name
    yield identity(request)


@digest("tasks/task_data.py", "TaskData.digest")
def task_digests(_: Any) -> Iterator[str]:
    data = TaskData(type="STS", splits={"test": {"score": [1, 2]}}, description="")
    changes = {"type": "PairClassification", "splits": {"test": {"score": [2, 1]}}, "settings": {"n_experiments": 2}}
    named = {"description", "label", "origin", "note"}
    for changed in changed_fields(data, changes, named):
        yield changed.digest


@digest("paper/setting.py", "Setting.digest", root="benchmarks")
def paper_digests(world: Any) -> Iterator[str]:
    setting = Setting(models=("a",), load=lambda _: None, out=world.path)  # type: ignore[arg-type, return-value]
    changes: dict[str, Any] = {
        "models": ("b",), "texts": ("a",), "solutions": ("a",), "revisions": ("step1",),
        "tasks": "other", "layers": (0, -1), "swept": (pl.DataFrame({"dime": [1.0]}),), "limit": 4, "max_length": 17,
        "seed": 6, "options": EncoderOptions(dtype="float16"), "columns": Columns("title"),
    }  # fmt: skip
    shown = {"progress", "texts_note"}  # on the terminal and on the page; no number depends on them
    for changed in changed_fields(setting, changes, {"load", "out", "workers", "_loaded", *shown}):
        yield changed.digest


@digest("tasks/training_rows.py", "TrainingRows.digest")
def pair_digests(_: Any) -> Iterator[str]:
    pairs = TrainingRows("pairs", ({"anchor": "a", "positive": "b"}, {"anchor": "c", "positive": "d"}), "file")
    for rows in (pairs.rows, pairs.rows[::-1], pairs.rows[:1], ({"anchor": "a", "positive": "c"}, pairs.rows[1])):
        yield replace(pairs, rows=rows).digest


@digest("extras/training/runs.py", "Run.identity")
def runs(_: Any) -> Iterator[dict[str, Any]]:
    pairs = TrainingRows("pairs", ({"anchor": "a", "positive": "b"},), "file")
    encoder: Any = SimpleNamespace(spec=SimpleNamespace(digest="a"))
    settings = TuneSettings()
    run = Run(encoder, pairs, settings, Path("out"), None, None)
    yield run.identity
    yield replace(run, rows=replace(pairs, rows=({"anchor": "b", "positive": "a"},))).identity
    yield replace(run, encoder=SimpleNamespace(spec=SimpleNamespace(digest="b"))).identity  # type: ignore[arg-type]
    changes: dict[str, Any] = {
        "lora": 4, "epochs": 2.0, "max_steps": 5, "batch_size": 8, "learning_rate": 1.0, "held_out": 0.2, "patience": 9,
        "checkpoints": 4, "mini_batch": 2, "matryoshka": [4], "seed": 1, "objective": "mntp",
    }  # fmt: skip
    for changed in list(changed_fields(settings, changes))[1:]:
        yield replace(run, settings=changed).identity


def hashing_functions() -> Iterator[str]:
    """Yield the file and name of every function of the package that computes a hash."""
    for path in sorted(path for room in ROOMS for path in ROOT.glob(f"{room}/**/*.py")):
        source = path.read_text()
        tree = ast.parse(source if any(name in source for name in HASHES) else "")
        for node in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
            for scope in node.body:
                if isinstance(scope, ast.FunctionDef):
                    calls = [call.func for call in ast.walk(scope) if isinstance(call, ast.Call)]
                    names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
                    if names & HASHES:
                        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                        yield f"{path.relative_to(ROOT).as_posix()}:{owner}{scope.name}"


def test_every_function_that_computes_a_hash_has_a_test() -> None:
    functions = set(hashing_functions())
    assert len(functions) > 20
    untested = {function for function in functions - DIGESTS.keys() if function.partition(":")[0] not in COVERED_BY}
    assert not untested, "register a generator that changes each part"
    assert all((ROOT / path).is_file() for path in COVERED_BY.values())


@pytest.fixture
def world(tmp_path: Path, tiny_folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what the generators need."""
    return SimpleNamespace(path=tmp_path, folder=tiny_folder("Llama"), monkeypatch=monkeypatch)


@pytest.mark.parametrize("function", sorted({make.__name__: name for name, make in DIGESTS.items()}.values()) or [""])
def test_each_part_changes_the_digest(function: str, world: Any) -> None:
    digests = list(DIGESTS[function](world))
    assert len(digests) > 1
    assert len(set(map(str, digests))) == len(digests)
