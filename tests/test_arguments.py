"""Names that are declared without torch equal those of the functions."""

from midlayer_encoders import arguments
from midlayer_encoders.metrics import ALIASES, METRICS
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.selection import RULES


def test_names_without_torch_equal_those_of_the_functions() -> None:
    assert tuple(METRICS) == arguments.METRIC_NAMES
    assert tuple(ALIASES) == arguments.METRIC_ALIASES
    assert tuple(RULES) == arguments.RULE_NAMES


def test_resolve_layer_of_digits_is_the_layer() -> None:
    assert [resolve_layer(layer, 24) for layer in ("17", "-1", "0.5")] == [17, 24, 12]
