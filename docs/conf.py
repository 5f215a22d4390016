"""How Sphinx builds the site: `make docs`, and open build/site/index.html.

The source folder is the repository itself, so that a page may link to a benchmark's result as it does on GitHub, and
such a link is checked like any other.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from midlayer_encoders import __version__

project = "midlayer_encoders"
author = "the authors of midlayer_encoders"
release = version = __version__
html_title = f"midlayer_encoders {version}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_parts",
]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "benchmarks/**.md", "examples/**.md", "*.md"]
exclude_patterns = [".*", "build", "runs", "tmp*", "midlayer_encoders", "callbacks", "tests", "**/__pycache__"]

# --- pages ------------------------------------------------------------------------------------------------------------
myst_enable_extensions = ["dollarmath", "amsmath", "attrs_inline"]
myst_heading_anchors = 4  # as GitHub names them
html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_copyright = False  # the license is in the repository
html_show_search_summary = False  # pages that are opened as files cannot fetch one another; the list of hits works
html_math_renderer = "mathml"  # the browser's own, without a script from a network
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# --- the reference ----------------------------------------------------------------------------------------------------
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
add_module_names = False
toc_object_entries_show_parents = "hide"

nitpicky = True
# Other libraries' names: their pages cannot be reached while this site is built offline.
_OTHERS = (
    "torch|torchmetrics|lightning|transformers|sentence_transformers|mteb|numpy|np|npt|polars|pl|nn|collections|pathlib|os|abc"
    "|contextlib|datetime"
)
_SHORT = "AbsTask|Array|Axes|DataLoader|Figure|SubFigure|Image|Join|Path|Precision|PretrainedConfig|Tensor|frozenset.*"
# Parts of signatures that nobody imports: base classes, protocols, the encoder's keywords once more.
_INNER = (
    r".*\._.*|.*(RowMetric|SampleMetric|PairMetric|LayerSource|RecipeSource|TokenSource|LayerReader"
    r"|BatchOptions|Anatomy|Notes|TrainingRecord|Result|History"
    r"|half_width|MtebSource|LocalSource|ObjectSource"
    r"|TaskData|Columns|Tasks|Subject|Baselines|Location|PooledSpans)"
)
nitpick_ignore_regex = [("py:.*", rf"({_OTHERS})\..*"), ("py:class", _SHORT), ("py:.*", _INNER)]
