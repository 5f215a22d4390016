"""Reproduce the experiments of the paper."""
