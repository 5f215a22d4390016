"""Token metrics inside the blocks (Figure 15): before and after norms, attention, MLP and residual sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import METRICS, LayerMetric, make_metrics
from midlayer_encoders.models.anatomy import block_sites
from midlayer_encoders.paper.token_ids import check_experiment, experiment_frame, ids_reader, tokenized
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


def model_sites(encoder: LayerEncoder) -> list[str]:
    """Return the names of the sites inside the blocks of an encoder's model, in order."""
    reader = ids_reader(encoder)
    return list(block_sites(reader.anatomy.block(reader.model, 1), getattr(reader.model, "config", None)))


def subblocks(
    encoder: LayerEncoder,
    texts: Sequence[str],
    *,
    sites: Sequence[str] | str = "all",
    metrics: str | Sequence[str] = ("prompt_effective_rank", "prompt_entropy"),
    max_length: int = 128,
    dataset: str = "texts",
    token_budget: int = 4096,
) -> pl.DataFrame:
    """Return the tidy frame of token metrics at the sites inside each block, from one pass over the texts.

    Args:
        encoder: with the whole model.
        texts: two or more, of three tokens or more each.
        sites: ``"all"`` that the blocks have, or some; see :func:`~midlayer_encoders.models.anatomy.block_sites`.
        metrics: of token states, such as ``"prompt_effective_rank"`` (the paper's figure) or ``"prompt_entropy"``.
        max_length: tokens after which a text is truncated.
        dataset: what the frame calls the texts.
        token_budget: tokens in a batch.

    Returns:
        The tidy columns, and ``site``. The layer of a point inside a block is that of its output, ``1`` to
        ``num_layers``.
    """
    check_experiment(encoder, texts)
    available = model_sites(encoder)
    if sites == "all":
        sites = available
    sites = [sites] if isinstance(sites, str) else list(sites)
    for site in sites:
        check_choice("sites", site, available)
    reader = ids_reader(encoder)
    layers = list(range(1, reader.anatomy.num_layers + 1))
    site_metrics = {site: _token_metrics(metrics, layers) for site in sites}
    ids = tokenized(encoder, texts, max_length=max_length)
    for batch in plan_batches([len(text_ids) for text_ids in ids], token_budget=token_budget):
        inputs = dict(reader.preprocess([ids[position] for position in batch]))
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()

        def receive(layer: int, site: str, states: Tensor, real: Tensor = real) -> None:
            for metric in site_metrics[site].values():
                metric.update(layer, states, real.to(states.device))

        with torch.inference_mode():
            capture(reader.model, inputs, receive, anatomy=reader.anatomy, layers=layers, sites=sites)
    return _frame(encoder, site_metrics, dataset)


def _token_metrics(names: str | Sequence[str], layers: Sequence[int]) -> dict[str, LayerMetric]:
    metrics = make_metrics(names, layers)
    for name, metric in metrics.items():
        if metric.kind != "tokens":
            token_metrics = [key for key, metric_class in METRICS.items() if metric_class.kind == "tokens"]
            raise OptionError(f"`metrics` must be of token states ({', '.join(token_metrics)}), but got {name!r}.")
    return metrics


def _frame(encoder: LayerEncoder, site_metrics: dict[str, dict[str, LayerMetric]], dataset: str) -> pl.DataFrame:
    rows = [
        {"layer": layer, "name": name, "value": value, "site": site}
        for site, metrics in site_metrics.items()
        for name, metric in metrics.items()
        for layer, value in zip(metric.layers, metric.compute().tolist(), strict=True)
    ]
    return experiment_frame(encoder, rows, dataset=dataset, extra={"site": pl.String()})
