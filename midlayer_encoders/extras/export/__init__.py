"""Export an encoder for other engines, and compare its vectors after writing."""

from midlayer_encoders.extras.export._comparison import Exported
from midlayer_encoders.extras.export.serving import serving_line
from midlayer_encoders.extras.export.targets import export_for
from midlayer_encoders.extras.settings import TARGETS, Target, check_arguments

__all__ = ["TARGETS", "Exported", "Target", "check_arguments", "export_for", "serving_line"]
