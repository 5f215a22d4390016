"""``probe``: how well each layer's frozen tokens tell labeled examples apart."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from midlayer_encoders._types import Layer, Norm, Progress, ReadSite
from midlayer_encoders.errors import OptionError, short_repr, warn_deprecated
from midlayer_encoders.frame import at_site
from midlayer_encoders.measuring import agreed
from midlayer_encoders.probing.heads import KINDS, AttentiveProbes, Kind, LinearProbes
from midlayer_encoders.probing.nearest import nearest_classes
from midlayer_encoders.probing.probe_result import ProbeResult
from midlayer_encoders.probing.settings import WITHOUT_EFFECT, ProbeTraining
from midlayer_encoders.probing.splits import Split, chance_level, split_examples
from midlayer_encoders.probing.tokens import (
    KeptTokens,
    LiveTokens,
    TokenSource,
    read_tokens,
    read_vectors,
)
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.selection.mixture import Mixture, mixture_on_test
from midlayer_encoders.selection.ridge import class_numbers, equal_steps, label_list
from midlayer_encoders.validation import (
    check_choice,
    check_count,
    check_effect,
    check_flag,
    check_list,
    check_number,
    check_progress,
    check_text,
)

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["MOST_EXAMPLES", "probe", "probe_tokens"]

MOST_EXAMPLES = 2000
"""Training examples that a mixture is learned from: of more, those at equal steps."""


def probe(
    encoder: LayerEncoder,
    inputs: Sequence[Any],
    labels: Sequence[Hashable],
    *,
    kind: Kind = "attentive",
    layers: Sequence[Layer] | str = "all",
    test_inputs: Sequence[Any] = (),
    test_labels: Sequence[Hashable] = (),
    norm: Norm | None = None,
    site: ReadSite = "block",
    mixture: bool = False,
    epochs: int = 30,
    patience: int = 5,
    batch_size: int = 256,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.1,
    heads: int | None = None,
    neighbors: int = 20,
    keep_gb: float = 4.0,
    seed: int = 0,
    dataset: str = "examples",
    progress: Progress | None = None,
    neighbours: int | None = None,
) -> ProbeResult:
    """Return the accuracy by layer of probes on a frozen model's tokens, all layers from one forward pass.

    ``"attentive"`` trains an attentive pooling and a linear classifier on each layer's tokens, as El-Nouby et al.
    (2024) do, ``"linear"`` a linear classifier on their mean, and ``"knn"`` asks the nearest training examples. The
    probes of all layers train together, and each becomes what it would have become alone.

    Args:
        encoder: with the whole model, ``LayerEncoder(model, layer=-1)``; texts, images or waveforms as it takes them.
        inputs: the examples.
        labels: the class of each, at least two classes.
        kind: of the probe.
        layers: ``"all"`` or some.
        test_inputs: examples to test on; where there are none, a fifth of each class is held out for it.
        test_labels: their classes.
        norm: the encoder's; another is an error.
        site: ``"block"``, or ``"attention"`` or ``"mlp"``: what these add in each block, from layer 1 up. The result's
            revision names it, as ``"default:mlp"``.
        mixture: also learn a mean of layers from the training examples, by their pooled vectors, and score it beside
            the best layer alone, both under a ridge classifier; see ``ProbeResult.mixture``.
        epochs: at the most.
        patience: epochs without a better accuracy or loss on validation examples after which a layer is done.
        batch_size: examples in a step.
        learning_rate: of AdamW, at the first step.
        weight_decay: of AdamW.
        heads: of the attentive pooling; ``None`` takes one for each 64 dimensions.
        neighbors: of ``"knn"``.
        keep_gb: memory for tokens, in half precision; if they need more, every epoch passes the examples through the
            model again.
        seed: of split, weights and order.
        dataset: what the result calls the examples.
        progress: called with the stages ``"reading"`` and ``"training"``.
        neighbours: deprecated, the old spelling of ``neighbors``.
    """
    if neighbours is not None:
        warn_deprecated("`neighbours` is spelled `neighbors` now; the old spelling is removed in 0.3.")
        neighbors = neighbours
    check_choice("kind", kind, KINDS)
    given: dict[str, Any] = {
        "heads": heads, "neighbors": neighbors, "keep_gb": keep_gb, "epochs": epochs, "patience": patience,
        "batch_size": batch_size, "learning_rate": learning_rate, "weight_decay": weight_decay,
    }  # fmt: skip
    why, unused = WITHOUT_EFFECT[kind]
    check_effect(probe, f"with kind={kind!r}, which {why}", **{name: given[name] for name in unused})
    training = ProbeTraining(
        epochs=epochs, patience=patience, batch_size=batch_size, learning_rate=learning_rate,
        weight_decay=weight_decay, seed=seed,
    )  # fmt: skip
    heads, mixture = None if heads is None else check_count("heads", heads), check_flag("mixture", mixture)
    neighbors, keep_gb = check_count("neighbors", neighbors, "neighbors"), check_number("keep_gb", keep_gb)
    check_text("dataset", dataset)
    check_progress(progress)
    if not hasattr(encoder, "anatomy"):
        raise OptionError(f"`encoder` must be a LayerEncoder, but got {short_repr(encoder)}.")
    agreed("norm", norm, encoder.norm)
    everything, classes, split, names = _examples(inputs, labels, test_inputs, test_labels, seed)
    reader = layer_reader(encoder, layers=layers, prompt=encoder.default_prompt, site=site)
    source = _read(encoder, LiveTokens(reader, everything), kind, keep_gb, progress)
    right, validation, best = probe_tokens(
        source, classes, split, kind=kind, training=training, heads=heads, neighbors=neighbors, progress=progress,
        device=encoder.device,
    )  # fmt: skip
    learned = _mixture(encoder, LiveTokens(reader, everything), source, classes, split, seed) if mixture else None
    of = at_site(encoder.spec, site)
    return ProbeResult(
        model=of.model, revision=of.revision or "default", num_layers=of.num_layers, layers=tuple(reader.layers),
        kind=kind, dataset=dataset, classes=names, right=right, validation=validation, epochs=best,
        chance=chance_level(classes, split), num_train=len(split.train), mixture=learned,
    )  # fmt: skip


def probe_tokens(
    source: TokenSource,
    labels: Tensor,
    split: Split,
    *,
    kind: Kind = "attentive",
    training: ProbeTraining | None = None,
    heads: int | None = None,
    neighbors: int = 20,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which test examples each layer has right ``(L, M)``, validation accuracy ``(L,)`` and epochs ``(L,)``.

    What :func:`probe` does once the tokens are there; for models that no encoder holds.

    Args:
        source: gives the tokens of every layer.
        labels: classes from ``0`` of all examples, shape ``(N,)``.
        split: which examples train, choose and test.
        kind: of the probe.
        training: how it is trained.
        heads: of the attentive pooling.
        neighbors: of ``"knn"``, which needs :class:`KeptTokens` of one token each.
        progress: called after each epoch, with the stage ``"training"``.
        device: to train on.
    """
    if kind == "knn":
        return _nearest(source, labels, split, neighbors)
    from midlayer_encoders.probing.fitting import predict, train_probes

    given = training or ProbeTraining()
    num_layers, width = source.shape
    classes = int(labels.max()) + 1
    head = (
        AttentiveProbes(num_layers, width, classes, heads=heads, seed=given.seed)
        if kind == "attentive"
        else LinearProbes(num_layers, width, classes, seed=given.seed)
    ).to(device)
    trained = train_probes(
        head, source, labels, train=split.train, validation=split.validation, training=given, progress=progress
    )
    right = predict(head, source, split.test, batch_size=given.batch_size) == labels[split.test]
    return right, trained.best_accuracy, trained.best_epoch


