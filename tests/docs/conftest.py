from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of tiny models that stand for those of the pages, made once."""
    from tests.docs.desk import make_models

    return make_models(tmp_path_factory.mktemp("models"))
