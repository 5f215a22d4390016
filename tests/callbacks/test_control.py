"""A warning of a callback never cancels what another callback has decided."""

from typing import Any

import pytest
from transformers import TrainerControl

from midlayer_encoders.callbacks import LastLayerDeclineTrainerCallback

INPUTS = ["the cat sat on the mat", "stock markets fell sharply today"]


@pytest.mark.parametrize("action", ["warn", "stop", "checkpoint"])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("saves", [False, True])
def test_decline_keeps_earlier_decisions(
    action: Any, stops: bool, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = LastLayerDeclineTrainerCallback(INPUTS, on_decline=action, figures=False)
    monkeypatch.setattr(watch, "_warn_of_events", lambda _: True)
    control = TrainerControl(should_training_stop=stops, should_save=saves)
    watch._after_measurement(control, 3)
    assert control.should_training_stop is (stops or action == "stop")
    assert control.should_save is (saves or action == "checkpoint")
