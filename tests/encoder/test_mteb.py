"""A LayerEncoder in mteb: it runs, and no two encoders share a result file."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import TEXTS, Folder

pytestmark = MTEB


def sts_task() -> Any:
    """Return a fresh STS task over the tiny texts."""
    import datasets
    import mteb
    from mteb.abstasks.sts import AbsTaskSTS

    class TinySTS(AbsTaskSTS):
        metadata = mteb.TaskMetadata(
            name="TinySTS", description="pairs", reference=None, type="STS", category="t2t", modalities=["text"],
            dataset={"path": "local/tiny", "revision": "1"}, eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="cosine_spearman", date=("2024-01-01", "2024-01-02"), domains=["Web"], task_subtypes=[],
            license="mit", annotations_creators="derived", dialect=[], sample_creation="found", bibtex_citation="",
        )  # fmt: skip
        min_score, max_score = 0, 5

        def load_data(self, **_: Any) -> None:
            rows = {"sentence1": TEXTS, "sentence2": TEXTS[1:] + TEXTS[:1], "score": [5.0, 0.0, 4.0, 1.0, 0.0, 2.0]}
            self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
            self.data_loaded = True

    return TinySTS()


def train_in_place(encoder: LayerEncoder) -> None:
    with torch.no_grad():
        next(encoder[0].model.parameters()).add_(0.05)


def variants(folder: str) -> list[tuple[str, Callable[[], LayerEncoder]]]:
    """Return encoders that differ in one setting each."""

    def make(**options: Any) -> Callable[[], LayerEncoder]:
        return lambda: LayerEncoder(folder, **({"layer": 2, "device": "cpu"} | options))

    def trained() -> LayerEncoder:
        encoder = make()()
        train_in_place(encoder)
        return encoder

    def shortened() -> LayerEncoder:
        encoder = make()()
        encoder.max_seq_length = 4
        return encoder

    def truncated() -> LayerEncoder:
        encoder = make()()
        encoder.truncate_dim = 8
        return encoder

    def compared_by(similarity: Any) -> Callable[[], LayerEncoder]:
        def make_encoder() -> LayerEncoder:
            encoder = make()()
            encoder.similarity_fn_name = similarity
            return encoder

        return make_encoder

    return [
        ("layer 2", make()),
        ("layer 3", make(layer=3)),
        ("raw", make(norm="none")),
        ("last token", make(pooling="last")),
        ("trained", trained),
        ("prompt", make(prompts={"STS": "same? "}, default_prompt_name="STS")),
        ("bf16", make(dtype="bfloat16")),
        ("shortened", shortened),
        ("truncated", truncated),
        ("bidirectional", make(bidirectional=True)),
        ("dot", compared_by("dot")),
    ]


def result_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.json") if path.name == "TinySTS.json")


@pytest.mark.parametrize(
    ("method", "count"), [("evaluate", 11), ("run", 5), pytest.param("run", 11, marks=pytest.mark.slow)]
)
def test_each_encoder_has_its_own_result_file_whose_path_names_the_layer(
    method: str, count: int, tiny_folder: Folder, tmp_path: Path
) -> None:
    import mteb
    from mteb.cache import ResultCache

    def score(encoder: LayerEncoder, root: Path) -> None:
        if method == "evaluate":
            mteb.evaluate(encoder, sts_task(), cache=ResultCache(root), show_progress_bar=False)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mteb.MTEB(tasks=[sts_task()]).run(encoder, output_folder=str(root), verbosity=0)

    makers = variants(tiny_folder("Llama"))[:count]
    names_by_path: dict[Path, str] = {}
    for name, make in makers:
        encoder = make()
        score(encoder, tmp_path / "all")
        new = [path for path in result_files(tmp_path / "all") if path not in names_by_path]
        assert len(new) == 1, f"{name} shares a file with another encoder"
        names_by_path[new[0]] = name
        assert f"layer-{encoder.layer}" in str(new[0].relative_to(tmp_path))
        # The score is this encoder's: the same as from a cache that holds nothing else.
        score(encoder, tmp_path / name)
        separate = json.loads(result_files(tmp_path / name)[0].read_text())
        shared = json.loads(new[0].read_text())
        assert shared["scores"]["test"][0]["main_score"] == separate["scores"]["test"][0]["main_score"]
    assert len(names_by_path) == count


def test_similarity_changes_the_revision(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    before = encoder.model_card_data.base_model_revision
    encoder.similarity_fn_name = "dot"
    assert encoder.model_card_data.base_model_revision != before
    encoder.similarity_fn_name = None  # back to sentence-transformers' default
    assert encoder.model_card_data.base_model_revision == before


def test_exported_folders_named_by_their_cards_have_their_own_result_files(tiny_folder: Folder, tmp_path: Path) -> None:
    import mteb
    from mteb.cache import ResultCache

    for layer in (1, 2):
        encoder = LayerEncoder(tiny_folder("Llama"), layer, device="cpu")
        encoder.save_pretrained(str(tmp_path / str(layer)))
        model = SentenceTransformer(str(tmp_path / str(layer)), device="cpu")
        _, lines = re.findall(r"```python\n(.*?)```", (tmp_path / str(layer) / "README.md").read_text(), re.DOTALL)
        exec(lines, {"model": model})
        mteb.evaluate(model, sts_task(), cache=ResultCache(tmp_path / "results"), show_progress_bar=False)
        assert len(result_files(tmp_path / "results")) == layer
        assert model.model_card_data.model_name == encoder.model_card_data.model_name
        assert model.model_card_data.base_model_revision == encoder.model_card_data.base_model_revision


def test_training_in_place_changes_the_revision(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    card = encoder.model_card_data
    before = card.base_model_revision
    assert card.base_model_revision == before
    train_in_place(encoder)
    assert card.base_model_revision != before
    assert card.model_name.endswith("-layer-2")


def test_copied_folder_gives_the_same_spec(tiny_folder: Folder, tmp_path: Path) -> None:
    import shutil

    folder = tiny_folder("Llama")
    shutil.copytree(folder, tmp_path / Path(folder).name)
    moved = LayerEncoder(str(tmp_path / Path(folder).name), 2, device="cpu")
    assert moved.spec == LayerEncoder(folder, 2, device="cpu").spec


def test_long_and_odd_names_are_safe(tmp_path: Path) -> None:
    from midlayer_encoders.encoder.spec import result_name, result_revision

    encoder_spec = _spec(model="org/" + "x" * 300, revision="refs/pr/1 ü")
    assert len(result_name(encoder_spec)) < 200
    assert len(result_revision(encoder_spec)) < 200
    assert "/" not in result_revision(encoder_spec)
    assert result_revision(encoder_spec) != result_revision(_spec(model="org/" + "x" * 301, revision="refs/pr/1 ü"))


def _spec(**changes: Any) -> Any:
    from midlayer_encoders import EncoderSpec

    fields = {
        "model": "org/name", "revision": None, "layer": 2, "num_layers": 4, "norm": "final", "pooling": "mean",
        "max_length": 64, "dtype": "float32", "prompts": (), "bidirectional": False, "adapters": (),
        "chat_template": False, "truncate_dim": None, "modules": "", "weights_digest": "0",
    }  # fmt: skip
    return EncoderSpec(**(fields | changes))


@pytest.mark.slow
def test_mteb_mock_suite_of_text_tasks_passes(tiny_folder: Folder, tmp_path: Path) -> None:
    import mteb
    from mteb.models import SentenceTransformerEncoderWrapper

    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    results = mteb.mock_run(SentenceTransformerEncoderWrapper(encoder))
    ran = {name: result for name, result in results.task_results.items() if result is not None}
    failed = {name: result for name, result in ran.items() if hasattr(result, "exception")}
    assert not failed, failed
    assert len(ran) >= 28


def test_a_name_that_is_set_is_the_name_in_mteb(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.model_card_data.model_name = "mine/two"
    encoder.model_card_data.base_model_revision = "second"
    encoder[0].register_parameter("large", torch.nn.Parameter(torch.zeros(2**20)))  # 4 MiB
    meta = encoder.for_mteb().mteb_model_meta
    assert (meta.name, meta.revision) == ("mine/two", "second")
    assert meta.n_parameters == sum(parameter.numel() for parameter in encoder.parameters())
    assert meta.memory_usage_mb == round(meta.n_parameters * 4 / 2**20, 1)
    encoder.model_card_data.model_name = None
    assert encoder.model_card_data.model_name.endswith("-layer-2")


def test_card_tells_how_to_name_the_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.save_pretrained(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf8")
    (line,) = (line for line in card.splitlines() if line.startswith("model.model_card_data.model_name"))
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    exec(line, {"model": model})
    assert model.model_card_data.model_name == encoder.model_card_data.model_name
    assert model.model_card_data.base_model_revision == encoder.model_card_data.base_model_revision


@pytest.mark.parametrize(("name", "value"), [("layer", 1), ("num_layers", 3), ("norm", "none"), ("pooling", "cls")])
def test_settings_that_would_not_change_vectors_are_fixed(name: str, value: Any, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    with pytest.raises(
        OptionError, match=rf"`{name}` must be chosen when an encoder is created: LayerEncoder\(.*{value}"
    ):
        setattr(encoder, name, value)
    assert encoder.spec == LayerEncoder(tiny_folder("Llama"), 2, device="cpu").spec
