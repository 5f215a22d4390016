"""One request declares the arguments of a sweep, and validates them without torch."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from midlayer_encoders import sweep
from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping.request import SweepArguments
from midlayer_encoders.sweeping.sweeps import Sweep


def test_function_documents_the_arguments_of_the_request() -> None:
    names = ["model", "tasks", *SweepArguments.__annotations__, "options"]
    assert re.findall(r"^ {4}(\w+): ", inspect.getdoc(sweep) or "", re.MULTILINE) == names


def test_changed_request_keeps_the_tasks_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "near.csv"
    path.write_text("sentence1,sentence2,score\na,b,1\nc,d,0\n")
    request = Sweep("m", path, limit=12)
    (source,) = request.sources
    path.unlink()
    other = request.change(model="n", progress=print)
    assert (other.model, other.limit, other.sources) == ("n", 12, [source])
    assert (request.model, request.progress) == ("m", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": "curvatur"}, "`metrics` must be one of"),
        ({"recipes": "word-eco"}, "`recipes` must be"),
        ({"dims": [0]}, "`dims` must be a positive number"),
        ({"baselines": 1}, "`baselines` must be True or False"),
        ({"out": ""}, "`out` must be a path"),
    ],
)
def test_wrong_argument_is_refused_before_the_tasks_are_read(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Sweep("m", "no/such/file.csv", **arguments)  # type: ignore[arg-type]


def test_request_imports_no_torch() -> None:
    code = "import sys; from midlayer_encoders.sweeping.sweeps import Sweep; Sweep('m'); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
