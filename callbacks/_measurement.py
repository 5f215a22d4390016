"""A measurement: find the transformer, batch fixed inputs, and compute every metric of every layer in training."""

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from midlayer_encoders._isolation import isolated_random, limit_cores
from midlayer_encoders._types import MIN_MEASURED_TOKENS
from midlayer_encoders.errors import AnatomyError, MidlayerError, NotFiniteError, OptionError
from midlayer_encoders.metrics import LayerMetric
from midlayer_encoders.metrics.eigen import without_kernels
from midlayer_encoders.metrics.feeding import compute_metrics, num_copies, num_views, token_receiver, update_views
from midlayer_encoders.metrics.label_accuracy import check_labels, ridge_correct
from midlayer_encoders.metrics.text_views import drop_words
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy, resolve_layers
from midlayer_encoders.models.transformers_internals import input_embeddings, without_cache
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.reading.capture import sharded_modules
from midlayer_encoders.reading.reader import LayerReader

from ._settings import CallbackSettings
from ._sharded import pass_device, passes_together

_NOT_MODEL_INPUTS = {"labels", "label", "decoder_input_ids", "return_dict", "output_hidden_states"}


@dataclass(frozen=True)
class InputBatch:
    """A batch of inputs and views for the model.

    Attributes:
        positions: ascending positions of the rows in the list of all inputs, followed by their shortened copies if a
            metric needs them, all first views, and so on.
        inputs: keyword arguments of the model's forward.
    """

    positions: list[int]
    inputs: dict[str, Tensor]


# --- the transformer --------------------------------------------------------------------------------------------------


def find_backbone(root: nn.Module, path: str = "auto") -> nn.Module:
    """Return the transformer inside ``root``.

    Args:
        root: a LightningModule, a SentenceTransformer, or the model itself.
        path: path of the transformer inside ``root``; ``"auto"`` returns the only Hugging Face model.

    Raises:
        AnatomyError: if there is no such module, or if ``"auto"`` finds no model or several.
    """
    models = hugging_face_models(root)
    if path != "auto":
        try:
            return root.get_submodule(path)
        except AttributeError:
            raise AnatomyError(
                f"`module` must be the path of a module in {type(root).__name__}, but it has no {path!r}. "
                f"Its transformers are: {_listed(models) or 'none'}."
            ) from None
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        raise AnatomyError(
            f"{type(root).__name__} holds {len(models)} transformers: {_listed(models)}. "
            "Pass the path of one as `module`."
        )
    lists = {name: list_ for name, list_ in root.named_modules() if isinstance(list_, nn.ModuleList | nn.Sequential)}
    raise AnatomyError(
        f"{type(root).__name__} holds no Hugging Face model. Its lists of modules are: {_listed(lists) or 'none'}. "
        "Pass the path of the transformer as `module` and of its list of blocks, within it, as `blocks`."
    )


