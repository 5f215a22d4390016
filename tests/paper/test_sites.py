"""Points inside the blocks: attention and MLP add up to the residual stream."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.paper.sites import SITES, block_sites, capture_sites
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.capture import capture
from tests.models.test_anatomy import record_states
from tests.support.families import DEPTH, FAMILIES, WIDTH, inputs, tiny
from tests.support.others_warnings import MTEB

pytestmark = MTEB


QUICK = ("Llama", "GPT2", "OPT", "Mamba", "BERT", "ALBERT", "ViT", "WavLM")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_gives_one_state_per_token_and_block(family: str) -> None:
    model = tiny(family).eval()
    anatomy = find_anatomy(model)
    layers = range(1, anatomy.num_layers + 1)
    for site in ("attention", "mlp") if "Mamba" not in family else ("attention",):
        recorded: list[tuple[int, tuple[int, ...]]] = []

        def receive(layer: int, _: str, states: Tensor, recorded: Any = recorded) -> None:
            recorded.append((layer, tuple(states.shape)))

        stream: list[tuple[int, ...]] = []
        with torch.no_grad():
            capture_sites(model, inputs(family), receive, anatomy=anatomy, layers=layers, sites=(site,))
            capture(model, inputs(family), lambda _, s, to=stream: to.append(tuple(s.shape)), anatomy=anatomy, layers=layers)  # type: ignore[misc]  # fmt: skip
        assert recorded == list(zip(layers, stream, strict=True))


class Block(nn.Module):
    """A block whose MLP flattens texts and tokens, like mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x.reshape(-1, 4)).reshape(x.shape)


def test_flattened_tokens_are_restored() -> None:
    model = nn.Sequential(nn.Sequential(Block(), Block()))
    anatomy = find_anatomy(model, blocks="0", final=())
    x, result = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0)), []
    loaded = lambda: capture_sites(  # noqa: E731
        model, {"input": x}, lambda _, __, states: result.append(states), anatomy=anatomy, layers=[1, 2], sites=("mlp",)
    )
    loaded()
    torch.testing.assert_close(x + result[0] + result[1], model(x))


@pytest.mark.parametrize("name", ["Llama", "GPT2", "BERT", "ALBERT", "Gemma2"])
def test_sites_inside_blocks_come_with_their_layer(name: str) -> None:
    model, actual = tiny(name), {}
    anatomy = find_anatomy(model)
    sites = [*block_sites(anatomy.block(model, 1), model.config)]
    with torch.no_grad():
        capture_sites(
            model, inputs(name), lambda layer, site, states: actual.setdefault((layer, site), states),
            anatomy=anatomy, layers=range(1, DEPTH + 1), sites=sites,
        )  # fmt: skip
    assert set(actual) == {(layer, site) for layer in range(1, DEPTH + 1) for site in sites}
    for layer in range(2, DEPTH + 1):
        torch.testing.assert_close(actual[layer, "residual_in"], actual[layer - 1, "residual_out"])


SCALED = {
    "DINOv2": "layer_scale1",
    "Gemma2": "post_attention_layernorm",
}  # applied between attention and the residual sum
POST_NORM = {"BERT", "RoBERTa", "DistilBERT", "DeBERTaV2", "DeBERTaV2-conv", "ALBERT", "OPT-350m"}
POST_NORM |= {"Wav2Vec2", "HuBERT", "WavLM"}
NO_MIDDLE = {"GPTNeoX", "Mamba", "Mamba2"}  # parallel branches, or no MLP


@pytest.mark.parametrize("name", FAMILIES)
def test_sites_in_a_block_add_up_to_the_residual_stream(name: str) -> None:
    model = tiny(name)
    block = find_anatomy(model).block(model, 2)
    sites = block_sites(block, model.config)
    assert ("residual_mid" not in sites) == (name in NO_MIDDLE)
    assert ("mlp" not in sites) == (name in {"Mamba", "Mamba2"})
    recorded, _ = record_states(
        model, name, {key: (block.get_submodule(site.module), site.side) for key, site in sites.items()}
    )
    call = 1 if name == "ALBERT" else 0
    states = {key: values[call].reshape(2, -1, WIDTH) for key, values in recorded.items()}
    added = states["attention"]
    with torch.no_grad():
        if name in SCALED:
            added = block.get_submodule(SCALED[name])(added)
        if name in POST_NORM:
            norm = block.get_submodule(sites["residual_mid"].module)
            torch.testing.assert_close(norm(states["residual_in"] + added), states["residual_mid"])
        elif name in NO_MIDDLE:
            torch.testing.assert_close(states["residual_in"] + added + states.get("mlp", 0), states["residual_out"])
        elif name == "BEiT":  # the scale is a bare parameter of the block
            scale = getattr(block, "lambda_1", None)
            torch.testing.assert_close(
                states["residual_in"] + (added if scale is None else scale * added), states["residual_mid"]
            )
        else:
            torch.testing.assert_close(states["residual_in"] + added, states["residual_mid"])
            if name not in SCALED:
                torch.testing.assert_close(states["residual_mid"] + states["mlp"], states["residual_out"])


@pytest.mark.parametrize("name", FAMILIES)
def test_sites_before_and_after_the_norms_are_related_by_them(name: str) -> None:
    model = tiny(name)
    block = find_anatomy(model).block(model, 2)
    sites = block_sites(block, model.config)
    assert list(sites) == [site for site in SITES if site in sites]
    recorded, _ = record_states(
        model, name, {key: (block.get_submodule(site.module), site.side) for key, site in sites.items()}
    )
    states = {key: values[1 if name == "ALBERT" else 0].reshape(2, -1, WIDTH) for key, values in recorded.items()}
    norms = [module for path, module in block.named_modules() if path and type(module).__name__.endswith("Norm")]

    def norm_connects(before: str, after: str) -> bool:
        """Return True if exactly one norm of the block maps the first site to the second."""
        widths = [norm for norm in norms if norm.weight.shape == (WIDTH,)]
        return sum(torch.allclose(norm(states[before]), states[after], atol=1e-5) for norm in widths) == 1

    with torch.no_grad():
        if name in POST_NORM:
            torch.testing.assert_close(states["attention_in"], states["residual_in"])
            torch.testing.assert_close(states["mlp_in"], states["residual_mid"])
            torch.testing.assert_close(states["attention_sum"], states["residual_in"] + states["attention"])
            torch.testing.assert_close(states["mlp_sum"], states["residual_mid"] + states["mlp"])
            assert norm_connects("attention_sum", "residual_mid")
            assert norm_connects("mlp_sum", "residual_out")
        else:
            assert norm_connects("residual_in", "attention_in")
            assert "mlp" not in sites or norm_connects(
                "residual_mid" if "residual_mid" in sites else "residual_in", "mlp_in"
            )
