"""The key under which an image is stored, and the name of a task's baseline on the page."""

import re
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.best_layer import Notes
from midlayer_encoders.sweeping.embedder import item_key
from midlayer_encoders.sweeping.mteb_jobs import Score
from midlayer_encoders.sweeping.notes import ScoringResult, _undefined_scores
from tests.report.made_frames import rows_frame


def test_images_of_the_same_bytes_differ_by_shape_and_by_mode() -> None:
    content = bytes(range(24))
    shapes = [(1, 24), (24, 1), (2, 12), (12, 2), (3, 8), (8, 3), (4, 6), (6, 4)]
    images = [Image.frombytes("L", shape, content) for shape in shapes]
    images += [Image.frombytes("RGB", shape, content) for shape in ((2, 4), (4, 2), (1, 8))]
    images += [Image.frombytes("RGBA", shape, content) for shape in ((2, 3), (3, 2))]
    assert {image.tobytes() for image in images} == {content}
    assert len({item_key(image) for image in images}) == len(images)
    assert [item_key(image.copy()) for image in images] == [item_key(image) for image in images]


def test_images_with_a_palette_differ_by_their_colors() -> None:
    red, blue = Image.new("P", (2, 2)), Image.new("P", (2, 2))
    red.putpalette([255, 0, 0])
    blue.putpalette([0, 0, 255])
    assert red.tobytes() == blue.tobytes()
    assert item_key(red) != item_key(blue)
    assert item_key(red) == item_key(red.convert("RGB"))


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("near-0a1b2c3d", "STS12"), ["near", "STS12"]),
        (("near-0a1b2c3d", "near-4e5f6071"), ["near-0a1b2c3d", "near-4e5f6071"]),  # distinguished by their digests only
    ],
)
def test_baselines_use_the_task_names_on_the_page(names: tuple[str, str], shown: list[str], tmp_path: Path) -> None:
    scores = {names[0]: (0.2, 0.3, 0.1), names[1]: (0.4, 0.6, 0.5)}
    frame = rows_frame(
        [
            ("m", "main", layer, layer / 2, "score", task, "cosine_spearman", value)
            for task, values in scores.items()
            for layer, value in enumerate(values)
        ]
    )
    notes = Notes(title="T", model="m", how={}, baselines={"TF-IDF": {names[0]: 0.456, names[1]: 0.123}})
    page = SweepResult(frame, tmp_path, notes).html()
    table = re.search(r"<table><caption>Points by layer.*?</table>", page)
    assert table is not None
    rows = [
        [unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr.*?</tr>", table[0])
    ]
    # The mean is that of 45.6 and 12.3, 28.95; the first task's best layer has 30 points, the second's 60.
    assert rows[0] == ["Layer", "Average", *shown]
    assert rows[-1][0] == "TF-IDF"
    assert rows[-1][2:] == ["45.6", "12.3"]
    assert float(rows[-1][1]) == pytest.approx(28.95, abs=0.051)


def test_tasks_without_a_score_at_the_same_layers_share_a_remark() -> None:
    layers_by_task = {"A": (0,), "B": (0,), "C": (1, 2), "D": (0, 1, 2)}  # D has no score at all, and so it failed
    missing = [Score(task, layer, "f1") for task, layers in layers_by_task.items() for layer in layers]
    scored = [Score(task, 3, "f1", 0.5) for task in "ABC"]
    first_remark, second_remark = _undefined_scores(ScoringResult([*missing, *scored], [], {}, {}))
    assert first_remark.startswith("No score at layer 0 of A, B: all vectors are the same or not finite there")
    assert second_remark.startswith("No score at layer 1, 2 of C: ")