def hugging_face_models(root: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost Hugging Face models by path, including compiled and wrapped ones."""
    models: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        is_nested = any(name.startswith(f"{outer}.") or not outer for outer in models)
        if isinstance(module, PreTrainedModel) and not is_nested:
            models[name] = module
    return models


def _listed(modules: Mapping[str, nn.Module]) -> str:
    return ", ".join(f"{name!r} ({type(module).__name__})" for name, module in modules.items())


def _input_names(model: nn.Module) -> set[str] | None:
    """Return the names of the forward's arguments, or ``None`` if it accepts any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) and not getattr(model, "config", None):
        return None
    return {parameter.name for parameter in parameters}


# --- batches ----------------------------------------------------------------------------------------------------------


def make_batches(settings: CallbackSettings, model: nn.Module, tokenizer: Any) -> tuple[list[InputBatch], int]:
    """Return batches of the inputs, copies and views that the metrics need, and the number of inputs.

    The states of the global random generators do not change.

    Args:
        settings: options of the callback.
        model: the transformer.
        tokenizer: the trainer's tokenizer, used if the settings have none.
    """
    inputs = settings.texts_or_dataloader
    views = settings.views
    metrics = settings.make_metrics([0])
    num_needed = num_views(metrics)
    if not isinstance(views, int) and len(views) < num_needed:
        raise OptionError(f"`views` must hold {num_needed} views for these metrics, but got {len(views)}.")
    with isolated_random():
        if isinstance(inputs, Sequence) and (not inputs or isinstance(inputs[0], str)):
            tokenizer = tokenizer if settings.tokenizer is None else settings.tokenizer
            return _text_batches(settings, metrics, model, tokenizer), len(inputs)
        num_read = max(num_needed, num_copies(metrics))  # the first view replaces the shortened copies of texts
        if num_read and not (isinstance(views, Sequence) and views):
            raise OptionError(
                "`views` must be given, a dataloader for each, where the inputs are a dataloader and a metric compares "
                "views (InfoNCE, LiDAR, DiME, Alignment). Pass them, texts instead, or other `metrics`."
            )
        loaders = [inputs] if isinstance(views, int) else [inputs, *views[:num_read]]
        passes = [_read_loader(loader, model, settings.max_inputs, view) for view, loader in enumerate(loaders, -1)]
        passes = [passes[0], *passes[1 : 1 + num_copies(metrics)], *passes[1 : 1 + num_needed]]
    counts = [sum(len(batch.positions) for batch in batches) for batches in passes]
    if len(set(counts)) > 1:
        raise OptionError(f"`views` must give one view for each input, but the numbers are {sorted(set(counts))}.")
    return [
        InputBatch([view * counts[0] + position for position in batch.positions], batch.inputs)
        for view, batches in enumerate(passes)
        for batch in batches
    ], counts[0]


def class_indices(labels: Sequence[int | str], count: int) -> Tensor:
    """Return the class of each of ``count`` inputs as an index, in order of first appearance."""
    classes = list(dict.fromkeys(labels))
    indices = torch.tensor([classes.index(label) for label in labels])
    if len(indices) != count:
        raise OptionError(f"`labels` must be one for each of the {count} inputs, but got {len(indices)}.")
    check_labels(indices)
    return indices


def _text_batches(
    settings: CallbackSettings, metrics: Mapping[str, LayerMetric], model: nn.Module, tokenizer: Any
) -> list[InputBatch]:
    """Return the texts, the copies and all views that metrics need as batches of token ids."""
    texts: Any = settings.texts_or_dataloader
    if tokenizer is None:
        raise OptionError("`tokenizer` must be given with texts. Pass the model's, or a dataloader instead of texts.")
    if not texts:
        raise OptionError("`texts_or_dataloader` must hold texts or batches, but got none.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise OptionError(f"`texts` must hold only strings, but `texts[{index}]` is a {type(text).__name__}.")
    _check_vocabulary(tokenizer, model)
    views: Any = settings.views
    num_needed = num_views(metrics)
    if isinstance(views, int):
        views = settings.augment(num_needed) if num_needed else []
    for number, view in enumerate(views[:num_needed]):
        if isinstance(view, str) or len(view) != len(texts):
            raise OptionError(
                f"`views` must be lists of {len(texts)} texts, one for each text, but view {number} is not."
            )
    copies = [drop_words(texts, seed=settings.seed)] if num_copies(metrics) else []
    tokenized = [
        tokenizer(list(view), truncation=True, max_length=settings.max_length, verbose=False)["input_ids"]
        for view in (texts, *copies, *views[:num_needed])
    ]
    long_enough = sum(len(ids) >= MIN_MEASURED_TOKENS for ids in tokenized[0])
    if long_enough < 2:
        raise OptionError(
            f"`texts` must hold at least 2 texts of {MIN_MEASURED_TOKENS} tokens or more, but {long_enough} of "
            f"{len(texts)} are. Add longer texts."
        )
    rows = [ids for view in tokenized for ids in view]
    plan = plan_batches([max(len(ids), 1) for ids in rows], token_budget=settings.token_budget)
    names = _input_names(model)
    return [
        InputBatch(positions, _padded([rows[position] for position in positions], tokenizer, names))
        for positions in map(sorted, plan)
    ]


def _check_vocabulary(tokenizer: Any, model: nn.Module) -> None:
    num_rows = getattr(input_embeddings(model), "num_embeddings", None)
    if num_rows is not None and len(tokenizer) > num_rows:
        raise OptionError(
            f"`tokenizer` must be the model's, but it has {len(tokenizer)} tokens and the embedding {num_rows} rows. "
            "Pass the tokenizer that the model is trained with, or resize the embedding."
        )


def _padded(rows: list[list[int]], tokenizer: Any, names: set[str] | None) -> dict[str, Tensor]:
    """Return a batch padded on the right, where the position ids of every model family are correct."""
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    longest = max(1, *map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    mask = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
    tensors = {"input_ids": ids, "attention_mask": mask.long()}
    return {name: tensor for name, tensor in tensors.items() if names is None or name in names}


def _read_loader(loader: Iterable[Any], model: nn.Module, max_inputs: int, view: int) -> list[InputBatch]:
    """Return the first inputs of a dataloader in the dataloader's own batches."""
    batches: list[InputBatch] = []
    num_read = 0
    for loaded in loader:
        inputs = _model_inputs(loaded, model)
        count = min(len(next(iter(inputs.values()))), max_inputs - num_read)
        if count <= 0:
            break
        copies = {name: tensor[:count].detach().cpu().clone() for name, tensor in inputs.items()}
        batches.append(InputBatch(list(range(num_read, num_read + count)), copies))
        num_read += count
    if num_read < 2:
        source = "the dataloader" if view < 0 else f"view {view}"
        raise OptionError(f"`texts_or_dataloader` must give at least 2 inputs, but {source} gave {num_read}.")
    return batches


def _model_inputs(loaded: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a dataloader's batch that the model accepts, by name."""
    names = _input_names(model)
    first_parameter = next(iter(inspect.signature(model.forward).parameters), "input_ids")
    main = str(getattr(model, "main_input_name", first_parameter))
    if isinstance(loaded, list | tuple) and loaded and isinstance(loaded[0], Tensor | Mapping):
        loaded = loaded[0]  # (inputs, labels)
    if isinstance(loaded, Tensor):
        loaded = {main: loaded}
    if isinstance(loaded, Mapping):
        tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor) and value.ndim}
        accepted = {n: v for n, v in tensors.items() if n not in _NOT_MODEL_INPUTS and (names is None or n in names)}
        if main in accepted:
            return accepted
    received = list(loaded) if isinstance(loaded, Mapping) else type(loaded).__name__
    raise OptionError(
        f"`texts_or_dataloader` must be texts, or a dataloader of dicts of tensors with {main!r}, which "
        f"{type(model).__name__} takes, but it gave {received}. Give its `collate_fn` those names."
    )


#: The value of each layer by metric; NaN if a layer has none.
MetricValues = dict[str, dict[int, float]]

#: Name of the cross-validated accuracy of a ridge classifier on a layer's vectors.
LABEL_ACCURACY = "label_accuracy"

#: Up to this sum over layers of cubed text lengths, the CPU computes the spectra, in about 0.1 s.
#:
#: On a machine's first run, compiling the GPU kernels takes longer than hundreds of steps of a small model.
_MAX_CPU_SPECTRA = 2**29

#: Up to this size of the token states, a thread computes the metrics on the CPU while the GPU trains.
_MAX_COPIED_BYTES = 2**28


class OtherProcessError(MidlayerError, RuntimeError):
    """The measurement failed in another process of a distributed run."""


@dataclass(frozen=True)
class Measurement:
    """Fixed inputs and the metrics to compute on them.

    Attributes:
        settings: options of the callback.
        model: name of the transformer in the frame.
        module: path of the transformer in the trained module.
        anatomy: anatomy of the transformer.
        layers: ascending layer numbers.
        batches: batches of the inputs and of each view.
        count: number N of inputs.
        labels: class of each input, shape ``(N,)``, or ``None``.
    """

    settings: CallbackSettings
    model: str
    module: str
    anatomy: Anatomy
    layers: Sequence[int]
    batches: list[InputBatch]
    count: int
    labels: Tensor | None
    _metrics: dict[str, LayerMetric] = field(default_factory=dict, init=False, repr=False)

    def measure(self, root: nn.Module, autocast: AbstractContextManager[object]) -> Future[MetricValues]:
        """Return every metric of every layer, and leave the model unchanged.

        The states of few and short texts are copied from a GPU: the CPU computes their metrics while training
        continues. The next measurement must wait for them.

        In a distributed run all processes must call this method. Each process runs a share of the batches, and all of
        them return the same values. With sharded weights all processes must make as many passes, because each pass
        gathers the weights from all.

        Args:
            root: the trained module.
            autocast: the context of the run's own forward passes.
        """
        model = find_backbone(root, self.settings.module)
        device = pass_device(model)
        # The inputs are already tokenized, so `dict` replaces the preprocessing.
        reader = LayerReader(model, dict, self.anatomy, self.layers, self.settings.norm, self.settings.pooling)
        on_cpu = self._computes_on_cpu(model)
        copies: list[tuple[int, Tensor, Tensor, list[int]]] = []
        passed: list[tuple[list[int], list[Tensor]]] = []
        vectors_by_position: dict[int, Tensor] = {}

        def copy_tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
            texts = slice(bisect_left(positions, self.count))  # without their views
            copies.append((layer, _host_copy(states[texts]), _host_copy(mask[texts]), positions[texts]))

        with undisturbed(model), ExitStack() as stack:
            metrics = stack.enter_context(self._empty_metrics(torch.device("cpu") if on_cpu else device))
            receive = token_receiver(metrics, self.count)
            tokens = copy_tokens if on_cpu and receive is not None else receive
            with (
                _fail_together(device) as check,
                autocast,
                self._spectra_device(),
                passes_together(root, model, check) as run_pass,
            ):
                for batch, repeated in self._share(even=bool(sharded_modules(root))):
                    inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
                    receiver = None if repeated else tokens
                    read = partial(reader.read, without_cache(model, inputs), batch.positions, tokens=receiver)
                    vectors = run_pass(read)
                    if repeated:
                        continue
                    passed.append((batch.positions, list(map(_host_copy, vectors)) if on_cpu else vectors))
                    if self.labels is not None:
                        inputs_only = batch.positions[: bisect_left(batch.positions, self.count)]
                        vectors_by_position.update(zip(inputs_only, torch.stack(vectors, dim=1), strict=False))
            copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            emptied = stack.pop_all()

        def compute() -> MetricValues:
            if copied is not None:
                copied.synchronize()
            with emptied, torch.no_grad(), self._spectra_device():
                with _fail_together(device):
                    for arguments in copies:
                        receive(*arguments)  # type: ignore[misc]
                    for positions, vectors in passed:
                        update_views(metrics, self.layers, vectors, positions, self.count)
                metric_values = compute_metrics(metrics)
            if self.labels is not None:
                metric_values[LABEL_ACCURACY] = self._label_accuracy(vectors_by_position, self.labels)
            return metric_values

        values: Future[MetricValues] = Future()
        if on_cpu:
            # The other half of the cores serves the run.
            pool = ThreadPoolExecutor(1, initializer=limit_cores, initargs=((1 + torch.get_num_threads()) // 2,))
            values = pool.submit(compute)
            pool.shutdown(wait=False)
        else:
            values.set_result(compute())
        return values

    def _share(self, *, even: bool) -> list[tuple[InputBatch, bool]]:
        """Return the batches of this process, each with whether it is only repeated to make the numbers ``even``."""
        num_processes = _num_processes()
        share = [(batch, False) for batch in self.batches[dist.get_rank() if num_processes > 1 else 0 :: num_processes]]
        if even and len(share) < len(self.batches[::num_processes]):
            share.append((self.batches[0], True))
        return share

    def _computes_on_cpu(self, model: nn.Module) -> bool:
        """Return True if a model on one GPU reads so few and short texts that its states may be copied."""
        devices = {parameter.device for parameter in model.parameters()}
        width = max((module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)), default=0)
        num_states = self.count * len(self.layers) * self._longest
        return (
            0 < num_states * self._longest**2 <= _MAX_CPU_SPECTRA
            and 0 < 4 * num_states * width <= _MAX_COPIED_BYTES
            and (len(devices), devices.pop().type, _num_processes()) == (1, "cuda", 1)
        )

    def _spectra_device(self) -> AbstractContextManager[None]:
        """Return a context that bypasses the GPU kernels if the texts are few and short."""
        use_cpu = 0 < self.count * len(self.layers) * self._longest**3 <= _MAX_CPU_SPECTRA
        return without_kernels() if use_cpu else nullcontext()

    @property
    def _longest(self) -> int:
        """Number of tokens of the longest text; ``0`` if the inputs are no texts."""
        return max(batch.inputs["input_ids"].shape[1] if "input_ids" in batch.inputs else 0 for batch in self.batches)

    @contextmanager
    def _empty_metrics(self, device: torch.device) -> Iterator[dict[str, LayerMetric]]:
        """Yield empty metrics; they are created once because that takes as long as a forward pass of a small model."""
        if not self._metrics:
            self._metrics.update(self.settings.make_metrics(self.layers))
        for metric in self._metrics.values():
            if metric.device != device:  # `to` is slow even if the states are already there
                metric.to(device)
        try:
            yield self._metrics
        except BaseException:
            self._metrics.clear()  # an error in `compute` leaves them with the states of all processes
            raise
        for metric in self._metrics.values():
            metric.reset()

    def _label_accuracy(self, vectors: dict[int, Tensor], labels: Tensor) -> dict[int, float]:
        """Return the accuracy of each layer from the vectors, shape ``(L, D)`` by position, of all processes."""
        if _num_processes() > 1:
            gathered: list[dict[int, Tensor]] = [{} for _ in range(_num_processes())]
            dist.all_gather_object(gathered, {position: vector.cpu() for position, vector in vectors.items()})
            vectors = {position: vector for part in gathered for position, vector in part.items()}
        stacked = torch.stack([vectors[position] for position in sorted(vectors)], dim=1).cpu()
        if not bool(stacked.isfinite().all()):
            layer = self.layers[int((~stacked.isfinite().flatten(1).all(dim=1)).nonzero()[0])]
            raise NotFiniteError(f"Layer {layer} gives NaN or infinity for the callback's inputs.")
        accuracy = ridge_correct(stacked, labels, seed=self.settings.seed).double().mean(dim=1)
        return dict(zip(self.layers, accuracy.tolist(), strict=True))


def make_measurement(settings: CallbackSettings, root: nn.Module, tokenizer: Any = None) -> Measurement:
    """Find the transformer in the trained module, prepare the inputs, and validate both.

    Args:
        settings: options of the callback.
        root: the trained module.
        tokenizer: the trainer's tokenizer, used if the settings have none.
    """
    model = find_backbone(root, settings.module)
    anatomy = find_anatomy(model, blocks=settings.blocks)
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__.removeprefix("FSDP"))
    layers = resolve_layers(settings.layers, anatomy.num_layers, name=name)
    batches, count = make_batches(settings, model, tokenizer)
    labels = None if settings.labels is None else class_indices(settings.labels, count)
    path = next(path for path, module in root.named_modules() if module is model)
    module = ".".join(part for part in path.split(".") if part != "_orig_mod")  # of `torch.compile`
    return Measurement(settings, name, module, anatomy, layers, batches, count, labels)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run ``model`` in eval mode without gradients or compilation, then restore its state.

    Restored are the mode of each module (some may be frozen in eval mode), buffers that a module updates or replaces
    during a forward pass (such as growing rotary tables), and the global random generators. This uses ``no_grad``
    rather than ``inference_mode`` because training may use a tensor that a module caches here.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    # Compiled modules run eagerly, so that other input shapes do not trigger recompilation.
    with isolated_random(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU; from a GPU it arrives later."""
    return tensor.to("cpu", copy=True, non_blocking=True)


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def _fail_together(device: torch.device) -> Iterator[Callable[[], None]]:
    """Raise in every process if one fails; the others would wait for it forever.

    Yields a function that raises in every process if one has failed since the last call, and that all must call.
    """

    def check(failed: bool = False) -> None:
        if _num_processes() > 1:
            flag = torch.tensor(int(failed), device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag and not failed:
                raise OtherProcessError("The measurement failed in another process; its log has the trace.")

    try:
        yield check
    except OtherProcessError:
        raise
    except BaseException:
        check(failed=True)
        raise
    check()
