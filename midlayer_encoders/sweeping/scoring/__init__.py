"""Scores of all layers of a task at once, equal to mteb's evaluators on one vector for each text, ties included."""

from midlayer_encoders.sweeping.scoring.all_layers import Read, memory_budget, resampled_scores

__all__ = ["Read", "memory_budget", "resampled_scores"]
