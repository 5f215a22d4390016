"""What the callbacks of every trainer share: options, the probe, the history, and what happens when a probe fails."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from midlayer_encoders._types import Layer, Norm, Pooling
from midlayer_encoders.callbacks._backbone import find_backbone, model_name, module_path
from midlayer_encoders.callbacks._cadence import EveryNSteps, make_cadence
from midlayer_encoders.callbacks._history import History
from midlayer_encoders.callbacks._inputs import Passes, loaded_passes, text_passes
from midlayer_encoders.callbacks._probe import Probe, Values
from midlayer_encoders.callbacks._settings import probe_settings
from midlayer_encoders.callbacks._undisturbed import isolated_generators
from midlayer_encoders.errors import OptionError
from midlayer_encoders.measuring import make_for_views, num_views
from midlayer_encoders.models.anatomy import find_anatomy, resolve_layers
from midlayer_encoders.selection.ridge import check_labels

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

__all__ = ["Recorder"]

_log = logging.getLogger("midlayer_encoders")


class Recorder:
    """Measures every layer of a model in training at chosen steps, and keeps what it finds.

    The run is bit for bit the same with and without it: fixed inputs, no gradients, modes, buffers and random
    generators put back, compiled modules run as written.

    Args:
        texts_or_dataloader: the probe: texts, or batches of a model's inputs (dicts of tensors). Of a dataloader the
            first ``max_inputs`` are taken, once.
        tokenizer: of the texts.
        metrics: ``"paper"``, ``"all"``, one name or several.
        layers: ``"all"`` or some.
        every_n_steps: optimizer steps between two looks, a list of steps, or ``"log2"``: 1, 2, 4, 8 …
        module: path of the transformer in what is trained; ``"auto"`` takes the one there is.
        blocks: path of the list of blocks within it, where it cannot be found by rule.
        norm: of the pooled vectors; ``"none"`` is the paper's.
        pooling: how token states become one vector.
        views: number of views of each text for LiDAR (InfoNCE and DiME take the first two), or the views themselves:
            V lists of texts, or V dataloaders. Made once.
        labels: class of each input; adds ``label_accuracy``, the cross-validated accuracy of a ridge classifier.
        seed: of the views and of the labels' folds.
        max_length: tokens after which a text of the probe is cut off.
        max_inputs: inputs taken of a dataloader.
        token_budget: tokens in a batch of texts.
        figures: whether to draw heat maps and curves at the end.
        dirpath: folder of ``history.parquet`` and the figures; by default beside the run's logs.
        name: prefix of what is logged, and of the files' folder; another for a second callback in one run.
        strict: whether an error inside the probe stops the run; else it is logged once and the run goes on.
    """

    def __init__(
        self,
        texts_or_dataloader: Sequence[str] | Iterable[Any],
        tokenizer: Any = None,
        *,
        metrics: str | Sequence[str] = "paper",
        layers: Sequence[Layer] | str = "all",
        every_n_steps: EveryNSteps = "log2",
        module: str = "auto",
        blocks: str | None = None,
        norm: Norm = "none",
        pooling: Pooling = "mean",
        views: int | Sequence[Any] = 2,
        labels: Sequence[int | str] | None = None,
        seed: int = 0,
        max_length: int = 64,
        max_inputs: int = 256,
        token_budget: int = 16384,
        figures: bool = True,
        dirpath: str | Path | None = None,
        name: str = "midlayer",
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.cadence = make_cadence(every_n_steps)
        self.name, self.figures, self.strict, self.seed = name, figures, strict, seed
        self._inputs, self._tokenizer, self._views = texts_or_dataloader, tokenizer, views
        self._metrics, self._layers, self._module, self._blocks = metrics, layers, module, blocks
        self._norm, self._pooling, self._labels = norm, pooling, labels
        self._max_length, self._max_inputs, self._token_budget = max_length, max_inputs, token_budget
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._begin()
        if metrics:
            make_for_views(metrics, [0], views if isinstance(views, int) else len(views))  # a wrong name is said now

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was found so far, as rows of the tidy frame."""
        return [] if self._history is None else self._history.rows()

    @property
    def frame(self) -> pl.DataFrame:
        """What was found so far: the tidy frame, its ``revision`` naming the step."""
        if self._history is None:
            raise OptionError("There is no frame before the run began: train first.")
        return self._history.frame()

    # --- before the run -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Forget the run before: a callback may serve several."""
        self._probe: Probe | None = None
        self._history: History | None = None
        self._restored: dict[str, Any] | None = None
        self._warned = False

    def _prepare(self, root: nn.Module, tokenizer: Any = None) -> None:
        """Find the transformer, make the probe's inputs once, and refuse what cannot work."""
        model = find_backbone(root, self._module)
        anatomy = find_anatomy(model, blocks=self._blocks)
        layers = resolve_layers(self._layers, anatomy.num_layers, name=model_name(model))
        given = self._views if isinstance(self._views, int) else len(self._views)
        needed = num_views(make_for_views(self._metrics, layers, given)) if self._metrics else 0
        if not isinstance(self._views, int) and len(self._views) < needed:
            raise OptionError(f"`views` must hold {needed} views for these metrics, but got {len(self._views)}.")
        with isolated_generators():
            passes = self._passes(model, tokenizer if self._tokenizer is None else self._tokenizer, needed)
        labels = self._checked_labels(sum(len(batch.positions) for batch in passes[0]))
        self._probe = Probe(
            passes, anatomy, layers, self._metrics, views=given, norm=self._norm, pooling=self._pooling,
            labels=labels, seed=self.seed,
        )  # fmt: skip
        settings = probe_settings(self._probe, module_path(root, model))
        self._history = History(model_name(model), anatomy.num_layers, layers, "probe", settings)
        if self._restored is not None:
            self._resume(self._restored)

    def _passes(self, model: nn.Module, tokenizer: Any, needed: int) -> Passes:
        inputs: Any = self._inputs
        if isinstance(inputs, str):
            raise OptionError("`texts_or_dataloader` must be a list of texts, but got one text: write `[text]`.")
        if isinstance(inputs, Sequence) and (not inputs or isinstance(inputs[0], str)):
            views: Any = self._views if not isinstance(self._views, int) else self._augmented(inputs, needed)
            return text_passes(
                inputs, views[:needed], tokenizer, model, max_length=self._max_length, token_budget=self._token_budget
            )
        if isinstance(self._views, int) and needed:
            raise OptionError(
                "`views` must be given, a dataloader for each, where the probe is a dataloader and a metric compares "
                "views (InfoNCE, LiDAR, DiME). Pass them, texts instead, or other `metrics`."
            )
        loaders = [] if isinstance(self._views, int) else list(self._views)[:needed]
        passes = loaded_passes([inputs, *loaders], model, max_inputs=self._max_inputs)
        counts = {sum(len(batch.positions) for batch in batches) for batches in passes}
        if len(counts) > 1:
            raise OptionError(f"`views` must give as many inputs as the probe, but the numbers are {sorted(counts)}.")
        return passes

    def _augmented(self, texts: Sequence[str], needed: int) -> list[list[str]]:
        if not needed:
            return []
        from midlayer_encoders.views.texts import augment

        return augment(texts, views=needed, seed=self.seed)

    def _checked_labels(self, count: int) -> torch.Tensor | None:
        if self._labels is None:
            return None
        classes = {label: number for number, label in enumerate(dict.fromkeys(self._labels))}
        labels = torch.tensor([classes[label] for label in self._labels])
        if len(labels) != count:
            raise OptionError(f"`labels` must be one for each of the probe's {count} inputs, but got {len(labels)}.")
        check_labels(labels)
        return labels

    def _resume(self, state: dict[str, Any]) -> bool:
        """Take up the history of the run before; return whether some of it was measured in another way, and is not."""
        if self._history is None:
            return False
        others = self._history.resume(state, due=self.cadence.due)
        if others:
            _log.warning(
                "%s: the history of the run before is taken up without what was measured in another way: %s.",
                self.name,
                "; ".join(others),
            )
        return bool(others)

    # --- during the run -----------------------------------------------------------------------------------------------

    def _wants(self, step: int) -> bool:
        """Return whether to look after ``step`` steps: it is due, and was not looked at before."""
        return self.cadence.due(step) and not self._has(step)

    def _has(self, step: int) -> bool:
        return self._history is not None and self._history.has(step)

    def _look(self, root: nn.Module, step: int, autocast: AbstractContextManager[object]) -> Values | None:
        """Measure the model as it is now and keep it; return ``None`` where the probe failed."""
        if self._probe is None or self._history is None:
            return None
        try:
            values = self._probe.measure(find_backbone(root, self._module), autocast)
        except Exception as error:
            self._failed(error, step)
            return None
        self._history.add(step, values, due=self.cadence.due(step))
        return values

    def _failed(self, error: Exception, step: int) -> None:
        if self.strict:
            raise error
        if not self._warned:
            _log.exception(
                "%s failed at step %d; the run goes on, and later failures are not logged. "
                "Pass strict=True to stop instead.",
                type(self).__name__,
                step,
            )
        self._warned = True

    def _log_values(self, values: Values) -> dict[str, float]:
        """Return values by the names under which they are logged: ``midlayer/curvature/layer_07``."""
        layers = self._probe.layers if self._probe is not None else ()
        return {
            f"{self.name}/{name}/layer_{layer:02d}": value
            for name, many in values.items()
            for layer, value in zip(layers, many, strict=True)
            if value == value
        }

    # --- files --------------------------------------------------------------------------------------------------------

    def _write(self, folder: Path) -> None:
        if self._history is not None and self._history.steps:
            try:
                self._history.write(folder / "history.parquet")
            except Exception as error:
                self._failed(error, max(self._history.steps))

    def _draw(self, folder: Path) -> dict[str, Figure]:
        """Draw the history and return the figures by name; none where there is nothing to draw."""
        if not self.figures or self._history is None or not self._history.steps:
            return {}
        try:
            from midlayer_encoders.report.steps import plot_steps_curves, plot_steps_heat

            frame = self._history.frame()
            drawn = {"heat": plot_steps_heat(frame), "curves": plot_steps_curves(frame)}
            for name, figure in drawn.items():
                figure.savefig(folder / f"{name}.png", dpi=110)
        except Exception as error:
            self._failed(error, max(self._history.steps))
            return {}
        return drawn
