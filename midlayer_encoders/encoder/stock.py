"""The form of word-echo that the modules of sentence-transformers can express."""

import copy
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import nn

from midlayer_encoders.encoder.first_module import states_width
from midlayer_encoders.models.anatomy import most_tokens
from midlayer_encoders.reading.pooled_spans import PooledSpans
from midlayer_encoders.recipes import add_template, split_template

#: The echo comes first here: ``Pooling`` reads the last token of a sequence, and no token in the middle.
STOCK_TEMPLATE = 'Rewrite the sentence "{text}". The rewritten sentence: "{text}" means in one word:"'

_SAMPLE = (
    "Yes.",
    "The train was late again.",
    "Where can I change my password?",
    "She has lived in Lisbon for eleven years.",
    "Preheat the oven to 200 degrees and grease a tin.",
    "My card was declined although there is money in the account.",
    "The function returns None if the key is missing, and raises an error otherwise.",
    "A man with a red hat is playing the guitar in front of a crowded railway station.",
    "Shares fell by three percent on Tuesday after the company lowered its forecast for the second half of the year.",
    "I expected a quiet evening, but the neighbors had invited half of the town, and nobody slept before four.",
)


def stock_form(encoder: Any) -> SentenceTransformer:
    """Return the nearest encoder of stock modules: they cannot read a token and the second copy of a text only.

    The text is repeated first and the word is asked for last. ``Pooling`` concatenates the mean of all tokens, weighted
    by their position, and the last token; a ``Dense`` of two scaled identity matrices adds them. The scales are the
    inverse mean lengths of both on sample sentences; a centered encoder uses the texts that it was centered on.

    Args:
        encoder: an encoder with the recipe ``word-echo``.
    """
    template = split_template(STOCK_TEMPLATE)["text"]
    first = copy.copy(encoder[0])
    first._modules = dict(first._modules)
    tokenizer, _ = add_template(
        first.tokenizer_without_template,
        template,
        model=encoder.name,
        max_length=encoder.options.max_length,
        positions=most_tokens(encoder.transformer),
    )
    if first.processor is first.tokenizer:
        first.processor = tokenizer
    else:
        first.processor = copy.copy(first.processor)
        first.processor.tokenizer = tokenizer
    width = states_width(first, encoder.anatomy, encoder.norm)
    pooling = PoolingModule(width, pooling_mode=("weightedmean", "lasttoken"))
    parts = SentenceTransformer(modules=[first, pooling], device=str(encoder.device))
    sample = list(encoder.options.center or _SAMPLE)
    vectors = parts.encode(sample, convert_to_tensor=True, show_progress_bar=False).float()
    mean = vectors.mean(dim=0) if encoder.options.center else torch.zeros_like(vectors[0])
    scales = [width**0.5 / part.norm(dim=1).mean() for part in torch.split(vectors - mean, width, dim=1)]
    weight = torch.cat([scale * torch.eye(width, device=vectors.device) for scale in scales], dim=1)
    added: Any = Dense(
        2 * width, width, activation_function=nn.Identity(), init_weight=weight, init_bias=-weight @ mean
    )
    later = [module for module in list(encoder)[1:] if not isinstance(module, PooledSpans)]
    form = SentenceTransformer(
        modules=[first, pooling, added.to(encoder.device, encoder.dtype), *later],
        device=str(encoder.device),
        prompts={name: prompt for name, prompt in encoder.prompts.items() if prompt is not None},
        default_prompt_name=encoder.default_prompt_name,
        similarity_fn_name=encoder.similarity_fn_name,
        truncate_dim=encoder.truncate_dim,
    )
    form.eval()
    return form
