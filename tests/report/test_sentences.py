"""Sentences state the numbers of their tables."""

from __future__ import annotations

from midlayer_encoders.cli import sweep
from midlayer_encoders.frame.summaries import Curve, Summary
from midlayer_encoders.report.layer_charts import recipe_words
from midlayer_encoders.sweeping.previews import Preview, TaskPreview
from midlayer_encoders.tasks.overview import TaskOverview


def summary_of(points: dict[int, float]) -> Summary:
    return Summary("m", "main", 8, (Curve("task", "accuracy", points),), Curve("average", "", points), (), ())


def test_sentence_about_recipes_states_layer_score_and_both_gains() -> None:
    plain, prompted = summary_of({2: 41.0, 5: 52.5, 8: 47.25}), summary_of({2: 40.0, 6: 61.75, 8: 60.0})
    assert recipe_words({"plain": plain, "one-word": prompted}) == (
        "one-word at layer 6 of 8 scores 61.8: 9.2 points more than the best layer of the plain text (5, 52.5), 14.5 more "
        "than its last."
    )
    assert recipe_words({"one-word": prompted}) == (
        "one-word at layer 6 of 8 scores 61.8, 1.8 points more than at its last layer."
    )
    assert recipe_words({"plain": prompted, "one-word": plain}) == (
        "plain at layer 6 of 8 scores 61.8: no recipe is better than the plain text here."
    )


def test_dry_run_states_the_numbers_of_a_task() -> None:
    data = TaskOverview(
        name="t", type="Classification", why="text, label", rows={"train": 1200, "test": 34}, duplicates={"train": 5},
        leaks={"test rows in train": 2}, balance={"labels": 3.0, "rarest, share of rows": 0.125, "commonest, share of rows": 0.5},
        note="a note",
    )  # fmt: skip
    tokens = {"median": 11, "95 %": 1022, "longest": 3033}
    task = TaskPreview(name="t", data=data, scoring="all layers together", texts=4044, tokens=tokens, truncated=0.0625)
    lines = sweep._task_lines(task, 512)
    assert lines["rows"] == "train 1,200, test 34"
    assert lines["repeated"] == "5 in train"
    assert lines["leaks"] == "2 test rows in train"
    assert lines["labels"] == "3, the rarest in 12.5% of the rows, the commonest in 50.0%"
    assert lines["tokens"] == "median 11, 95 % up to 1,022, longest 3,033; 6.2% of the texts are truncated at 512"
    assert lines["to embed"] == "4,044 distinct texts"
    assert sweep._balance_line({"lowest score": -1.0, "highest score": 4.5}) == {"scores": "-1 to 4.5"}
    relevant = {"fewest": 1.0, "most": 7.0, "mean": 2.26}
    assert sweep._balance_line(relevant) == {"relevant": "1 to 7 documents per query, 2.3 on average"}


def test_dry_run_states_the_estimated_times() -> None:
    seconds = {"embedding": 61.0, "scoring": 130.0, "other": 4.0, "whole": 195.0}
    text = sweep._time_text(Preview(tasks=(), model="m", seconds=seconds, timed=3, not_timed=["far"]))
    durations = [sweep._progress.duration(seconds[name]) for name in ("whole", "embedding", "scoring", "other")]
    assert len(set(durations)) == 4
    assert text.startswith(
        "about {}, an estimate from 3 batches of these texts: embedding {}, scoring {}, other {}".format(*durations)
    )
    assert "; without scoring far" in text
    one_batch = sweep._time_text(Preview(tasks=(), model="m", seconds=seconds | {"whole": 44.0}, timed=1))
    assert one_batch.startswith("under a minute, an estimate from 1 batch of")
