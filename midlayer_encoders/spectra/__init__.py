"""Eigenvalue spectra of many small matrices, exact, on CPU and GPU."""

from __future__ import annotations

from midlayer_encoders.spectra.eigen import METHODS, Method, eigenvalues, spectral_entropy

__all__ = ["METHODS", "Method", "eigenvalues", "spectral_entropy"]
