"""A sentence-transformers folder keeps its modules and settings: exactly at the last layer, adapted before it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    Router,
    StaticEmbedding,
    Transformer,
    WeightedLayerPooling,
)

from midlayer_encoders import LayerEncoder, embed, measure, select_layer, sweep
from midlayer_encoders.errors import ModelNotFoundError, OptionError
from tests.encoder.test_mteb import sts_task
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import TEXTS, Folder, tokenizer

pytestmark = MTEB

WIDTH = 32
STACKS: dict[str, Callable[[], list[Any]]] = {
    "cls": lambda: [Pooling(WIDTH, "cls")],
    "mean, Normalize": lambda: [Pooling(WIDTH, "mean"), Normalize()],
    "weightedmean, Dropout": lambda: [Pooling(WIDTH, "weightedmean"), Dropout(0.5)],
    "lasttoken, Dense, LayerNorm": lambda: [Pooling(WIDTH, "lasttoken"), Dense(WIDTH, 8), LayerNorm(8)],
    "max, Dense, Dense, Normalize": lambda: [Pooling(WIDTH, "max"), Dense(WIDTH, 16), Dense(16, 8), Normalize()],
    "Normalize before Dense": lambda: [Pooling(WIDTH, "mean_sqrt_len_tokens"), Normalize(), Dense(WIDTH, 8)],
    "cls and mean": lambda: [Pooling(WIDTH, ("cls", "mean")), Normalize()],
    "Dense before the pooling": lambda: [
        Dense(WIDTH, 24, module_input_name="token_embeddings", module_output_name="token_embeddings"),
        Pooling(24, "mean"),
    ],
}


def save(model: str, folder: Path, later: list[Any], **settings: Any) -> str:
    """Write a folder with these modules after its transformer, as sentence-transformers does, and return the path."""
    torch.manual_seed(0)
    first = Transformer(model, **settings.pop("transformer", {}))
    first.tokenizer.padding_side = "right"
    plain = SentenceTransformer(modules=[first, *later], device="cpu", **settings)
    plain.save_pretrained(str(folder), create_model_card=False)
    return str(folder)


def vectors(model: Any, **options: Any) -> Any:
    return model.encode(TEXTS, batch_size=4, **options)


@pytest.mark.parametrize("family", ["BERT", "Llama"])
@pytest.mark.parametrize("stack", STACKS)
def test_last_layer_is_the_folders_own_encoder(stack: str, family: str, tiny_folder: Folder, tmp_path: Path) -> None:
    path = save(tiny_folder(family), tmp_path / "model", STACKS[stack](), similarity_fn_name="dot")
    plain = SentenceTransformer(path, device="cpu")
    encoder = LayerEncoder(path, -1, device="cpu")
    expected = vectors(plain)
    np.testing.assert_array_equal(vectors(encoder), expected)
    if family == "BERT":  # the number of the last layer means the same for every stack
        np.testing.assert_array_equal(vectors(LayerEncoder(path, encoder.num_layers, device="cpu")), expected)
    assert encoder.similarity_fn_name == plain.similarity_fn_name == "dot"
    assert [type(module) for module in encoder] == [type(module) for module in plain]
    encoder.save_pretrained(str(tmp_path / "again"))
    np.testing.assert_array_equal(vectors(SentenceTransformer(str(tmp_path / "again"), device="cpu")), expected)


def test_folder_that_mixes_hidden_states_is_its_own_encoder(tiny_folder: Folder, tmp_path: Path) -> None:
    later = [WeightedLayerPooling(WIDTH, num_hidden_layers=4, layer_start=2), Pooling(WIDTH, "mean")]
    first = {"config_kwargs": {"output_hidden_states": True}}
    path = save(tiny_folder("BERT"), tmp_path / "model", later, transformer=first)
    np.testing.assert_array_equal(
        vectors(LayerEncoder(path, -1, device="cpu")), vectors(SentenceTransformer(path, device="cpu"))
    )


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "max", "weightedmean"])
def test_pooling_that_leaves_out_prompts_matches_sentence_transformers(
    mode: Any, tiny_folder: Folder, tmp_path: Path
) -> None:
    prompts = {"query": "find: ", "document": ""}
    later = [Pooling(WIDTH, mode, include_prompt=False), Normalize()]
    path = save(tiny_folder("BERT"), tmp_path / "model", later, prompts=prompts, default_prompt_name="query")
    plain = SentenceTransformer(path, device="cpu")
    encoder = LayerEncoder(path, -1, device="cpu")
    np.testing.assert_array_equal(vectors(encoder), vectors(plain))
    np.testing.assert_array_equal(vectors(encoder, prompt_name="document"), vectors(plain, prompt_name="document"))
    assert not np.allclose(vectors(encoder), vectors(encoder, prompt_name="document"), atol=1e-3)
    if mode == "weightedmean":
        with pytest.raises(OptionError, match="`pooling` must be named to read the layers"):
            encoder.encode_layers(TEXTS)
        return
    every_layer = encoder.encode_layers(TEXTS)
    np.testing.assert_allclose(every_layer[-1], vectors(plain), atol=1e-5)
    np.testing.assert_allclose(every_layer[2], vectors(LayerEncoder(path, 2, device="cpu")), atol=1e-5)
    skipping = LayerEncoder(path, -1, device="cpu", skip_first=len("find: ") + 1)
    np.testing.assert_allclose(skipping.encode_layers(TEXTS)[-1], vectors(skipping), atol=1e-5)


def test_settings_of_the_first_module_apply(tiny_folder: Folder, tmp_path: Path) -> None:
    first = {"max_seq_length": 9, "do_lower_case": True}
    path = save(tiny_folder("BERT"), tmp_path / "model", [Pooling(WIDTH, "mean")], truncate_dim=5)
    settings = Path(path, "sentence_bert_config.json")
    settings.write_text(json.dumps(first))
    plain = SentenceTransformer(path, device="cpu")
    encoder = LayerEncoder(path, -1, device="cpu")
    assert encoder.max_seq_length == plain.max_seq_length == 9
    assert LayerEncoder(path, -1, device="cpu", max_length=7).max_seq_length == 7
    loud = [text.upper() for text in TEXTS]
    np.testing.assert_array_equal(encoder.encode(loud), plain.encode(loud))
    np.testing.assert_array_equal(encoder.encode(loud), vectors(plain))
    assert encoder.encode(loud).shape[1] == encoder.encode_layers(loud).shape[2] == 5


@pytest.mark.long
@pytest.mark.parametrize("stack", ["cls", "mean, Normalize", "cls and mean"])
def test_earlier_layers_keep_pooling_and_normalize(stack: str, tiny_folder: Folder, tmp_path: Path) -> None:
    path = save(tiny_folder("Llama"), tmp_path / "model", STACKS[stack]())
    encoder = LayerEncoder(path, -1, device="cpu")
    every_layer = encoder.encode_layers(TEXTS)
    for layer in range(encoder.num_layers + 1):
        earlier = LayerEncoder(path, layer, device="cpu")
        assert [type(module) for module in earlier] == [type(module) for module in encoder]
        np.testing.assert_allclose(every_layer[layer], vectors(earlier), atol=1e-5)
    expected = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", pooling="max", normalize=True)
    changed = LayerEncoder(path, 2, device="cpu", pooling="max", normalize=True)
    np.testing.assert_array_equal(vectors(changed), vectors(expected))
    bare = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", pooling="mean")
    np.testing.assert_array_equal(
        vectors(LayerEncoder(path, -1, device="cpu", pooling="mean", normalize=False)), vectors(bare)
    )


@pytest.mark.long
def test_trained_modules_are_kept_or_dropped_only_on_request(
    tiny_folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tiny_folder("BERT"), tmp_path / "model", STACKS["max, Dense, Dense, Normalize"]())
    with pytest.raises(OptionError, match=r"`dense` must be 'keep' or 'drop' .* whose Dense, Dense was trained"):
        LayerEncoder(path, 2, device="cpu")
    with pytest.raises(OptionError, match=r"must only pool and normalize .* dense='drop'"):
        LayerEncoder(path, -1, device="cpu").encode_layers(TEXTS)
    dropped = LayerEncoder(path, 2, device="cpu", dense="drop")
    expected = LayerEncoder(tiny_folder("BERT"), 2, device="cpu", pooling="max", normalize=True)
    np.testing.assert_array_equal(vectors(dropped), vectors(expected))
    keeping = LayerEncoder(path, 2, device="cpu", dense="keep")
    features = {
        "sentence_embedding": torch.from_numpy(
            vectors(LayerEncoder(path, 2, device="cpu", dense="drop", normalize=False))
        )
    }
    for module in list(SentenceTransformer(path, device="cpu"))[2:]:
        features = module(features)
    np.testing.assert_allclose(vectors(keeping), features["sentence_embedding"].detach().numpy(), atol=1e-6)
    assert "Dense" not in caplog.text
    written = np.load(embed(path, TEXTS, tmp_path / "vectors.npy", device="cpu"))
    assert "is read without Dense, Dense, which was trained for its last layer" in caplog.text
    np.testing.assert_allclose(written[2], vectors(dropped), atol=1e-5)
    selected = LayerEncoder(path, "last", texts=TEXTS * 4, device="cpu")
    assert selected.options.dense == "drop"
    default = LayerEncoder(path, "auto", device="cpu")
    np.testing.assert_array_equal(vectors(default), vectors(LayerEncoder(path, -1, device="cpu")))
    assert default.selection is not None
    np.testing.assert_array_equal(vectors(default.selection.encoder(device="cpu")), vectors(default))
    assert LayerEncoder(tiny_folder("BERT"), 2, device="cpu", dense="drop").options.dense is None


def test_folder_that_pools_twice_takes_no_other_pooling(tiny_folder: Folder, tmp_path: Path) -> None:
    twice = save(tiny_folder("BERT"), tmp_path / "twice" / "model", [Pooling(WIDTH, "cls"), Pooling(WIDTH, "mean")])
    with pytest.raises(OptionError, match="`pooling` must be None for twice/model, whose folder pools 2 times"):
        LayerEncoder(twice, -1, device="cpu", pooling="max")


def test_options_replace_the_dimensions_and_the_similarity_of_the_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"truncate_dim": 8, "similarity_fn_name": "dot"}
    path = save(tiny_folder("BERT"), tmp_path / "model", [Pooling(WIDTH, "mean")], **settings)
    for options in ({}, {"truncate_dim": 5, "similarity_fn_name": "manhattan"}):
        encoder = LayerEncoder(path, 1, device="cpu", **options)
        expected = {**settings, **options}
        assert encoder.encode(TEXTS).shape[1] == expected["truncate_dim"]
        assert encoder.similarity_fn_name == expected["similarity_fn_name"]


def test_changed_pooling_changes_the_key(tiny_folder: Folder, tmp_path: Path) -> None:
    specs = []
    for stack in STACKS:
        path = save(tiny_folder("BERT"), tmp_path / stack.replace(" ", "-") / "model", STACKS[stack]())
        specs.append(LayerEncoder(path, -1, device="cpu").spec)
    path = save(tiny_folder("BERT"), tmp_path / "prompt" / "model", [Pooling(WIDTH, "cls", include_prompt=False)])
    specs.append(LayerEncoder(path, -1, device="cpu").spec)
    assert len({spec.digest for spec in specs}) == len(specs)
    assert {spec.model for spec in specs} == {"local/model"}
    plain = save(tiny_folder("BERT"), tmp_path / "plain" / "model", [Pooling(WIDTH, "mean")])
    bare = LayerEncoder(tiny_folder("BERT"), -1, device="cpu").spec
    assert LayerEncoder(plain, -1, device="cpu").spec.modules == bare.modules


def test_plain_recipe_of_a_sweep_is_the_folders_own_encoder(tiny_folder: Folder, tmp_path: Path) -> None:
    import mteb

    path = save(tiny_folder("BERT"), tmp_path / "model", [Pooling(WIDTH, "cls"), Normalize()], similarity_fn_name="dot")
    result = sweep(path, sts_task(), recipes=["plain"], baselines=False, out=tmp_path / "out", device="cpu")
    last = result.frame.filter(kind="score", layer=4)["value"].item()
    plain = mteb.evaluate(SentenceTransformer(path, device="cpu"), sts_task(), cache=None)
    assert last == pytest.approx(plain.task_results[0].get_score(), abs=1e-6)


def test_metrics_and_selection_read_the_pooled_states(tiny_folder: Folder, tmp_path: Path) -> None:
    path = save(tiny_folder("BERT"), tmp_path / "model", STACKS["mean, Normalize"]())
    texts = [f"{text} {number}" for number in range(4) for text in TEXTS]
    frames = [
        measure(model, texts, metrics=["dataset_entropy"], device="cpu")["value"].to_numpy()
        for model in (path, tiny_folder("BERT"))
    ]
    np.testing.assert_allclose(*frames, atol=1e-6)
    assert select_layer(path, texts, [len(text) % 2 for text in texts], device="cpu").num_layers == 4


def test_folder_with_another_first_module_needs_a_pooling(tiny_folder: Folder, tmp_path: Path) -> None:
    raw = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", norm="none")
    raw.save_pretrained(str(tmp_path / "raw"))
    with pytest.raises(OptionError, match=r"`pooling` must be named for raw, because it reads \['hidden_states'"):
        LayerEncoder(str(tmp_path / "raw"), -1, device="cpu")
    again = LayerEncoder(str(tmp_path / "raw"), 2, device="cpu", norm="none")
    np.testing.assert_allclose(vectors(again), vectors(raw), atol=1e-6)


def test_transformer_in_a_subfolder_is_read(tiny_folder: Folder, tmp_path: Path) -> None:
    """sentence-transformers before 1.1 saved it there."""
    path = Path(save(tiny_folder("BERT"), tmp_path / "model", STACKS["mean, Normalize"]()))
    expected = LayerEncoder(str(path), 2, device="cpu")
    (path / "0_Transformer").mkdir()
    for file in [file for file in path.iterdir() if file.is_file() and file.name != "modules.json"]:
        file.rename(path / "0_Transformer" / file.name)
    modules = json.loads((path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (path / "modules.json").write_text(json.dumps(modules))
    plain = SentenceTransformer(str(path), device="cpu")
    np.testing.assert_array_equal(vectors(LayerEncoder(str(path), -1, device="cpu")), vectors(plain))
    earlier = LayerEncoder(str(path), 2, device="cpu")
    np.testing.assert_array_equal(vectors(earlier), vectors(expected))
    assert earlier.results_name == expected.results_name == "local/model"
    differing = {name for name, digest in earlier.spec.parts if (name, digest) not in expected.spec.parts}
    assert differing == {"files"}  # their places differ
    assert earlier.spec.weights_digest == expected.spec.weights_digest


def test_folder_without_layers_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    static = StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=8)
    transformer = [Transformer(tiny_folder("BERT")), Pooling(WIDTH, "mean")]
    router = Router.for_query_document(query_modules=[static], document_modules=transformer)
    for first in (static, router):
        folder = tmp_path / type(first).__name__
        SentenceTransformer(modules=[first], device="cpu").save_pretrained(str(folder), create_model_card=False)
        with pytest.raises(ModelNotFoundError, match=f"must start with a Transformer .* is a {type(first).__name__}"):
            LayerEncoder(str(folder), -1, device="cpu")
    inside = LayerEncoder(str(tmp_path / "Router" / "document_0_Transformer"), -1, device="cpu")
    np.testing.assert_array_equal(vectors(inside), vectors(LayerEncoder(tiny_folder("BERT"), -1, device="cpu")))


def test_unreadable_modules_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    path = save(tiny_folder("BERT"), tmp_path / "model", STACKS["cls"]())
    Path(path, "1_Pooling", "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="must hold settings and modules that sentence-transformers can read"):
        LayerEncoder(path, -1, device="cpu")
