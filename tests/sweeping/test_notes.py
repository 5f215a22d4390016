"""Notes beside the scores: depth, parameters of each cut model, and the folder loaded again."""

import html
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig

from midlayer_encoders import LayerEncoder
from midlayer_encoders.files import dump_with_checksum
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.best_layer import Notes, read_notes
from midlayer_encoders.sweeping.mteb_jobs import Score
from midlayer_encoders.sweeping.notes import TOGETHER, ScoringResult, _how, _recipe_hint, score_remarks
from midlayer_encoders.tasks import resolve_tasks, tfidf_scores
from midlayer_encoders.tasks.sources import TextsSource
from tests.recipes.test_word_echo import save_causal
from tests.report.made_frames import rows_frame
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, layer_scores_of, sweep, write_reranking_task, write_sts_task

pytestmark = MTEB

IN_MEMORY = {key: value for key, value in QUICK.items() if key != "device"}  # for an encoder in memory


NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([(0, 0.5, None), (2, NAN, "A: first"), (4, NAN, "B: last")], "layer 2: A: first"),
        ([(0, NAN, "A: first"), (2, NAN, "B: last")], "layer 0: A: first"),
        ([(0, NAN, None), (2, NAN, "B: last")], "layer 2: B: last"),  # an error says more than a missing score
        ([(0, NAN, None), (2, NAN, None)], "no layer has a score: all vectors are the same"),
        ([(0, NAN, None), (2, 0.0, None)], None),  # a score of 0 is a score
    ],
)
def test_failed_task_names_its_first_layer_and_its_error(
    scores: list[tuple[int, float, str | None]], expected: str | None
) -> None:
    others = [Score("other", layer, "main", 0.5) for layer in (0, 2)]
    failing = [Score("task", layer, "main", value, error) for layer, value, error in scores]
    failures = ScoringResult([*others, *failing], [], {}, {}).failures
    assert failures.keys() == ({"task"} if expected else set())
    assert failures.get("task", "").startswith(expected or "")


def test_depth_is_relative_to_the_models_own_blocks(tiny_folder: Folder, tmp_path: Path) -> None:
    model, task = tiny_folder("Llama"), write_sts_task(tmp_path)
    blocks = AutoConfig.from_pretrained(model).num_hidden_layers
    cut = LayerEncoder(model, 3, device="cpu")
    for number, (encoder, layers, expected) in enumerate(
        (
            (model, [3, 0.25], [1, 3]),
            (cut, [0, -1], [0, 3]),  # the last layer of a cut encoder is not the last of its model
        )
    ):
        options = QUICK if encoder is model else IN_MEMORY
        result = sweep(
            encoder,
            task,
            layers=layers,
            metrics=["prompt_entropy"],
            metric_texts=4,
            out=tmp_path / str(number),
            **options,
        )
        for kind in ("score", "metric"):
            rows = result.frame.filter(pl.col("kind") == kind)
            assert rows["layer"].to_list() == expected
            assert rows["depth"].to_list() == [layer / blocks for layer in expected]


@pytest.mark.parametrize(
    ("family", "norm"),
    [
        ("Llama", "final"),
        ("Llama", "none"),  # the last layer keeps a copy of the last block
        ("T5", "none"),  # has one extra block, and the first is larger than the others
        pytest.param("ModernBERT", "final", marks=pytest.mark.slow),  # has a block even at layer 0
        ("ALBERT", "final"),  # one block for all layers
    ],
)
def test_parameters_match_real_cut_encoders(family: str, norm: Any, tiny_folder: Folder, tmp_path: Path) -> None:
    model = tiny_folder(family)
    parameters = sweep(model, out=tmp_path, norm=norm, device="cpu").notes.parameters
    encoders = [LayerEncoder(model, layer, norm=norm, device="cpu") for layer in parameters]
    assert parameters == {
        encoder.layer: sum(weights.numel() for weights in encoder.parameters()) for encoder in encoders
    }
    assert len(encoders) == 5
    partial_sweep = sweep(LayerEncoder(model, 3, norm=norm, device="cpu"), out=tmp_path, norm=norm, layers=[1, 3])
    assert partial_sweep.notes.parameters == {layer: parameters[layer] for layer in (1, 3)}


