"""Eigenvalue spectra of many small matrices, exact, on CPU and GPU."""

from midlayer_encoders.spectra.eigen import (
    METHODS,
    Method,
    eigenvalues,
    kernels_enabled,
    spectral_entropy,
    without_kernels,
)

__all__ = ["METHODS", "Method", "eigenvalues", "kernels_enabled", "spectral_entropy", "without_kernels"]
