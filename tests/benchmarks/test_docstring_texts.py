import json

import pytest

from benchmarks.quality.docstring_texts.extract import SHELVES, _sentences, entries, plain, versions
from benchmarks.quality.docstring_texts.tasks import numbered_tasks
from midlayer_encoders.tasks import docstrings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Fit the :ref:`ridge model <ridge>` with **care**.", "Fit the ridge model with care."),
        ("Use :func:`~scipy.stats.norm` or ``rng.normal``.", "Use something or something."),
        ("Wraps a [`GenerationConfig`] (see [the guide](http://x.y)).", "Wraps a something (see the guide)."),
        ("A NumPy ndarray, array_like or Tensor.", "A something array, array or array."),
        ("Any estimator of scikit-learn's.", "Any model of something."),
        ("An NP-hard problem, e.g. 0.5 of it [1]_.", "An NP-hard problem, e.g. 0.5 of it."),
        (
            "Set *all* of `__dict__` in CPython, as PEP 563 and np do.",
            "Set all of something in something, as something and something do.",
        ),
        ("A `link <http://a.b>`_ to asyncio on CUDA.", "A link to something on GPU."),
    ],
)
def test_plain_strips_markup_and_masks_names(text: str, expected: str) -> None:
    assert plain(text) == expected


def test_name_of_the_object_is_masked_only_as_code() -> None:
    assert plain("`filter` will filter a signal.", "signal.filter") == "something will filter a signal."


@pytest.mark.parametrize(
    "docstring",
    [
        "Too short.",
        "Return the mean of all the values.",
        "Return the mean of all the values.\n\nSee also the user guide for more details about the mean of values.",
        "Return the mean of all the values.\n\nParameters\n----------\nx : array\n    What the mean is taken of, in any shape.",
        "Return the mean of all the values.\n\nArgs:\n    x: What the mean is taken of, in any shape and of any type.",
        "Return the mean of all the values.\n\n.. math:: x\n\n    >>> mean([1, 2, 3, 4])\n    the mean of these values",
        "mean(x, axis) -> y\n\nReturn the mean of all the values. This is what a mean is, in any shape and type.",
    ],
)
def test_docstrings_without_two_passages_of_prose_are_left_out(docstring: str) -> None:
    assert _sentences(docstring, "mean") is None


def test_description_follows_the_first_sentence() -> None:
    docstring = (
        "Return the mean of all the values. It is the sum of them, over their number.\n\nOutliers move it far."
        "\n\nParameters\n----------\nx : array\n    Values."
    )
    assert _sentences(docstring, "mean") == (
        "Return the mean of all the values.",
        "It is the sum of them, over their number.",
    )


def test_rows_of_the_built_in_tasks_are_made_of_their_texts() -> None:
    content = json.loads(docstrings.TEXTS.read_bytes())
    assert numbered_tasks(docstrings.entries()) == content["tasks"]


@pytest.mark.slow
def test_texts_of_the_built_in_tasks_are_those_of_the_versions_they_name() -> None:
    content = json.loads(docstrings.TEXTS.read_bytes())
    assert set(content["versions"]) == {*SHELVES, "python"} - {"stdlib"}
    if content["versions"] != versions():
        pytest.skip("other versions of the libraries are installed")
    assert entries() == docstrings.entries()
