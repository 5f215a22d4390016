"""Probe every layer of a frozen encoder."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders import validation
from midlayer_encoders._types import Layer, Progress
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import NotFiniteError, OptionError, short_repr
from midlayer_encoders.extras.probing.classifiers import PROBE_KINDS, AttentiveProbes, LinearProbes, ProbeKind
from midlayer_encoders.extras.probing.probe_result import ProbeResult
from midlayer_encoders.extras.probing.token_states import LiveTokens, TokenSource, read_tokens, read_vectors
from midlayer_encoders.extras.settings import UNUSED_SETTINGS, ProbeSettings
from midlayer_encoders.metrics.label_accuracy import class_numbers, label_folds, label_list
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader

_FOLDS = 5  # one tests, one chooses the epoch, the others train


@dataclass(frozen=True)
class Split:
    """Positions of the examples that train, choose the epoch, and test, each a tensor in ascending order."""

    train: Tensor
    validation: Tensor
    test: Tensor


def split_examples(labels: Tensor, *, names: Sequence[str] = (), num_test: int = 0, seed: int = 0) -> Split:
    """Return which examples train, choose the epoch and test; every class is spread over the three evenly.

    Args:
        labels: classes from ``0``, shape ``(N,)``.
        names: of the classes, for error messages.
        num_test: number of test examples at the end; ``0`` tests on a fifth of each class.
        seed: for the split.

    Example:
        >>> split = split_examples(torch.arange(20) % 2)
        >>> len(split.train), len(split.validation), len(split.test)
        (12, 4, 4)
    """
    positions = torch.arange(len(labels))
    num_train = len(labels) - num_test
    least = 2 if num_test else 3
    for number, count in enumerate(labels[:num_train].bincount(minlength=len(names)).tolist()):
        if count < least:
            raise OptionError(
                f"`labels` must have at least {least} examples of each class, to train, choose and test, but "
                f"{names[number] if names else number!r} has {count}. Add examples, or leave the class out."
            )
    fold = label_folds(labels[:num_train], folds=_FOLDS, seed=seed)
    is_held_out = fold == 1 if num_test else fold <= 1
    test = positions[num_train:] if num_test else positions[fold == 0]
    return Split(positions[:num_train][~is_held_out], positions[:num_train][fold == 1], test)


def train_probes(
    head: nn.Module,
    source: TokenSource,
    labels: Tensor,
    split: Split,
    *,
    settings: ProbeSettings,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Train the probes of all layers in place; each ends with the weights of its best epoch.

    The loss is the sum of the layers' losses, so no layer's gradient depends on another layer, and AdamW updates every
    weight independently: each probe becomes what it would have become alone.

    Args:
        head: probes of as many layers as ``source`` has; trained on its device.
        source: tokens of every layer.
        labels: classes from ``0`` of all examples, shape ``(N,)``.
        split: which examples train and choose the epoch.
        settings: of the training.
        progress: called after each epoch, with the stage ``"training"``.

    Returns:
        For each layer, the validation accuracy at its best epoch, and that epoch, from ``1``; shape ``(L,)`` each.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
    )
    steps = settings.epochs * math.ceil(len(split.train) / settings.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    num_layers = next(head.parameters()).shape[0]
    best_accuracy = torch.full((num_layers,), -1.0, dtype=torch.float64)
    best_loss = torch.full((num_layers,), math.inf, dtype=torch.float64)
    lowest_loss = best_loss.clone()
    best_epoch = torch.zeros(num_layers, dtype=torch.int64)
    last_improvement = best_epoch.clone()
    best_weights = {name: weights.clone() for name, weights in head.state_dict().items()}
    for epoch in range(1, settings.epochs + 1):
        head.train()
        order = split.train[torch.randperm(len(split.train), generator=generator)]
        for index in torch.split(order, settings.batch_size):
            optimizer.zero_grad()
            _, losses = _forward(head, source, labels, index)
            losses.mean(dim=1).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        accuracy, loss = evaluate(head, source, labels, split.validation, settings.batch_size).double().mean(dim=2)
        if not bool(loss.isfinite().all()):
            raise NotFiniteError(
                f"The probe of layer number {int((~loss.isfinite()).nonzero()[0])} of the requested layers has the "
                f"loss {float(loss[~loss.isfinite()][0])}. Try a smaller `learning_rate`, or check the model's states."
            )
        active = epoch - last_improvement <= settings.patience
        higher = accuracy > best_accuracy
        better = active & (higher | ((accuracy == best_accuracy) & (loss < best_loss)))
        # A small data set has few steps per epoch: its loss may fall long before its accuracy rises.
        improved = active & (higher | (loss < lowest_loss))
        last_improvement[improved] = epoch
        lowest_loss[improved] = torch.minimum(loss, lowest_loss)[improved]
        for name, weights in head.state_dict().items():
            best_weights[name][better] = weights[better]
        best_accuracy[better] = accuracy[better]
        best_loss[better] = loss[better]
        best_epoch[better] = epoch
        if progress is not None:
            progress("training", epoch, settings.epochs)
        if not bool((epoch - last_improvement < settings.patience).any()):
            break
    head.load_state_dict(best_weights)
    head.eval()
    return best_accuracy, best_epoch


def _forward(head: nn.Module, source: TokenSource, labels: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each layer is correct about each example, and its loss, both of shape ``(L, B)``."""
    device = next(head.parameters()).device
    logits = head(*(tensor.to(device) for tensor in source.batch(index)))
    targets = labels[index].to(device)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.repeat(len(logits)), reduction="none")
    return logits.argmax(dim=-1) == targets, losses.view(logits.shape[:2])


