"""Save an encoder, or its stock form, as a folder that any ``SentenceTransformer`` loads, and verify it."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import nn

from midlayer_encoders.encoder import spec as names
from midlayer_encoders.encoder.first_module import UncutTransformer, states_width
from midlayer_encoders.encoder.probes import close, probe_inputs
from midlayer_encoders.encoder.prompting import apply_template, copy_first_module, set_tokenizer
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.files import read_json, write_folder, write_json
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import suffers_from_padding
from midlayer_encoders.models.hub import BUILT_IN, BUILT_IN_MINILM
from midlayer_encoders.models.load import has_automatic_class, keep_weights_unchanged
from midlayer_encoders.reading import pooled_spans
from midlayer_encoders.recipes import RECIPES
from midlayer_encoders.validation import check_flag

#: A saved folder has its path in place of this, and sentence-transformers puts the repository there when it pushes one.
FOLDER = "sentence_transformers_model_id"

#: Files that loaders require, which are written last. vLLM would read the shards that a previous index lists.
LOADER_FILES = ("model.safetensors.index.json", "model.safetensors", "modules.json", "config.json")

# Characters that tokenizers normalize, split or mark in different ways.
_UNUSUAL_TEXT = "Cafe\u0301 ½ 12345  <s> don't\n\tDon’t straße 東京 한국 👍🏽 ﬁ \u00a0x_y"

CODE_NOTE = (
    f"The folder contains the code that pools its spans, {Path(pooled_spans.__file__).name}: load it with "
    "trust_remote_code=True."
)
_STOCK_HINT = " A folder without code, at the cost of points: save_pretrained(path, stock=True)."
STOCK_NOTE = "The folder contains no code, and another encoder than this one: docs/recipes.md says what it costs."

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

logger = logging.getLogger(__name__)


def save_files(encoder: Any, path: str, stock: bool, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Write the folder of an encoder, or of its stock form, verify it, and return the relative paths of its files.

    Args:
        encoder: the encoder.
        path: the folder.
        stock: whether to write the stock form.
        args: of ``SentenceTransformer.save``.
        kwargs: likewise.
    """
    check_export(encoder)
    home = Path(path)
    form: SentenceTransformer | None = None
    if check_flag("stock", stock):
        if problem := stock_problem(encoder):
            raise OptionError(problem)
        form = stock_form(encoder)

    def write(folder: Path) -> None:
        SentenceTransformer.save(form or encoder, str(folder), *args, **kwargs)
        if form is None and encoder.spans is not None:
            _name_code(folder)
        card = folder / "README.md"
        if card.exists():
            text = card_text(encoder, stock_template=STOCK_TEMPLATE) if form else card.read_text(encoding="utf8")
            card.write_text(text.replace(FOLDER, json.dumps(str(home))[1:-1]), encoding="utf8")
        check_folder(encoder, folder, home, form)

    with internals.without_bars():
        return write_folder(home, write, last=LOADER_FILES)


def check_folder(encoder: Any, folder: Path, home: Path, form: SentenceTransformer | None = None) -> None:
    """Raise unless ``SentenceTransformer`` gives the vectors of an encoder, or of its stock form, from a folder.

    Args:
        encoder: the encoder.
        folder: the folder as it was written.
        home: the folder that it will become, for errors.
        form: the stock form, if the folder contains it.
    """
    source: Any = form or encoder
    if encoder.transformer.training:
        return
    probes = [probe_inputs([medium], encoder.sampling_rate, encoder.tokenizer) for medium in encoder.media]
    inputs = [probe for pair in probes for probe in pair if probe is not None]
    trust = encoder.needs_trust(stock=form is not None)
    kwargs = {"dtype": encoder.dtype}
    plain: Any = SentenceTransformer(
        str(folder), device=str(encoder.device), model_kwargs=kwargs, trust_remote_code=trust
    )
    keep_weights_unchanged(plain)
    options: dict[str, Any] = {"batch_size": 1, "convert_to_tensor": True, "show_progress_bar": False}
    expected, vectors = (model.encode(inputs, **options).float() for model in (source, plain))
    ids = [model.tokenizer and model.tokenizer(_UNUSUAL_TEXT, verbose=False)["input_ids"] for model in (source, plain)]
    if not close(expected, vectors, encoder.dtype) or (encoder.tokenizer is not None and ids[0] != ids[1]):
        raise CutError(
            f"The folder {home} would give other vectors than this encoder: transformers loads "
            f"{type(encoder.transformer).__name__} or its tokenizer differently. Use this encoder directly."
        )


