"""All layers of a task scored together, on the device, as mteb's own evaluators score them one by one."""

from __future__ import annotations

from midlayer_encoders.scoring.together import Read, all_alike, layer_scores, memory_budget

__all__ = ["Read", "all_alike", "layer_scores", "memory_budget"]
