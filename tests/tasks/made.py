from __future__ import annotations

import random

import numpy as np

from midlayer_encoders.tasks import TaskSource


def made_name(source: TaskSource) -> str:
    """Return the name of the task that ``source`` makes, and see that no generator moves, even when mteb is imported."""
    random.seed(3)
    np.random.seed(3)
    task = source.make()
    assert (random.random(), np.random.rand()) == (random.Random(3).random(), np.random.RandomState(3).rand())
    return task.metadata.name
