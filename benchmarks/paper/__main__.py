"""``python -m benchmarks.paper``."""

from benchmarks.paper.command import app
from midlayer_encoders.cli import main

main(app, resumes=True)
