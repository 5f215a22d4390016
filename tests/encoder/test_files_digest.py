"""A change of any file or setting of a folder changes the digest of its encoder, or leaves its vectors bitwise equal."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from transformers import AutoConfig

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.digests import files_digest
from tests.support.made_media import IMAGES
from tests.support.tiny_folders import TEXTS, save_tiny

pytestmark = pytest.mark.long

INPUTS = [*TEXTS, "the cat [EOS] sat", "The Cat[PAD] sat  on\tthe mat, didn 't it ?"]
_MAX_ENTRIES = 3  # of a mapping, such as a vocabulary, of which more are changed in the same way

MODEL_CODE = """
import json
from pathlib import Path
import torch
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertEmbeddings
from .helper import SCALE

class OwnConfig(BertConfig):
    model_type = "own"
    def __init__(self, extra=None, **kwargs):
        super().__init__(**kwargs)
        self.extra = extra or {"training": 1.0}

class OwnEmbeddings(BertEmbeddings):
    def __init__(self, config):
        super().__init__(config)
        table = json.loads(Path(config._name_or_path, "data", "table.json").read_text())
        self.factor = SCALE + config.initializer_range + config.extra["training"] + sum(table.values())
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * self.factor

class OwnModel(BertModel):
    config_class = OwnConfig
    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.embeddings = OwnEmbeddings(config)
"""
TOKENIZER_CODE = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def __call__(self, text, *args, **kwargs):
        shout = self.init_kwargs.get("shout", False)
        text = [one.upper() if shout else one.replace("a", "o") for one in text]
        return super().__call__(text, *args, **kwargs)
"""
IMAGE_CODE = """
from transformers import ViTImageProcessorPil

class OwnProcessor(ViTImageProcessorPil):
    def preprocess(self, images, *args, **kwargs):
        output = super().preprocess(images, *args, **kwargs)
        output["pixel_values"] = output["pixel_values"] * 2
        return output
"""
MODULE_CODE = """
import torch
from sentence_transformers.sentence_transformer.modules import Module

class Squared(Module):
    config_keys = ["power"]
    def __init__(self, power=2):
        super().__init__()
        self.power = power
    def forward(self, features):
        features["sentence_embedding"] = features["sentence_embedding"].abs() ** self.power
        return features
    def save(self, output_path, *args, **kwargs):
        self.save_config(output_path)
    @classmethod
    def load(cls, *args, **kwargs):
        keys = ("subfolder", "token", "cache_folder", "revision", "local_files_only")
        return cls(**cls.load_config(args[0], **{key: kwargs[key] for key in keys if key in kwargs}))
"""


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_all_settings(folder: Path) -> Path:
    """Write the settings that a config leaves at their defaults."""
    settings = AutoConfig.from_pretrained(folder).to_dict()
    edit_json(folder / "config.json", **{name: value for name, value in settings.items() if name != "_name_or_path"})
    return folder


def text_folder(folder: Path) -> Path:
    save_tiny("Llama", folder)
    settings = {"truncation_side": "right", "padding_side": "right", "clean_up_tokenization_spaces": False}
    edit_json(folder / "tokenizer_config.json", split_special_tokens=False, do_lower_case=False, **settings)
    edit_json(folder / "tokenizer_config.json", add_prefix_space=False, add_bos_token=False, add_eos_token=False)
    return with_all_settings(folder)


def image_folder(folder: Path) -> Path:
    save_tiny("ViT", folder)
    return with_all_settings(folder)


def image_code_folder(folder: Path) -> Path:
    save_tiny("ViT", folder)
    (folder / "image.py").write_text(IMAGE_CODE)
    edit_json(folder / "preprocessor_config.json", auto_map={"AutoImageProcessor": "image.OwnProcessor"})
    return folder


def code_folder(folder: Path) -> Path:
    """A model with its own config, model and tokenizer, which read settings and data that others ignore."""
    save_tiny("BERT", folder)
    (folder / "own.py").write_text(MODEL_CODE)
    (folder / "helper.py").write_text("SCALE = 1\n")
    (folder / "own_tokenizer.py").write_text(TOKENIZER_CODE)
    (folder / "data").mkdir()
    (folder / "data" / "table.json").write_text(json.dumps({"a": 0.5, "vocab_file": 0.25}))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    edit_json(folder / "config.json", model_type="own", auto_map=classes, extra={"training": 2.0, "other": 1.0})
    tokenizer = {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=tokenizer, shout=False)
    return folder


def sentence_folder(folder: Path) -> Path:
    """A sentence-transformers folder whose model is in a subfolder, with a trained module."""
    save_tiny("BERT", folder / "model")
    torch.manual_seed(0)
    transformer = Transformer(str(folder / "model"))
    width = transformer.get_embedding_dimension()
    modules = [transformer, Pooling(width), Dense(width, 8), Normalize()]
    SentenceTransformer(modules=modules, prompts={"query": "q: "}, default_prompt_name="query").save(str(folder))
    shutil.rmtree(folder / "model")
    (folder / "0_Transformer").mkdir()
    listing = json.loads((folder / "modules.json").read_text())
    listing[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(listing))
    kept = {"modules.json", "config_sentence_transformers.json", "README.md"}
    for path in list(folder.iterdir()):
        if path.is_file() and path.name not in kept:
            path.rename(folder / "0_Transformer" / path.name)
    return folder


