"""Choose a layer by a rule, with or without labels, and explain the choice."""

from midlayer_encoders.frame.curves import Curves, curves
from midlayer_encoders.selection.kind import DetectedKind
from midlayer_encoders.selection.rules import RULES, CannotChooseError, Choice, choose
from midlayer_encoders.selection.select import select
from midlayer_encoders.selection.selection_result import LabelEvidence, Selection

__all__ = [
    "RULES",
    "CannotChooseError",
    "Choice",
    "Curves",
    "DetectedKind",
    "LabelEvidence",
    "Selection",
    "choose",
    "curves",
    "select",
]
