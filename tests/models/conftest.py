from collections.abc import Iterator

import pytest

from midlayer_encoders.models import transformers_internals as internals


@pytest.fixture
def changed_classes() -> Iterator[None]:
    """Keep no model that was built before a test changes its class, nor while it does."""
    internals._kept_model.cache_clear()
    yield
    internals._kept_model.cache_clear()