@torch.no_grad()
def evaluate(head: nn.Module, source: TokenSource, labels: Tensor, index: Tensor, batch_size: int) -> Tensor:
    """Return whether each layer is correct about the examples at ``index``, and its loss, ``(2, L, M)``, on the CPU."""
    head.eval()
    parts = [torch.stack(_forward(head, source, labels, part)) for part in torch.split(index, batch_size)]
    return torch.cat(parts, dim=2).cpu()


def probe(
    encoder: LayerEncoder,
    inputs: Sequence[Any],
    labels: Sequence[Hashable],
    *,
    kind: ProbeKind = "attentive",
    layers: Sequence[Layer] | str = "all",
    test_inputs: Sequence[Any] = (),
    test_labels: Sequence[Hashable] = (),
    settings: ProbeSettings | None = None,
    dataset: str = "examples",
    progress: Progress | None = None,
) -> ProbeResult:
    """Return the accuracy by layer of probes on a frozen model's tokens, all layers from one forward pass.

    ``"attentive"`` trains attentive pooling and a linear classifier on each layer's tokens, as in El-Nouby et al.
    (2024), and ``"linear"`` a linear classifier on their mean. The probes of all layers train together, and each
    becomes what it would have become alone.

    Args:
        encoder: with the whole model, ``LayerEncoder(model, layer=-1)``.
        inputs: texts, images or audio, as the encoder takes them.
        labels: the class of each input, at least two classes.
        kind: of the probe.
        layers: ``"all"`` or a list.
        test_inputs: examples to test on; without them, a fifth of each class is held out.
        test_labels: their classes.
        settings: of the training, see :class:`~midlayer_encoders.extras.probing.ProbeSettings`.
        dataset: name of the examples in the result.
        progress: called with the stages ``"reading"`` and ``"training"``.
    """
    validation.check_choice("kind", kind, PROBE_KINDS)
    settings = settings or ProbeSettings()
    reason, unused = UNUSED_SETTINGS[kind]
    validation.check_effect(
        ProbeSettings, f"with kind={kind!r}, which {reason}", **{name: getattr(settings, name) for name in unused}
    )
    validation.check_text("dataset", dataset)
    validation.check_progress(progress)
    if not hasattr(encoder, "anatomy"):
        raise OptionError(f"`encoder` must be a LayerEncoder, but got {short_repr(encoder)}.")
    examples, all_labels = _labeled_examples(inputs, labels, test_inputs, test_labels)
    classes, names = class_numbers(all_labels)
    split = split_examples(classes, names=names, num_test=len(test_labels), seed=settings.seed)
    reader = layer_reader(encoder, layers=layers, prompt=encoder.default_prompt, normalize=False)
    live = LiveTokens(reader, examples)
    batches = batches_of(encoder, examples, prompt=encoder.default_prompt)

    source: TokenSource = (
        read_tokens(live, batches, keep_gb=settings.keep_gb, progress=progress)
        if kind == "attentive"
        else read_vectors(live, batches, progress=progress)
    )
    right, best_accuracy, best_epochs = probe_tokens(
        source, classes, split, kind=kind, settings=settings, progress=progress, device=encoder.device
    )
    spec = encoder.spec
    return ProbeResult(
        model=spec.model,
        revision=spec.revision or "default",
        num_layers=spec.num_layers,
        layers=tuple(reader.layers),
        kind=kind,
        dataset=dataset,
        classes=names,
        right=right,
        validation=best_accuracy,
        epochs=best_epochs,
        chance=float(classes[split.test].bincount().max()) / len(split.test),
        num_train=len(split.train),
        source=encoder.source,
        options=None if encoder.in_memory or isinstance(encoder.layers, Mapping) else encoder.options,
    )


