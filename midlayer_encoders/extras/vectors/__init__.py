"""Write the vectors of many inputs at many layers to files."""

from midlayer_encoders.extras.vectors.embedding import embed

__all__ = ["embed"]
