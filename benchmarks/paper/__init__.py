"""The experiments of the paper, started by ``python -m benchmarks.paper``."""
