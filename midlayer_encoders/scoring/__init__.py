"""Scores of all layers of a task at once, equal to those of mteb's evaluators."""

from midlayer_encoders.scoring.all_layers import Read, all_alike, memory_budget, resampled_scores

__all__ = ["Read", "all_alike", "memory_budget", "resampled_scores"]
