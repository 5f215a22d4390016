"""Every number that a page puts first is read out of the page and computed again from the committed frames."""

from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import intervals
from benchmarks.pretraining import findings, record
from tests.docs import frames, record_numbers, zoo_numbers
from tests.docs.stated import Claim, read_claims, wrong

SHARED = vars(intervals) | vars(findings) | vars(record) | vars(record_numbers) | vars(zoo_numbers) | vars(frames)
CLAIMS = [
    claim
    for path in sorted((Path(__file__).parent / "claims").glob("*.txt"))
    for claim in read_claims(path, SHARED | vars(import_module(f"tests.docs.numbers_{path.stem}")))
]


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_pages_say_what_the_frames_say(claim: Claim) -> None:
    assert not (said := wrong(claim)), "\n".join(said)


@pytest.mark.parametrize(
    ("text", "numbers", "said"),
    [
        ("best\n50.9 of 1,024 at layer six", [50.92, 1024, 6], []),
        ("best 50.9 of 1,024 at layer six", [50.96, 1024, 6], ["page.md:1 says 50.9"]),
        ("\nbest −.62 of 3 at layer seven", [-0.62, 4, 6], ["page.md:2 says 3", "page.md:2 says seven"]),
        ("the best is 50.9", [50.9, 1, 2], ["page.md does not say"]),
    ],
)
def test_a_number_is_found_in_a_page_and_compared_to_its_own_digits(
    text: str, numbers: list[float], said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text(text, encoding="utf8")
    found = wrong(Claim("page.md", "best {} of {} at layer {}", lambda: numbers), tmp_path)
    assert len(found) == len(said)
    assert all(sentence.startswith(start) for sentence, start in zip(found, said, strict=True))
