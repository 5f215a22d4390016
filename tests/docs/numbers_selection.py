"""What pages say of layers and rules, and the frames that say it."""

from midlayer_encoders.selection import RULES
from tests.docs.frames import metric, selection_table, table


def half_match(model: str) -> dict[str, dict[int, float]]:
    rows = table("selection/results/real_metrics.csv").filter(model=model, name="half_match")
    return {task: metric(rows, "half_match", dataset=task) for task in rows["dataset"].unique(maintain_order=True)}


def ten(column: str, rule: str = "fixed-depth") -> list[float]:
    return selection_table("ten")[rule, column]


def models_of(part: str, rule: str = "fixed-depth") -> float:
    """Return the number of models on which a rule was scored."""
    return selection_table(part)[rule, "models"][0]


def worse(rule: str) -> list[float]:
    draws = table("selection/results/few_labels.csv").filter(rule=rule)
    return [(draws["average_over_last"] < -0.5).sum(), len(draws)]


def above_the_others(curves: dict[str, dict[int, float]]) -> list[int]:
    """Return the layers that are the two highest on every corpus, and how many corpora there are."""
    tops = [set(sorted(curve, key=curve.__getitem__)[-2:]) for curve in curves.values()]
    wiki = curves["wikitext"]
    assert min(wiki[layer] for layer in range(24, 31)) > max(wiki[layer] for layer in range(24))
    return [*sorted(set.intersection(*tops)), len(curves)]


def rules_of_the_paper() -> list[float]:
    """Check that no rule's gain over a fixed depth is above zero with its interval, and return what the page says."""
    rules = [rule for rule in RULES if rule.startswith(("min-", "valley"))]
    on = {
        part: {rule: selection_table(part)[rule, "gain over fixed-depth"] for rule in rules}
        for part in ("ten", "outside")
    }
    (models,) = {models_of("ten", rule) for rule in rules}
    gains = [gain for part in on.values() for gain in part.values() if len(gain) == 3]
    assert all(low <= 0 for _, low, _ in gains)
    assert [rule for rule in rules if on["ten"][rule][2] < 0] == ["min-infonce"]
    assert max(rules, key=lambda rule: on["outside"][rule][0]) == "min-infonce"
    losses = sorted(-gain[0] for gain in on["ten"].values())
    return [models, losses[0], losses[-1], *on["ten"]["min-infonce"], *on["outside"]["min-infonce"]]
