import random

import numpy as np

from midlayer_encoders.tasks.sources import TaskSource


def task_name(source: TaskSource) -> str:
    """Return the name of the source's task, and check that no generator changes, even when mteb is imported."""
    random.seed(3)
    np.random.seed(3)
    task = source.make()
    assert (random.random(), np.random.rand()) == (random.Random(3).random(), np.random.RandomState(3).rand())
    return task.metadata.name
