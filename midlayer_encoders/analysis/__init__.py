"""Deprecated: use :mod:`midlayer_encoders.comparing` and :mod:`midlayer_encoders.probing`."""

import sys

from midlayer_encoders import probing
from midlayer_encoders.comparing import correlation
from midlayer_encoders.errors import warn_deprecated

warn_deprecated(
    "`midlayer_encoders.analysis` is deprecated and is removed in 0.4. "
    "Import from `midlayer_encoders.comparing` or `midlayer_encoders.probing`."
)
sys.modules[f"{__name__}.correlation"] = correlation
sys.modules[f"{__name__}.probing"] = probing
