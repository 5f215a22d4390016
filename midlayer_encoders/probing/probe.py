"""Probe every layer of a frozen encoder."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from midlayer_encoders._deprecated import take_deprecated
from midlayer_encoders._types import Layer, Progress, ReadSite
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.frame import at_site
from midlayer_encoders.measuring import agreed
from midlayer_encoders.probing.classifiers import PROBE_KINDS, AttentiveProbes, LinearProbes, ProbeKind, nearest_classes
from midlayer_encoders.probing.fitting import UNUSED_SETTINGS, ProbeSettings, predict, train_probes
from midlayer_encoders.probing.probe_result import ProbeResult
from midlayer_encoders.probing.splits import Split, chance_level, split_examples
from midlayer_encoders.probing.tokens import CachedTokens, LiveTokens, TokenSource, read_tokens, read_vectors
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.selection.mixture import mixture_on_test
from midlayer_encoders.selection.ridge import class_numbers, equal_steps, label_list
from midlayer_encoders.validation import check_choice, check_effect, check_list, check_progress, check_text

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

MIXTURE_EXAMPLES = 2000
"""Maximum number of training examples that a mixture is learned from; more are sampled at equal steps."""

_DEPRECATED = {
    **{field.name: f"settings.{field.name}" for field in fields(ProbeSettings)},
    "neighbours": "settings.neighbors",
    "norm": "encoder.norm",
}


def probe(
    encoder: LayerEncoder,
    inputs: Sequence[Any],
    labels: Sequence[Hashable],
    *,
    kind: ProbeKind = "attentive",
    layers: Sequence[Layer] | str = "all",
    test_inputs: Sequence[Any] = (),
    test_labels: Sequence[Hashable] = (),
    site: ReadSite = "block",
    settings: ProbeSettings | None = None,
    dataset: str = "examples",
    progress: Progress | None = None,
    **deprecated: Any,
) -> ProbeResult:
    """Return the accuracy by layer of probes on a frozen model's tokens, all layers from one forward pass.

    ``"attentive"`` trains attentive pooling and a linear classifier on each layer's tokens, as in El-Nouby et al.
    (2024), ``"linear"`` a linear classifier on their mean, and ``"knn"`` takes a vote of the nearest training examples.
    The probes of all layers train together, and each becomes what it would have become alone.

    Args:
        encoder: with the whole model, ``LayerEncoder(model, layer=-1)``.
        inputs: texts, images or audio, as the encoder takes them.
        labels: the class of each input, at least two classes.
        kind: of the probe.
        layers: ``"all"`` or a list.
        test_inputs: examples to test on; without them, a fifth of each class is held out.
        test_labels: their classes.
        site: ``"block"``, or ``"attention"`` or ``"mlp"``: the update that these add in each block, from layer 1 up.
            The result's revision names it, as ``"default:mlp"``.
        settings: of the training, see :class:`~midlayer_encoders.probing.ProbeSettings`.
        dataset: name of the examples in the result.
        progress: called with the stages ``"reading"`` and ``"training"``.
        deprecated: the fields of ``settings`` as keywords, which 0.2 accepted.
    """
    check_choice("kind", kind, PROBE_KINDS)
    replaced = take_deprecated(deprecated, _DEPRECATED, function="probe")
    settings = replace(settings or ProbeSettings(), **replaced.get("settings", {}))
    reason, unused = UNUSED_SETTINGS[kind]
    check_effect(
        ProbeSettings, f"with kind={kind!r}, which {reason}", **{name: getattr(settings, name) for name in unused}
    )
    check_text("dataset", dataset)
    check_progress(progress)
    if not hasattr(encoder, "anatomy"):
        raise OptionError(f"`encoder` must be a LayerEncoder, but got {short_repr(encoder)}.")
    agreed("norm", replaced.get("encoder", {}).get("norm"), encoder.norm)
    examples, classes, split, names = _checked_examples(inputs, labels, test_inputs, test_labels, settings.seed)
    reader = layer_reader(encoder, layers=layers, prompt=encoder.default_prompt, site=site)
    live = LiveTokens(reader, examples)
    batches = batches_of(encoder, examples, prompt=encoder.default_prompt)
    source: TokenSource
    if kind == "attentive":
        source = read_tokens(live, batches, keep_gb=settings.keep_gb, progress=progress)
    else:
        source = read_vectors(live, batches, progress=progress)
    right, validation, best_epochs = probe_tokens(
        source, classes, split, kind=kind, settings=settings, progress=progress, device=encoder.device
    )
    mixture = None
    if settings.mixture:
        vectors = source if isinstance(source, CachedTokens) and kind != "attentive" else read_vectors(live, batches)
        train = torch.cat([split.train, split.validation]).sort().values
        train = train[equal_steps(len(train), MIXTURE_EXAMPLES)]
        mixture = mixture_on_test(
            vectors.states[:, :, 0], classes, train, split.test, reader.layers, seed=settings.seed
        )
    spec = at_site(encoder.spec, site)
    return ProbeResult(
        model=spec.model,
        revision=spec.revision or "default",
        num_layers=spec.num_layers,
        layers=tuple(reader.layers),
        kind=kind,
        dataset=dataset,
        classes=names,
        right=right,
        validation=validation,
        epochs=best_epochs,
        chance=chance_level(classes, split),
        num_train=len(split.train),
        mixture=mixture,
    )


def probe_tokens(
    source: TokenSource,
    labels: Tensor,
    split: Split,
    *,
    kind: ProbeKind = "attentive",
    settings: ProbeSettings | None = None,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    **deprecated: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which test examples each layer has right ``(L, M)``, validation accuracy ``(L,)`` and epochs ``(L,)``.

    Use it to probe a model that no encoder holds.

    Args:
        source: tokens of every layer.
        labels: classes from ``0`` of all examples, shape ``(N,)``.
        split: which examples train, choose the epoch and test.
        kind: of the probe; ``"knn"`` needs :class:`CachedTokens` with one token per example.
        settings: of the training.
        progress: called after each epoch, with the stage ``"training"``.
        device: to train on.
        deprecated: the keywords ``training``, ``heads`` and ``neighbors`` of 0.2.
    """
    settings = take_deprecated(deprecated, {"training": "settings"}).get("settings", settings)
    old_keywords = {"heads": "settings.heads", "neighbors": "settings.neighbors"}
    replaced = take_deprecated(deprecated, old_keywords, function="probe_tokens")
    settings = replace(settings or ProbeSettings(), **replaced.get("settings", {}))
    if kind == "knn":
        return _probe_neighbors(source, labels, split, settings.neighbors)
    num_layers, width = source.shape
    num_classes = int(labels.max()) + 1
    head: AttentiveProbes | LinearProbes
    if kind == "attentive":
        head = AttentiveProbes(num_layers, width, num_classes, heads=settings.heads, seed=settings.seed)
    else:
        head = LinearProbes(num_layers, width, num_classes, seed=settings.seed)
    fitted = train_probes(head.to(device), source, labels, split, settings=settings, progress=progress)
    right = predict(head, source, split.test, batch_size=settings.batch_size) == labels[split.test]
    return right, fitted.best_accuracy, fitted.best_epoch


