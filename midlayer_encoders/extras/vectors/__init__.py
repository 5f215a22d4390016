"""Write the vectors of many inputs at many layers to files."""

from midlayer_encoders.extras.settings import check_out
from midlayer_encoders.extras.vectors.vector_file import embed

__all__ = ["check_out", "embed"]
