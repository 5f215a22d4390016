from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import FRAME_SCHEMA
from midlayer_encoders.metrics import prompt_effective_rank, prompt_entropy
from midlayer_encoders.models.anatomy import block_sites, find_anatomy
from midlayer_encoders.paper.subblocks import model_sites, subblocks
from tests.families import DEPTH
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]
PRE_NORM = ["residual_in", "attention_in", "attention", "residual_mid", "mlp_in", "mlp", "residual_out"]
SITES = {
    "Llama": PRE_NORM,
    "GPT2": PRE_NORM,
    "GPTNeoX": [site for site in PRE_NORM if site != "residual_mid"],  # attention and MLP stand side by side
    "BERT": [*PRE_NORM[:3], "attention_sum", *PRE_NORM[3:6], "mlp_sum", "residual_out"],
    "Mamba": ["residual_in", "attention_in", "attention", "residual_out"],
}


@pytest.mark.parametrize("name", SITES)
def test_every_point_of_every_block_is_measured_from_one_pass(name: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder(name), -1, device="cpu")
    assert model_sites(encoder) == SITES[name]
    frame = subblocks(encoder, TEXTS, dataset="mine", token_budget=80)
    assert frame.columns == [*FRAME_SCHEMA, "site"]
    assert len(frame) == 2 * DEPTH * len(SITES[name])
    before = frame.filter(pl.col("site") == "residual_in", pl.col("layer") > 1)["value"].to_torch()
    after = frame.filter(pl.col("site") == "residual_out", pl.col("layer") < DEPTH)["value"].to_torch()
    torch.testing.assert_close(before, after)
    for site in SITES[name]:
        alone = one_text_at_a_time(encoder, layer=2, site=site)
        for metric, value in alone.items():
            row = frame.filter(pl.col("site") == site, pl.col("layer") == 2, pl.col("name") == metric)
            assert row["value"].item() == pytest.approx(value, rel=2e-3, abs=1e-4)


def one_text_at_a_time(encoder: LayerEncoder, *, layer: int, site: str) -> dict[str, float]:
    """Return the metrics of one point of one block by a hook of the test's own."""
    model = encoder[0].model
    block = find_anatomy(model).block(model, layer)
    where = block_sites(block, model.config)[site]
    seen: list[torch.Tensor] = []
    module = block.get_submodule(where.module)
    if where.side == "input":
        hook = module.register_forward_pre_hook(
            lambda _m, args, kwargs: seen.append((args or (kwargs["hidden_states"],))[0]), with_kwargs=True
        )
    else:
        hook = module.register_forward_hook(lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        for text in TEXTS:
            model(**encoder.tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    hook.remove()
    functions = {"prompt_entropy": prompt_entropy, "prompt_effective_rank": prompt_effective_rank}
    return {
        key: float(torch.stack([one(state).squeeze() for state in seen]).double().mean())
        for key, one in functions.items()
    }


def test_wrong_input(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with pytest.raises(OptionError, match="Did you mean 'attention'"):
        subblocks(encoder, TEXTS, sites=["attentoin"])
    with pytest.raises(OptionError, match=r"`metrics` must be of token states .*but got 'lidar'"):
        subblocks(encoder, TEXTS, metrics="lidar")
    with pytest.raises(OptionError, match="3 blocks or more"):
        subblocks(LayerEncoder(tiny_folder("Llama"), 2, device="cpu"), TEXTS)
    with pytest.raises(OptionError, match="`texts` must hold 2"):
        subblocks(encoder, TEXTS[:1])