def test_printed_code_uses_absolute_model_paths(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(tiny_folder("Llama"))
    monkeypatch.chdir(model.parent)
    notes = sweep(f"./{model.name}", out=tmp_path / "out", device="cpu").notes
    assert notes.model == str(model)


@pytest.mark.long
def test_folder_holds_the_result_of_the_sweep(tiny_folder: Folder, tmp_path: Path) -> None:
    model, tasks = tiny_folder("Llama"), [write_sts_task(tmp_path), write_reranking_task(tmp_path)]
    result = sweep(
        model, tasks, layers=[1, 3, 4], metrics=["prompt_entropy"], metric_texts=4, norm="none", pooling="last",
        max_length=20, out=tmp_path / "out", workers=1, device="cpu",
    )  # fmt: skip
    loaded = SweepResult.load(tmp_path / "out")
    assert loaded.frame.equals(result.frame)
    assert loaded.notes == result.notes
    assert pl.read_csv(tmp_path / "out/frame.csv").equals(result.frame, null_equal=True)
    # The best layer is that of the highest mean.
    means = {layer: sum(layer_scores_of(result, task)[layer] for task in tasks) for layer in (1, 3, 4)}
    best = max(means, key=lambda layer: means[layer])
    assert loaded.best() == best
    seconds = result.notes.seconds
    assert 0 < seconds[1] < seconds[3] < seconds[4]  # of one pass through all layers
    assert loaded.notes.milliseconds == {layer: 1e3 * time / 16 for layer, time in seconds.items()}
    assert result.notes.dimensions == LayerEncoder(model, 1, device="cpu").get_embedding_dimension()
    assert result.notes.timing["texts"] == 16
    assert f"16 texts of {result.notes.timing['tokens']} tokens at once on cpu" in result.notes.how["time per text"]
    assert result.notes.baselines["TF-IDF"] == {
        task.metadata.name: pytest.approx(tfidf_scores(task), abs=1e-6) for task in resolve_tasks(tasks)
    }
    # mteb's own file for each layer and task holds the score.
    files = [json.loads(path.read_text()) for path in (tmp_path / "out/mteb").rglob("near-*.json")]
    saved_scores = sorted(file["scores"]["test"][0]["main_score"] for file in files)
    assert saved_scores == pytest.approx(sorted(layer_scores_of(result, tasks[0]).values()), abs=1e-6)
    how = result.notes.how
    assert how["longest text"] == "20 tokens"
    assert how["tasks"] == "near, ranks"
    assert how["weights"] == LayerEncoder(model, -1, norm="none", device="cpu").spec.weights_digest


@pytest.mark.long
def test_export_code_on_the_page_recreates_the_scored_encoder(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = tiny_folder("Llama"), {"norm": "none", "pooling": "last"}
    result = sweep(model, write_sts_task(tmp_path), layers=[1, 2], out=tmp_path / "out", **options, **QUICK)
    page = html.unescape(re.sub(r"<[^>]*>", "", result.to_html().read_text()))
    command = next(line for line in page.splitlines() if "save_pretrained" in line)
    code = re.search(r"LayerEncoder\(.*?\)\.save_pretrained\(.*?\)", command)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(code[0], {"LayerEncoder": LayerEncoder})
    (folder,) = tmp_path.glob("layer-*")
    expected = LayerEncoder(model, result.best(), device="cpu", **options)
    texts = ["the old stone bridge", "a paper boat"]
    assert SentenceTransformer(str(folder), device="cpu").encode(texts) == pytest.approx(
        expected.encode(texts), abs=1e-5
    )
    assert f"--layer {result.best()} --norm none --pooling last --out layer-{result.best()}" in page


def test_remarks_state_what_mteb_and_baselines_could_not_score() -> None:
    scores = [Score("A", 1, "f1", 0.5), Score("A", 2, "f1", 0.25), Score("A", 3, "f1", float("nan"))]
    confirmed = [
        Score("A", 1, "f1", 0.509),  # near enough
        Score("A", 2, "f1", 0.2625),
        Score("A", 2, "f1", float("nan")),
        Score("A", 2, error="no data"),
        Score("A", 3, "f1", 0.5),
    ]
    sources = [TextsSource(Path("lines.txt"), "lines-0123abcd"), TextsSource(Path("n.txt"), "NearnessSTS")]
    baselines = {"TF-IDF": {"A": 0.5, "B-0123abcd": float("nan")}, "BM25": {"A": 0.5}}
    together = "but all layers together gave 25.0: sweep with scoring='mteb' for scores by mteb only."
    assert score_remarks(sources, ScoringResult(scores, confirmed, {}, {}), baselines) == [
        "Grades of NearnessSTS: 0: objects of two libraries; 1: two subjects of one library; 2: two files of one "
        "subject; 3: two objects of one file; 4: one object.",
        "lines, NearnessSTS: texts without labels, which are used for metrics and not scored.",
        "No score at layer 3 of A: all vectors are the same or not finite there, or the task's labels do not differ.",
        "No score of TF-IDF on B: it does not distinguish any two texts there.",
        f"mteb scores A at layer 2 26.2, {together}",
        f"mteb scores A at layer 2 nan, {together}",
        "mteb could not score A at layer 2: no data",
    ]


def test_page_of_a_sweep_states_how_it_was_measured(tiny_folder: Folder) -> None:
    spec = LayerEncoder(tiny_folder("Llama"), 2, norm="none", pooling="last", max_length=20, device="cpu").spec
    methods = {"A-0123abcd": TOGETHER, "B-4567cdef": "by mteb, because it is odd"}
    sources = [TextsSource(Path(name), name) for name in methods]
    how = _how(spec, sources, methods, {"seconds": "7"})
    together = "all layers together; the best, the second best and the last confirmed by mteb"
    expected = {
        "model": spec.model.removeprefix("local/"),
        "norm": "none",
        "pooling": "last",
        "longest text": "20 tokens",
        "dtype": "float32",
        "weights": spec.weights_digest,
        "tasks": "A, B",
        "seconds": "7",
        "scoring": f"{together}; B by mteb, because it is odd",
    }
    assert {name: how[name] for name in expected} == expected
    assert how.keys() - expected.keys() == {"Python", "midlayer-encoders", "torch", "transformers",
                                            "sentence-transformers", "mteb", "scikit-learn"}  # fmt: skip
    other = _how(replace(spec, max_length=None, revision="step7"), [], {"B": "by mteb"}, {})
    assert (other["tasks"], other["scoring"], other["revision"]) == ("none", "B by mteb", "step7")
    assert other["longest text"] == "as the model takes"
    assert "scoring" not in _how(spec, [], {}, {})


NOTES = Notes(
    title="t",
    model="m",
    how={"seed": "0"},
    parameters={0: 3, 12: 5},
    seconds={0: 0.25, 12: 0.5},
    baselines={"TF-IDF": {"A": 0.5}},
    remarks=["a remark"],
    failures={"B": "no data"},
    options={"norm": "none"},
    scoring={"A": TOGETHER},
    vectors={"center": "center.txt", "normalize": True},
    recipes={},  # of a result with several recipes
    dimensions=8,
    timing={"texts": 4},
    layers={17: {"image": 12, "text": 6}},
    tokens={"A": 14.25},
    rows={"A": {"test": [10, 40, 1]}},
    compression={"recipe": "plain", "dims": 8, "precision": "int8"},
    resamples={"TF-IDF": {"A": [0.25, 0.75]}},
    hint="Try another recipe.",
)


def test_every_field_of_the_notes_is_read_back(tmp_path: Path) -> None:
    plain = Notes("", "", {})
    same = [name for name, value in asdict(NOTES).items() if value == getattr(plain, name)]
    assert same == ["recipes"], "a field without a value here"
    rows = [("m", "main", 0, 0.0, "score", "A", "f1", 0.5)]
    SweepResult(rows_frame(rows), tmp_path, NOTES).save()
    assert SweepResult.load(tmp_path).notes == NOTES
    assert NOTES.milliseconds == {0: 62.5, 12: 125.0}
    assert replace(NOTES, timing={}).milliseconds == {0: 15.625, 12: 31.25}  # 16 texts before the number was noted
    content = (tmp_path / "sweep.json").read_bytes()
    saved = json.loads(content)
    for value, wrong in ((b'"A": 0.5', b'"A": 0.6'), (b'"12": 5', b'"13": 5'), (b'"a remark"', b'"a rumark"')):
        assert value in content
        (tmp_path / "sweep.json").write_bytes(content.replace(value, wrong))
        with pytest.raises(ValueError, match="does not match its checksum"):
            read_notes(tmp_path / "sweep.json")
    del saved["checksum"]
    for name, value in saved.items():
        wrong_value: object = 5 if isinstance(value, str) else "words"
        (tmp_path / "sweep.json").write_bytes(dump_with_checksum(saved | {name: wrong_value}))
        with pytest.raises((TypeError, AttributeError), match=f"{name} is not a |has no attribute 'items'"):
            read_notes(tmp_path / "sweep.json")


def test_recipes_share_baselines_and_failures_name_their_recipe(tmp_path: Path) -> None:
    parts = {}
    for place, (recipe, score) in enumerate((("plain", 0.5), ("one-word", 0.75))):
        rows = rows_frame([("m", "main", k, k / 1, "score", "A", "f1", score + k / 10) for k in (0, 1)])
        notes = replace(NOTES, model=recipe, failures={"B": f"error {place}"}, vectors={}, layers={})
        notes = replace(notes, baselines=notes.baselines if place == 0 else {})
        parts[recipe] = SweepResult(rows, tmp_path / "recipes" / recipe, notes)
        parts[recipe].save()
    result = SweepResult.of(parts, tmp_path)
    assert (result.recipe, result.best(), result.notes.model) == ("one-word", 1, "one-word")
    assert result.notes.baselines == NOTES.baselines
    assert result.failures == {"B (plain)": "error 0", "B (one-word)": "error 1"}
    result.save()
    assert read_notes(tmp_path / "sweep.json").recipes == {"plain": "recipes/plain", "one-word": "recipes/one-word"}
    loaded = SweepResult.load(tmp_path)
    assert loaded.parts
    assert loaded.frame.equals(result.frame)
    page = loaded.html()
    assert all(f"B ({recipe}) failed: error {place}" in page for place, recipe in enumerate(parts))
    assert set(loaded.plots()) == {"recipes", "scores"}


@pytest.mark.parametrize(("tokens", "mean"), [({"A": 10.0, "B": 21.0}, 15.5), ({"A": 40.0}, 40.0)])
def test_hint_of_a_prompt_states_the_tokens_that_it_costs(
    tokens: dict[str, float], mean: float, tmp_path: Path
) -> None:
    encoder = LayerEncoder(save_causal("byte level", tmp_path), -1, device="cpu")
    prompt = 'This sentence : "" means in one word:"". The rewritten sentence: "'
    prompted = 2 * mean + len(encoder.tokenizer(prompt)["input_ids"])
    hint = _recipe_hint(encoder, tokens, {"seconds": "7"})
    cost = f"one more pass, over about {prompted:.0f} tokens per text instead of {mean:.0f}; this sweep took 7 s."
    assert hint.endswith(f"It costs {cost}")
    assert _recipe_hint(encoder, {}, {"seconds": "7"}) == ""


def test_model_that_reads_both_ways_has_no_hint_of_a_prompt(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), -1, device="cpu")
    assert _recipe_hint(encoder, {"A": 10.0}, {"seconds": "7"}) == ""
