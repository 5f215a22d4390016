"""Predicting masked tokens from the states before them (MNTP)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.training.losses import MaskedNextTokenLoss, mask_tokens, masked_token_head
from tests.support.grouped import tune
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import TEXTS, Folder
from tests.tuning.rows import PAIRS

pytestmark = MTEB

SENTENCES = [row["anchor"] for row in PAIRS]
QUICK: dict[str, Any] = {"tasks": (), "objective": "mntp", "bidirectional": True, "device": "cpu", "batch_size": 16}


@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Folder) -> Callable[[bool], str]:
    """Return folders of a causal model with output embeddings of its own, or shared with the input."""

    def save(tied: bool) -> str:
        path = tmp_path_factory.mktemp("causal")
        plain = AutoModel.from_pretrained(tiny_folder("Llama"))
        config = LlamaConfig(**{**plain.config.to_dict(), "tie_word_embeddings": tied})
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
        AutoTokenizer.from_pretrained(tiny_folder("Llama")).save_pretrained(path)
        return str(path)

    return save


def test_a_fifth_of_the_maskable_tokens_is_predicted_and_nothing_else_changes() -> None:
    ids = torch.arange(20_000).reshape(4, 5000) % 90 + 10
    maskable = torch.ones_like(ids, dtype=torch.bool)
    maskable[:, :100] = False
    changed, masked = mask_tokens(ids, maskable, mask_id=7, vocabulary=100, generator=torch.Generator().manual_seed(0))
    assert not masked[:, :100].any()
    assert torch.equal(changed[~masked], ids[~masked])
    assert float(masked[maskable].float().mean()) == pytest.approx(0.2, abs=0.01)
    assert float((changed[masked] == 7).float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float((changed[masked] == ids[masked]).float().mean()) == pytest.approx(0.1, abs=0.02)
    assert changed.max() < 100


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_that_of_the_language_model_at_the_positions_before(
    tied: bool, causal_folder: Callable[[bool], str]
) -> None:
    folder = causal_folder(tied)
    encoder = LayerEncoder(folder, -1, device="cpu", dtype="float32", bidirectional=True).eval()
    loss = MaskedNextTokenLoss(encoder, masked_token_head(encoder), seed=3)
    features = encoder.preprocess(TEXTS)
    with torch.no_grad():
        actual = float(loss([dict(features)], None))
    ids, mask = features["input_ids"], features["attention_mask"].bool()
    special = torch.isin(ids, torch.tensor(encoder.tokenizer.all_special_ids))
    maskable = mask & ~special
    maskable[:, 0] = False
    changed, masked = mask_tokens(ids, maskable, loss.mask_id, len(loss.head), torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    total, count = 0.0, 0
    for row in range(len(ids)):
        length = int(mask[row].sum())
        allowed = torch.zeros(1, 1, length, length)  # added to the scores: every token sees every other
        with torch.no_grad():
            logits = model(changed[row : row + 1, :length], attention_mask=allowed).logits[0]
        for place in torch.nonzero(masked[row]).flatten().tolist():
            total -= float(logits[place - 1].log_softmax(-1)[ids[row, place]])
            count += 1
    assert count > 3
    assert actual == pytest.approx(total / count, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("lora", [False, 4])
def test_training_lowers_the_held_out_loss_and_saves_a_plain_folder(
    lora: Any, causal_folder: Callable[[bool], str], tmp_path: Path
) -> None:
    quick = {**QUICK, "max_steps": 30, "checkpoints": 3, "learning_rate": 1e-2, "held_out": 0.2, "lora": lora}
    result = tune(causal_folder(True), -1, texts=SENTENCES, out=tmp_path / "out", **quick)
    held_out = result.trained.losses.drop_nulls("held_out")["held_out"]
    assert held_out.min() < (0.98 if lora else 0.9) * held_out[0]  # adapters do not change the embeddings
    plain = SentenceTransformer(str(result.model_folder), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(plain.encode(TEXTS), result.encoder.encode(TEXTS), atol=1e-6)
    assert result.how["Loss"] == "MaskedNextTokenLoss"
    assert result.how["Texts"] == f"`texts`, {len(SENTENCES)} rows"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bidirectional": False}, "Pass bidirectional=True"),
        ({"norm": "none"}, "`norm` must be 'final'"),
        ({"texts": ["a", "b", "c", "d", "e", "f"]}, "`texts` must have several tokens each"),
        ({"truncate_dim": 8}, "Pass it to the trained encoder instead"),
        ({"texts": None}, "`texts` must be given, and `pairs` left out"),
        ({"pairs": PAIRS}, "`texts` must be given, and `pairs` left out"),
        ({"objective": "pairs"}, "`pairs` must be given, and `texts` left out"),
        ({"objective": "mlm"}, "`objective` must be one of 'pairs', 'mntp'"),
        ({"matryoshka": [8]}, "`mini_batch` and `matryoshka` cannot be combined"),
    ],
)
def test_invalid_arguments_are_named(
    arguments: Any, message: str, causal_folder: Callable[[bool], str], tmp_path: Path
) -> None:
    keywords = {"texts": SENTENCES, **QUICK, **arguments}
    with pytest.raises(OptionError, match=message):
        tune(causal_folder(True), 2, keywords.pop("pairs", None), out=tmp_path / "out", **keywords)


def test_a_tokenizer_without_a_token_to_mask_with_is_refused(causal_folder: Callable[[bool], str]) -> None:
    encoder = LayerEncoder(causal_folder(True), 2, device="cpu", bidirectional=True)
    loss = MaskedNextTokenLoss(encoder, masked_token_head(encoder), seed=0)
    assert encoder.tokenizer.convert_ids_to_tokens(loss.mask_id) in ("_", encoder.tokenizer.mask_token)
    for unknown in (None, loss.mask_id):
        encoder.tokenizer.convert_tokens_to_ids = lambda _, unknown=unknown: unknown
        encoder.tokenizer.unk_token_id = unknown
        with pytest.raises(OptionError, match="neither a mask token nor '_'"):
            MaskedNextTokenLoss(encoder, masked_token_head(encoder), seed=0)


def test_scaled_logits_are_refused(causal_folder: Callable[[bool], str]) -> None:
    encoder = LayerEncoder(causal_folder(True), 2, device="cpu", bidirectional=True)
    encoder.transformer.config.final_logit_softcapping = 30.0
    with pytest.raises(OptionError, match="scales its logits"):
        masked_token_head(encoder)
