"""Where the corpora and tasks of the benchmarks are, and their results."""

from __future__ import annotations

import os
from pathlib import Path

from midlayer_encoders.errors import OptionError

RESULTS = Path(__file__).parent / "results"


def data_root() -> Path:
    """Return the folder in ``MIDLAYER_DATA``, or the one that stands beside the repository if it is not set."""
    return data_folder() or Path(__file__).parents[2] / "shared" / "data"


def data_folder() -> Path | None:
    """Return the folder of corpora and tasks in the variable ``MIDLAYER_DATA``, or ``None`` if it is not set.

    A folder that does not exist is an error.
    """
    variable = os.environ.get("MIDLAYER_DATA")
    if not variable:
        return None
    folder = Path(variable).expanduser()
    if not folder.is_dir():
        raise OptionError(f"`MIDLAYER_DATA` must name a folder, but there is no {folder}. Correct it, or unset it.")
    return folder
