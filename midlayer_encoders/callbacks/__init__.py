"""Loads this package from the folder ``callbacks/`` next to ``midlayer_encoders/`` in a clone or an editable install.

A wheel contains the modules of that folder here instead of this file.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from callbacks import *  # noqa: F403
else:
    _folder = Path(__file__).parents[2] / "callbacks"
    _spec = spec_from_file_location(__name__, _folder / "__init__.py", submodule_search_locations=[str(_folder)])
    sys.modules[__name__] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
