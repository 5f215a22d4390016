"""A text is stored once for each prompt, even if prompts are similar."""

from itertools import product
from pathlib import Path

import numpy as np

from midlayer_encoders.sweeping.store import EmbeddingStore, text_key


def test_prompt_and_text_pairs_have_distinct_keys() -> None:
    # Every string of up to three of these characters; the header of a key consists of digits and colons.
    strings = ["".join(letters) for length in range(4) for letters in product("a1:", repeat=length)]
    pairs = list(product(strings, strings))
    assert len(pairs) == 1600
    assert len({text_key(text, prompt) for prompt, text in pairs}) == 1600


def test_prompts_of_the_same_length_keep_their_own_vectors(tmp_path: Path) -> None:
    store = EmbeddingStore(tmp_path, key="e1f5", layers=[0], dim=2)
    query, title = text_key("a text", "query: "), text_key("a text", "title: ")
    store.write([query], np.array([[[1.0, 2.0]]]))
    assert store.missing([query, title]) == [1]
    store.write([title], np.array([[[3.0, 4.0]]]))
    assert store.read(0, [title, query]).tolist() == [[3.0, 4.0], [1.0, 2.0]]