def _labeled_examples(
    inputs: Sequence[Any], labels: Sequence[Hashable], test_inputs: Sequence[Any], test_labels: Sequence[Hashable]
) -> tuple[list[Any], list[Any]]:
    """Return all examples, the test's last, and their labels; raise if they do not match."""
    inputs = validation.check_list("inputs", inputs, "examples")
    labels = label_list("labels", labels)
    test_inputs = validation.check_list("test_inputs", test_inputs, "examples", minimum=0)
    test_labels = label_list("test_labels", test_labels)
    for name, rows, row_labels in (("labels", inputs, labels), ("test_labels", test_inputs, test_labels)):
        if len(rows) != len(row_labels):
            raise OptionError(
                f"`{name}` must have one class for each of {len(rows)} examples, but got {len(row_labels)}."
            )
    if unknown := sorted(set(map(str, test_labels)) - set(map(str, labels))):
        raise OptionError(f"`test_labels` must be among `labels`, but {unknown[0]!r} is not.")
    return [*inputs, *test_inputs], [*labels, *test_labels]


def probe_tokens(
    source: TokenSource,
    labels: Tensor,
    split: Split,
    *,
    kind: ProbeKind = "attentive",
    settings: ProbeSettings | None = None,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which test examples each layer has right ``(L, M)``, validation accuracy ``(L,)`` and epochs ``(L,)``.

    Use it to probe a model that no encoder holds.

    Args:
        source: tokens of every layer.
        labels: classes from ``0`` of all examples, shape ``(N,)``.
        split: which examples train, choose the epoch and test.
        kind: of the probe.
        settings: of the training.
        progress: called after each epoch, with the stage ``"training"``.
        device: to train on.
    """
    settings = settings or ProbeSettings()
    num_layers, width = source.shape
    num_classes = int(labels.max()) + 1
    head: AttentiveProbes | LinearProbes = LinearProbes(num_layers, width, num_classes, seed=settings.seed)
    if kind == "attentive":
        head = AttentiveProbes(num_layers, width, num_classes, heads=settings.heads, seed=settings.seed)
    best = train_probes(head.to(device), source, labels, split, settings=settings, progress=progress)
    return evaluate(head, source, labels, split.test, settings.batch_size)[0].bool(), *best
