"""Numbers and intervals as text."""

import math

from midlayer_encoders.frame.summaries import Gain


def number(value: float | None, digits: int = 1) -> str:
    """Return a number with a fixed number of digits; a dash for None.

    Example:
        >>> number(61.24), number(-0.5), number(None), number(float("nan"))
        ('61.2', '−0.5', '–', 'NaN')
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else _minus(f"{value}").replace("inf", "∞")
    return _minus(f"{value:.{digits}f}")


def amount(value: float) -> str:
    """Return a positive amount of any size with three significant digits.

    Example:
        >>> amount(22_713_216), amount(1.24e9), amount(30_000), amount(1536), amount(0.01234)
        ('22.7M', '1.24B', '30k', '1536', '0.0123')
    """
    for threshold, unit, letter in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= threshold:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.{4 if value >= 1e3 else 3}g}"


def with_import(code: str) -> str:
    """Return code that creates an encoder, after the import that it needs.

    Example:
        >>> print(with_import("LayerEncoder('m', layer=1, center=read_texts('center.txt'))"))
        from midlayer_encoders import LayerEncoder, read_texts
        LayerEncoder('m', layer=1, center=read_texts('center.txt'))
    """
    return f"from midlayer_encoders import LayerEncoder{', read_texts' if 'read_texts(' in code else ''}\n{code}"


def significant(value: float, digits: int = 4, *, sign: bool = False, zeros: bool = False) -> str:
    """Return a number with a number of significant digits; ``zeros`` keeps trailing zeros.

    Example:
        >>> significant(-2 / 3), significant(0.5, 3, sign=True), significant(1.5, zeros=True), significant(1e5)
        ('−0.6667', '+0.5', '1.500', '1e+05')
    """
    if not math.isfinite(value):
        return number(value)
    return _minus(f"{value:{'+' if sign else ''}{'#' if zeros and value else ''}.{digits}g}").removesuffix(".")


def format_signed(value: float, digits: int = 1) -> str:
    """Return a difference with its sign.

    Example:
        >>> format_signed(4.26), format_signed(-0.31), format_signed(0.0)
        ('+4.3', '−0.3', '0.0')
    """
    text = _minus(f"{value:+.{digits}f}")
    return text[1:] if float(f"{value:.{digits}f}") == 0 else text


#: What a metric's value says, in one line.
METRIC_MEANINGS: dict[str, str] = {
    "alignment": "how near a text is to a copy without a quarter of its words; higher is nearer",
    "alpha_req": "how fast the spectrum of the texts' vectors decays; higher is faster",
    "anisotropy": "mean cosine between different texts; 0 if directions are even, 1 if all are equal",
    "block_influence": "how much the next block turns the states; 0 for not at all",
    "cka": "similarity of a layer's geometry to the compared layer's; 1 if equal",
    "curvature": "how sharply the states turn from token to token, in radians",
    "dataset_entropy": "how many directions the texts' vectors span, in nats; higher is more",
    "dime": "how well a text is matched with its augmented copy, beyond chance; lower is better matched",
    "effective_rank": "number of directions that the texts' vectors span",
    "exp_lidar": "exponential of lidar; higher is better told apart",
    "first_token_share": "share of the squared length of a text's states that its first token holds",
    "half_match": "how well the two halves of a text find each other among all texts; 1 is always",
    "infonce": "how well a text is found by its augmented copy; lower is better found",
    "intrinsic_dimension": "number of dimensions that the texts' neighborhoods need",
    "lidar": "how well augmented copies of a text are told apart from copies of others, in nats; higher is better",
    "logdet_entropy": "how many directions the texts' vectors span, by a determinant; higher is more",
    "matrix_entropy": "how many directions the texts' vectors span, in nats; higher is more",
    "neighbor_overlap": "share of the nearest neighbors that the layer has in common with the one it is compared with",
    "prompt_effective_rank": "number of directions that the tokens of a text span",
    "prompt_entropy": "how many directions the tokens of a text span, in nats; higher is more",
    "rankme": "number of directions that the texts' vectors span",
    "raw_uniformity": "how evenly the texts cover the sphere, not centered; 0 if all are one point, lower is more even",
    "uniformity": "how evenly the texts cover the sphere; lower is more even",
}


def interval_words(gain: Gain) -> str:
    """Return the interval of a gain, and whether it separates the two; the tasks that lack it if there is none.

    Empty for a gain that was not computed from resamples.

    Example:
        >>> interval_words(Gain(8.3, -4.0, 20.8)), interval_words(Gain(8.3, without=("STS",)))
        ('95 % interval −4.0 to +20.8: the two are not separable', 'no interval: STS was not resampled')
    """
    if gain.without:
        names = ", ".join(gain.without[:3]) + (", …" if len(gain.without) > 3 else "")
        return f"no interval: {names} {'was' if len(gain.without) == 1 else 'were'} not resampled"
    if math.isnan(gain.low):
        return ""
    text = f"95 % interval {format_signed(gain.low)} to {format_signed(gain.high)}"
    return text if gain.separable else f"{text}: the two are not separable"


def with_interval(points: float, gain: Gain | None) -> str:
    """Return a difference with its sign, and the interval if there is a gain.

    Example:
        >>> with_interval(8.3, Gain(8.3, -4.0, 20.8)), with_interval(8.3, Gain(8.3, without=("STS",)))
        ('+8.3 (−4.0 to +20.8)', '+8.3 (no interval)')
    """
    if gain is None:
        return format_signed(points)
    interval = "no interval" if gain.without else f"{format_signed(gain.low)} to {format_signed(gain.high)}"
    return f"{format_signed(points)} ({interval})"


def gain_text(gain: Gain) -> str:
    """Return a gain with its interval, and whether it is separable from zero.

    Example:
        >>> gain_text(Gain(8.3, -4.0, 20.8)), gain_text(Gain(8.3, 2.0, 14.1)), gain_text(Gain(0.0))
        ('+8.3 (−4.0 to +20.8), not separable', '+8.3 (+2.0 to +14.1)', '0.0')
    """
    if not gain.points:
        return number(0)
    text = with_interval(gain.points, gain)
    return text if gain.separable or gain.without else f"{text}, not separable"


def _minus(text: str) -> str:
    return text.replace("-", "−")
