"""The numbers in the warnings of an encoder, recomputed by hand, and the inputs that just miss a warning."""

from typing import Any

import pytest

from midlayer_encoders import LayerEncoder
from tests.recipes.test_skip_special import save

ADDED = {"BERT": 2, "Llama": 1}  # tokens that the tokenizer adds to a text


@pytest.fixture(scope="module", params=ADDED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    return save(request.param, tmp_path_factory.mktemp(request.param)), ADDED[request.param]


@pytest.mark.parametrize("excess", [0, 1, 5])
@pytest.mark.parametrize("options", [{}, {"prompts": {"a": "x: "}, "default_prompt_name": "a"}])
def test_truncated_text_is_reported_with_its_tokens(
    excess: int, options: dict[str, Any], folder: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    encoder = LayerEncoder(folder[0], 1, device="cpu", max_length=9, **options)
    text = "abcdefghijklmn"[: 9 - folder[1] - (3 if options else 0) + excess]
    encoder.encode(["a", text])
    encoder.encode([text])
    expected = f"A text of {9 + excess} tokens is truncated to 9 ({text!r}…); reported once. "
    reports = [message.partition("Pass")[0] for message in caplog.messages if "truncated" in message]
    assert reports == ([expected] if excess else [])