def _read(
    encoder: LayerEncoder, live: LiveTokens, kind: Kind, keep_gb: float, progress: Progress | None
) -> TokenSource:
    """Return what the probes see: all tokens, or one vector of each example, pooled as the encoder pools."""
    batches = batches_of(encoder, live.inputs, prompt=encoder.default_prompt)
    if kind == "attentive":
        return read_tokens(live, batches, keep_gb=keep_gb, progress=progress)
    return read_vectors(live, batches, progress=progress)


def _mixture(
    encoder: LayerEncoder, live: LiveTokens, source: TokenSource, labels: Tensor, split: Split, seed: int
) -> Mixture:
    """Return a mean of layers learned from the examples that train and choose, scored on those that test."""
    if not isinstance(source, KeptTokens) or source.states.shape[2] != 1:  # the tokens, not their vectors
        source = read_vectors(live, batches_of(encoder, live.inputs, prompt=encoder.default_prompt))
    train = torch.cat([split.train, split.validation]).sort().values
    some = train[equal_steps(len(train), MOST_EXAMPLES)]
    return mixture_on_test(source.states[:, :, 0], labels, some, split.test, live.reader.layers, seed=seed)


def _nearest(source: TokenSource, labels: Tensor, split: Split, neighbors: int) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(source, KeptTokens) or source.states.shape[2] != 1:
        raise OptionError("`source` must be KeptTokens of one token an example for kind='knn'.")
    vectors, known = source.states[:, :, 0], split.train.to(source.states.device)
    classes = labels.to(vectors.device)

    def right(index: Tensor) -> Tensor:
        index = index.to(vectors.device)
        named = nearest_classes(vectors[:, known], classes[known], vectors[:, index], neighbors=neighbors)
        return (named == classes[index]).cpu()

    validation = right(split.validation).double().mean(dim=1)
    return right(split.test), validation, torch.zeros(len(vectors), dtype=torch.int64)


def _examples(
    inputs: Sequence[Any],
    labels: Sequence[Hashable],
    test_inputs: Sequence[Any],
    test_labels: Sequence[Hashable],
    seed: int,
) -> tuple[list[Any], Tensor, Split, list[str]]:
    """Return all examples, their classes, the split and the classes' names, or raise what is wrong with them."""
    inputs, labels = check_list("inputs", inputs, "examples"), label_list("labels", labels)
    test_inputs = check_list("test_inputs", test_inputs, "examples", minimum=0)
    test_labels = label_list("test_labels", test_labels)
    for name, some, theirs in (("labels", inputs, labels), ("test_labels", test_inputs, test_labels)):
        if len(some) != len(theirs):
            raise OptionError(f"`{name}` must have one class for each of {len(some)} examples, but got {len(theirs)}.")
    unknown = sorted(set(map(str, test_labels)) - set(map(str, labels)))
    if unknown:
        raise OptionError(f"`test_labels` must be among `labels`, but {unknown[0]!r} is not.")
    classes, names = class_numbers([*labels, *test_labels])
    split = split_examples(classes, names=names, num_test=len(test_labels), seed=seed)
    return [*inputs, *test_inputs], classes, split, names