def check_export(encoder: Any) -> None:
    """Raise if no plain folder gives an encoder's vectors, and name the reason."""
    first = encoder[0]
    model = first.model
    name = type(model).__name__
    if encoder.in_memory:
        first.save("a folder")
    fixed_window = getattr(model, "main_input_name", "") == "input_features" and encoder.pooling != "cls"
    problems = {
        f"{name} is not cut, because a cut would change its layers: hooks read them": isinstance(
            first, UncutTransformer
        ),
        "a plain folder pools every token: leave out `skip_first`, `skip_special` and template_tokens=False": (
            not encoder.counting.all
        ),
        f"the states of {name} fill a fixed window, whose end a plain folder pools: pass pooling='cls'": fixed_window,
        f"padding changes the states of a text in {name}, and a plain folder pads batches": (
            encoder.media == ["text"] and suffers_from_padding(model)
        ),
        f"{name} is part of an encoder-decoder, which a plain folder loads whole": internals.lacks_folder(model),
        f"{name} has no automatic class in transformers: export the whole joint model": (
            not has_automatic_class(model.config)
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise CutError(f"No plain folder gives the vectors of this encoder, which you can use directly: {problem}.")
    if suffers_from_padding(model) or internals.has_mask_of_states(model) or not encoder.makes_one_size:
        inputs = "smaller images" if "image" in encoder.media else "shorter waveforms"
        logger.warning("A plain folder pools the padding of %s: encode with batch_size=1 there.", inputs)


def log_code(encoder: Any, stock: bool) -> None:
    """Log whether a saved folder contains code, unless it is a checkpoint."""
    if encoder.spans is not None and not encoder.transformer.training:
        logger.warning(STOCK_NOTE if stock else CODE_NOTE + ("" if stock_problem(encoder) else _STOCK_HINT))


def card_text(
    encoder: Any, repository: str | None = None, branch: str | None = None, *, stock_template: str | None = None
) -> str:
    """Return the README of a folder or a repository.

    Args:
        encoder: the encoder.
        repository: name of the repository; ``None`` for a folder.
        branch: branch of the repository.
        stock_template: template of the encoder's stock form, if the card describes it.
    """
    spec, data = encoder.spec, encoder.model_card_data
    metadata = ModelCardData(
        library_name="sentence-transformers",
        base_model=None if spec.model.startswith("local/") else spec.model,
        language=data.language or None,
        license=data.license,
    )
    is_built_in = encoder.source in (BUILT_IN, BUILT_IN_MINILM)
    card = ModelCard.from_template(
        metadata,
        str(Path(__file__).with_name("model_card.md.jinja")),
        encoder=encoder,
        spec=spec,
        source=f"{encoder.name} ({spec.model.removeprefix('local/')})" if is_built_in else encoder.name,
        names=names,
        repository=repository,
        branch=branch,
        location=repository or FOLDER,
        size=sum(parameter.numel() for parameter in encoder.parameters()),
        stock_template=stock_template,
        trust=encoder.needs_trust(stock=stock_template is not None),
    )
    return f"{card}\n"


def _name_code(folder: Path) -> None:
    """Name the folder's copy of the pooling of spans in its ``modules.json``."""
    source = Path(pooled_spans.__file__)
    modules = read_json(folder / "modules.json")
    for entry in modules:
        if entry["type"].endswith(f".{pooled_spans.PooledSpans.__name__}"):
            entry["type"] = f"{source.stem}.{pooled_spans.PooledSpans.__name__}"
    write_json(folder / "modules.json", modules)


def stock_problem(encoder: Any) -> str | None:
    """Return why an encoder has no stock form, ``None`` if it has one."""
    if encoder.spans is not None and encoder.options.template is None:
        return (
            f"`stock` must be False for {encoder.name}, whose folder contains its template already. Create the stock "
            "folder from the original model: LayerEncoder(model, layer, recipe='word-echo')."
        )
    if encoder.options.template != RECIPES["word-echo"].template or encoder.options.join != "sum":
        return "`stock` must be False except for an encoder with recipe='word-echo'."
    if not set(encoder.after_pooling) <= {"Normalize"}:
        names = ", ".join(encoder.after_pooling)
        return f"`stock` must be False for an encoder with {names} after its pooling, fitted to other vectors."
    return None


def stock_form(encoder: Any) -> SentenceTransformer:
    """Return the nearest encoder of stock modules: they cannot read a token and the second copy of a text only.

    The text is repeated first and the word is asked for last. ``Pooling`` concatenates the mean of all tokens, weighted
    by their position, and the last token; a ``Dense`` of two scaled identity matrices adds them. The scales are the
    inverse mean lengths of both on sample sentences; a centered encoder uses the texts that it was centered on.

    Args:
        encoder: an encoder with the recipe ``word-echo``.
    """
    first = copy_first_module(encoder)
    set_tokenizer(first, first.tokenizer_without_template)
    options = replace(encoder.options, recipe=None, template=STOCK_TEMPLATE, join=None, template_tokens=None)
    apply_template(first, options, encoder.name)
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
    later = [module for module in list(encoder)[1:] if not isinstance(module, pooled_spans.PooledSpans)]
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
