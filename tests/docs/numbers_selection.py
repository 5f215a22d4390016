"""What pages say of layers and rules, and the frames that say it."""

from tests.docs.frames import selection_table, table


def ten(column: str, rule: str = "fixed-depth") -> list[float]:
    return selection_table("ten")[rule, column]


def models_of(part: str, rule: str = "fixed-depth") -> float:
    """Return the number of models on which a rule was scored."""
    return selection_table(part)[rule, "models"][0]


def worse(rule: str) -> list[float]:
    draws = table("selection/results/few_labels.csv").filter(rule=rule)
    return [(draws["average_over_last"] < -0.5).sum(), len(draws)]
