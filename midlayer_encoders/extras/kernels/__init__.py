"""GPU kernels: spectra, token metrics, and norms and rotations of a pass."""