def sentence_code_folder(folder: Path) -> Path:
    """A sentence-transformers folder of a stock model with a module of its own."""
    save_tiny("BERT", folder)
    (folder / "squared.py").write_text(MODULE_CODE)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Squared", "Squared")]
    listing = []
    for number, (path, kind) in enumerate(modules):
        module = f"sentence_transformers.sentence_transformer.modules.{kind}" if number < 2 else f"squared.{kind}"
        listing.append({"idx": number, "name": str(number), "path": path, "type": module})
    (folder / "modules.json").write_text(json.dumps(listing))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Squared").mkdir()
    Pooling(32).save(str(folder / "1_Pooling"))
    (folder / "2_Squared" / "config.json").write_text(json.dumps({"power": 3}))
    return folder


FOLDERS: dict[str, tuple[Callable[[Path], Path], Any, bool]] = {
    "text": (text_folder, INPUTS, False),
    "image": (image_folder, IMAGES, False),
    "sentence": (sentence_folder, INPUTS, False),
    "image with code": (image_code_folder, IMAGES, True),
    "text with code": (code_folder, INPUTS, True),
    "sentence with code": (sentence_code_folder, INPUTS, True),
}


def changed_value(value: Any) -> Any:
    """Return another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 2 + 0.5
        case str():
            return {"right": "left", "silu": "relu", "gelu": "relu", "mean": "max"}.get(value, f"{value}x")
        case None:
            return 1
        case list():
            return value[:-1] if value else [1]
    raise AssertionError(value)


def changed_contents(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a JSON value in which one entry is another, or is gone, and the entry's path."""
    if not isinstance(value, dict):
        yield "", changed_value(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for number, entry in enumerate(value):
                for path, changed in changed_contents(entry):
                    yield f"/{number}{path}", [*value[:number], changed, *value[number + 1 :]]
        return
    for name in list(value)[:_MAX_ENTRIES] if len(value) > 60 else list(value):
        for path, changed in changed_contents(value[name]):
            yield f"/{name}{path}", value | {name: changed}
    yield "/training added", value | {"training": 5}


def changes(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each file, with the change, and its changed content."""
    vocabulary = "tokenizer.json" if (folder / "modules.json").is_file() or any(folder.glob("*.py")) else ""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != vocabulary):
        content, name = path.read_bytes(), path.relative_to(folder).as_posix()
        if path.suffix == ".json":
            settings = json.loads(content)
            gone = (
                [(f" without {key}", {k: v for k, v in settings.items() if k != key}) for key in settings]
                if isinstance(settings, dict)
                else []
            )
            for entry, changed in [*changed_contents(settings), *gone]:
                yield f"{name}{entry}", json.dumps(changed).encode()
        elif path.suffix == ".py":
            for before, after in ((b"SCALE = 1", b"SCALE = 2"), (b'"o"', b'"e"'), (b"* 2", b"* 3"), (b".abs()", b"")):
                if before in content:
                    yield f"{name} {after.decode()}", content.replace(before, after)
        else:
            yield name, content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("kind", FOLDERS)
def test_spec_use_of_a_folder_leaves_its_digest(kind: str, tmp_path: Path) -> None:
    make, inputs, code = FOLDERS[kind]
    encoder = LayerEncoder(str(make(tmp_path / "model")), -1, device="cpu", trust_remote_code=code)
    before = encoder.spec
    encoder.encode(inputs)
    encoder.encode(inputs[:1])
    assert encoder.spec == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "scale.pt"])
@pytest.mark.parametrize("linked", [False, True])
def test_files_digest_data_of_an_own_module_shows(name: str, linked: bool, tmp_path: Path) -> None:
    folder = sentence_code_folder(tmp_path / "model")
    if linked:
        (folder / "2_Squared").rename(tmp_path / "2_Squared")
        (folder / "2_Squared").symlink_to(tmp_path / "2_Squared")
    digests = []
    for content in ("2", "3", "2"):
        (folder / "2_Squared" / name).write_text(content)
        digests.append(files_digest(folder, code=True))
    assert digests[0] == digests[2] != digests[1]


def test_files_digest_trust_counts_only_with_own_code(tmp_path: Path) -> None:
    for make in (sentence_folder, image_folder):
        folder = make(tmp_path / make.__name__)
        assert files_digest(folder, code=True) == files_digest(folder, code=False)
    for make in (sentence_code_folder, image_code_folder):
        folder = make(tmp_path / make.__name__)
        assert files_digest(folder, code=True) != files_digest(folder, code=False)


def test_files_digest_nested_config_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "some_config.json").write_text("[" * 100_000)
    assert files_digest(tmp_path, code=False)


@pytest.mark.parametrize("kind", FOLDERS)
def test_files_digest_any_change_shows_or_leaves_the_vectors_equal(kind: str, tmp_path: Path) -> None:
    make, inputs, code = FOLDERS[kind]
    folder = make(tmp_path / "model")

    def outcome() -> tuple[str, np.ndarray]:
        encoder = LayerEncoder(str(folder), -1, device="cpu", trust_remote_code=code)
        return encoder.spec.digest, np.asarray(encoder.encode(inputs))

    digest, vectors = outcome()
    assert outcome()[0] == digest
    stale, changed_vectors = [], 0
    for name, content in changes(folder):
        path = next(
            path
            for path in folder.rglob("*")
            if name.startswith(path.relative_to(folder).as_posix()) and path.is_file()
        )
        original = path.read_bytes()
        path.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other_digest, other_vectors = outcome()
        except Exception:  # it gives no vectors
            continue
        finally:
            path.write_bytes(original)
        if not np.array_equal(other_vectors, vectors):
            changed_vectors += 1
            if other_digest == digest:
                stale.append(name)
    assert not stale
    assert changed_vectors > 5
    assert outcome()[0] == digest
