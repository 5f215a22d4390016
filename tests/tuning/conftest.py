"""Pages are drawn for the tests that read them."""

import pytest


@pytest.fixture(autouse=True)
def quick_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page of a run, which takes as long as a short training, unless the test's name says it is read."""
    if not {"page", "shown", "command", "files"} & set(request.node.name.partition("[")[0].split("_")):
        monkeypatch.setattr("midlayer_encoders.extras.training.runs.TuneResult.html", lambda _: "")