def _probe_neighbors(
    source: TokenSource, labels: Tensor, split: Split, neighbors: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(source, CachedTokens) or source.states.shape[2] != 1:
        raise OptionError("`source` must be CachedTokens with one token per example for kind='knn'.")
    vectors = source.states[:, :, 0]
    train = split.train.to(vectors.device)
    classes = labels.to(vectors.device)

    def is_right(index: Tensor) -> Tensor:
        index = index.to(vectors.device)
        predicted = nearest_classes(vectors[:, train], classes[train], vectors[:, index], neighbors=neighbors)
        return (predicted == classes[index]).cpu()

    validation = is_right(split.validation).double().mean(dim=1)
    return is_right(split.test), validation, torch.zeros(len(vectors), dtype=torch.int64)


def _checked_examples(
    inputs: Sequence[Any],
    labels: Sequence[Hashable],
    test_inputs: Sequence[Any],
    test_labels: Sequence[Hashable],
    seed: int,
) -> tuple[list[Any], Tensor, Split, list[str]]:
    """Return all examples, their classes, the split and the class names, or raise an :class:`OptionError`."""
    inputs = check_list("inputs", inputs, "examples")
    labels = label_list("labels", labels)
    test_inputs = check_list("test_inputs", test_inputs, "examples", minimum=0)
    test_labels = label_list("test_labels", test_labels)
    for name, num_inputs, num_labels in (
        ("labels", len(inputs), len(labels)),
        ("test_labels", len(test_inputs), len(test_labels)),
    ):
        if num_inputs != num_labels:
            raise OptionError(f"`{name}` must have one class for each of {num_inputs} examples, but got {num_labels}.")
    unknown = sorted(set(map(str, test_labels)) - set(map(str, labels)))
    if unknown:
        raise OptionError(f"`test_labels` must be among `labels`, but {unknown[0]!r} is not.")
    classes, names = class_numbers([*labels, *test_labels])
    split = split_examples(classes, names=names, num_test=len(test_labels), seed=seed)
    return [*inputs, *test_inputs], classes, split, names
