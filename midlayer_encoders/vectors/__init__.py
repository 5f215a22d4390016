"""Write the vectors of many inputs at many layers to files."""

from midlayer_encoders.vectors.embedding import check_out, embed

__all__ = ["check_out", "embed"]
