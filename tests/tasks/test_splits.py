"""A task of a benchmark keeps the splits and subsets of the benchmark."""

import mteb

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.tasks import resolve_tasks
from tests.support.others_warnings import MTEB

pytestmark = MTEB


def test_splits_and_subsets_match_the_benchmark() -> None:
    with isolated_random():
        expected = {
            task.metadata.name: (set(task.eval_splits), set(task.hf_subsets))
            for task in mteb.get_benchmark("MTEB(eng, v1)").tasks
        }
    actual = {
        task.metadata.name: (set(task.eval_splits), set(task.hf_subsets)) for task in resolve_tasks("MTEB(eng, v1)")
    }
    assert actual == expected
    assert {split for splits, _ in actual.values() for split in splits} > {"test"}  # MSMARCO's is dev
