"""A measurement: find the transformer, batch fixed inputs, and compute every metric of every layer in training."""

import hashlib
import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from midlayer_encoders._isolation import isolated_random, limit_cores
from midlayer_encoders._types import MIN_MEASURED_TOKENS, content_digest
from midlayer_encoders.errors import AnatomyError, MidlayerError, NotFiniteError, OptionError
from midlayer_encoders.metrics.eigen import without_kernels
from midlayer_encoders.metrics.feeding import compute_metrics, num_copies, num_views, token_receiver, update_views
from midlayer_encoders.metrics.label_accuracy import check_labels, class_numbers, ridge_correct
from midlayer_encoders.metrics.text_views import drop_words
from midlayer_encoders.models.anatomy import find_anatomy, resolve_layers
from midlayer_encoders.models.transformers_internals import input_embeddings, without_cache
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.reading.capture import sharded_modules
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.validation import check_texts

from ._settings import CallbackSettings, layer_metrics, make_views
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
    models: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        is_nested = any(name.startswith(f"{outer}.") or not outer for outer in models)
        if isinstance(module, PreTrainedModel) and not is_nested:  # compiled and wrapped ones, too
            models[name] = module
    if path == "auto" and len(models) == 1:
        return next(iter(models.values()))
    modules: dict[str, nn.Module] = dict(root.named_modules())
    if path in modules:
        return modules[path]
    lists = {name: list_ for name, list_ in modules.items() if isinstance(list_, nn.ModuleList | nn.Sequential)}
    raise AnatomyError(
        f"`module` must be the path of the transformer in {type(root).__name__}, but got {path!r}. Its Hugging Face "
        f"models are: {_list_modules(models)}. Another transformer also needs `blocks`, the path of its blocks within "
        f"it; the lists of modules are: {_list_modules(lists)}."
    )


def _list_modules(modules: Mapping[str, nn.Module]) -> str:
    return ", ".join(f"{name!r} ({type(module).__name__})" for name, module in modules.items()) or "none"


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
    with isolated_random():
        if isinstance(inputs, Sequence) and (not inputs or isinstance(inputs[0], str)):
            return _text_batches(settings, model, settings.tokenizer or tokenizer), len(inputs)
        return _loader_batches(settings, model)


def _loader_batches(settings: CallbackSettings, model: nn.Module) -> tuple[list[InputBatch], int]:
    """Return the batches of dataloaders, and the number of inputs."""
    views = [] if isinstance(settings.views, int) else settings.views
    metrics = layer_metrics(settings, [0])
    num_read = max(num_views(metrics), num_copies(metrics))  # the first view replaces the shortened copies of texts
    if len(views) < num_read:
        raise OptionError(
            f"`views` must hold {num_read} dataloaders where the inputs are a dataloader and a metric compares views "
            "(InfoNCE, LiDAR, DiME, Alignment). Pass them, texts instead, or other `metrics`."
        )
    loaders = [settings.texts_or_dataloader, *views[:num_read]]
    passes = [_read_loader(loader, model, settings.max_inputs, view) for view, loader in enumerate(loaders, -1)]
    passes = [passes[0], *passes[1 : 1 + num_copies(metrics)], *passes[1 : 1 + num_views(metrics)]]
    counts = [sum(len(batch.positions) for batch in batches) for batches in passes]
    if len(set(counts)) > 1:
        raise OptionError(f"`views` must give one view for each input, but the numbers are {sorted(set(counts))}.")
    return [
        InputBatch([view * counts[0] + position for position in batch.positions], batch.inputs)
        for view, batches in enumerate(passes)
        for batch in batches
    ], counts[0]


def _text_batches(settings: CallbackSettings, model: nn.Module, tokenizer: Any) -> list[InputBatch]:
    """Return the texts, the copies and all views that metrics need as batches of token ids."""
    texts = check_texts("texts_or_dataloader", settings.texts_or_dataloader)
    if tokenizer is None:
        raise OptionError("`tokenizer` must be given with texts. Pass the model's, or a dataloader instead of texts.")
    _check_vocabulary(tokenizer, model)
    metrics = layer_metrics(settings, [0])
    count = num_views(metrics)
    views: Any = settings.views
    if isinstance(views, int):
        views = make_views(texts, count, settings.seed) if count else []
    if len(views) < count or any(isinstance(view, str) or len(view) != len(texts) for view in views[:count]):
        raise OptionError(f"`views` must hold {count} lists of {len(texts)} texts, one for each text.")
    copies = [drop_words(texts, seed=settings.seed)] if num_copies(metrics) else []
    tokenized = [
        tokenizer(list(view), truncation=True, max_length=settings.max_length, verbose=False)["input_ids"]
        for view in (texts, *copies, *views[:count])
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
        InputBatch(positions, _pad_rows([rows[position] for position in positions], tokenizer, names))
        for positions in map(sorted, plan)
    ]


def _check_vocabulary(tokenizer: Any, model: nn.Module) -> None:
    num_rows = getattr(input_embeddings(model), "num_embeddings", None)
    if num_rows is not None and len(tokenizer) > num_rows:
        raise OptionError(
            f"`tokenizer` must be the model's, but it has {len(tokenizer)} tokens and the embedding {num_rows} rows. "
            "Pass the tokenizer that the model is trained with, or resize the embedding."
        )


def _pad_rows(rows: list[list[int]], tokenizer: Any, names: set[str] | None) -> dict[str, Tensor]:
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


class Measurement:
    """Fixed inputs and the metrics to compute on them.

    Args:
        settings: options of the callback.
        root: the trained module, in which the transformer is found.
        tokenizer: the trainer's tokenizer, used if the settings have none.

    Attributes:
        model: name of the transformer in the frame.
        module: path of the transformer in the trained module.
        anatomy: anatomy of the transformer.
        layers: ascending layer numbers.
        batches: batches of the inputs and of each view.
        count: number N of inputs.
        labels: class of each input, shape ``(N,)``, or ``None``.
    """

    def __init__(self, settings: CallbackSettings, root: nn.Module, tokenizer: Any = None) -> None:
        self.settings = settings
        model = find_backbone(root, settings.module)
        self.anatomy = find_anatomy(model, blocks=settings.blocks)
        name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__.removeprefix("FSDP")
        self.model = str(name)
        self.layers = resolve_layers(settings.layers, self.anatomy.num_layers, name=self.model)
        self.batches, self.count = make_batches(settings, model, tokenizer)
        self.labels = None if settings.labels is None else class_numbers(settings.labels)[0]
        if self.labels is not None and len(self.labels) != self.count:
            raise OptionError(f"`labels` must be one for each of the {self.count} inputs, but got {len(self.labels)}.")
        if self.labels is not None:
            check_labels(self.labels)
        path = next(path for path, module in root.named_modules() if module is model)
        self.module = ".".join(part for part in path.split(".") if part != "_orig_mod")  # of `torch.compile`

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The settings that determine the values, so that a resumed run can tell whether it may continue them."""
        return {
            "module": self.module,
            "blocks": self.anatomy.blocks,
            "layers": list(self.layers),
            "metrics": list(layer_metrics(self.settings, self.layers)),
            "norm": self.settings.norm,
            "pooling": self.settings.pooling,
            "seed": self.settings.seed,
            "labels": None if self.labels is None else self.labels.tolist(),
            "inputs": _inputs_digest(self.batches),
        }

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
        metrics = layer_metrics(self.settings, self.layers)
        for metric in metrics.values() if not on_cpu and device.type != "cpu" else ():
            metric.to(device)
        receive = token_receiver(metrics, self.count)
        copies: list[tuple[int, Tensor, Tensor, list[int]]] = []
        passed: list[tuple[list[int], list[Tensor]]] = []

        def copy_tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
            texts = slice(bisect_left(positions, self.count))  # without their views
            copies.append((layer, _host_copy(states[texts]), _host_copy(mask[texts]), positions[texts]))

        tokens = copy_tokens if on_cpu and receive is not None else receive
        with (
            leave_unchanged(model),
            _fail_together(device) as check,
            autocast,
            self._spectra_device(),
            passes_together(root, model, check) as run_pass,
        ):
            share = self.batches[_rank() :: _num_processes()]
            if sharded_modules(root) and len(share) < len(self.batches[:: _num_processes()]):
                share.append(InputBatch([], self.batches[0].inputs))  # as many passes as the other processes
            for batch in share:
                inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
                read = partial(reader.read, without_cache(model, inputs), batch.positions, tokens=tokens)
                vectors = run_pass(read)
                if batch.positions:
                    passed.append((batch.positions, list(map(_host_copy, vectors)) if on_cpu else vectors))
        copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def compute() -> MetricValues:
            if copied is not None:
                copied.synchronize()
            with torch.no_grad(), self._spectra_device():
                with _fail_together(device):
                    for arguments in copies:
                        receive(*arguments)  # type: ignore[misc]
                    for positions, vectors in passed:
                        update_views(metrics, self.layers, vectors, positions, self.count)
                values = compute_metrics(metrics)
            if self.labels is not None:
                values[LABEL_ACCURACY] = self._label_accuracy(passed, self.labels)
            return values

        values: Future[MetricValues] = Future()
        if on_cpu:
            # The other half of the cores serves the run.
            pool = ThreadPoolExecutor(1, initializer=limit_cores, initargs=((1 + torch.get_num_threads()) // 2,))
            values = pool.submit(compute)
            pool.shutdown(wait=False)
        else:
            values.set_result(compute())
        return values

    def _computes_on_cpu(self, model: nn.Module) -> bool:
        """Return True if a model on one GPU reads so few and short texts that its states may be copied."""
        devices = {parameter.device for parameter in model.parameters()}
        width = max((module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)), default=0)
        num_bytes = 4 * self.count * len(self.layers) * self._longest * width
        is_small = self._has_small_spectra and 0 < num_bytes <= _MAX_COPIED_BYTES
        return is_small and (len(devices), devices.pop().type, _num_processes()) == (1, "cuda", 1)

    def _spectra_device(self) -> AbstractContextManager[None]:
        """Return a context that bypasses the GPU kernels if the texts are few and short."""
        return without_kernels() if self._has_small_spectra else nullcontext()

    @property
    def _has_small_spectra(self) -> bool:
        return 0 < self.count * len(self.layers) * self._longest**3 <= _MAX_CPU_SPECTRA

    @property
    def _longest(self) -> int:
        """Number of tokens of the longest text; ``0`` if the inputs are no texts."""
        return max(batch.inputs["input_ids"].shape[1] if "input_ids" in batch.inputs else 0 for batch in self.batches)

    def _label_accuracy(self, passed: list[tuple[list[int], list[Tensor]]], labels: Tensor) -> dict[int, float]:
        """Return the accuracy of each layer from the vectors of each pass, for each layer ``(B, D)``."""
        vectors: dict[int, Tensor] = {}  # of each input, shape (L, D)
        for positions, by_layer in passed:
            inputs_only = positions[: bisect_left(positions, self.count)]
            vectors.update(zip(inputs_only, torch.stack(by_layer, dim=1).cpu(), strict=False))
        if _num_processes() > 1:
            gathered: list[dict[int, Tensor]] = [{} for _ in range(_num_processes())]
            dist.all_gather_object(gathered, vectors)
            vectors = {position: vector for part in gathered for position, vector in part.items()}
        stacked = torch.stack([vectors[position] for position in sorted(vectors)], dim=1)
        for layer, layer_vectors in zip(self.layers, stacked, strict=True):
            if not layer_vectors.isfinite().all():
                raise NotFiniteError(f"Layer {layer} gives NaN or infinity for the callback's inputs.")
        accuracy = ridge_correct(stacked, labels, seed=self.settings.seed).double().mean(dim=1)
        return dict(zip(self.layers, accuracy.tolist(), strict=True))


def _inputs_digest(batches: Sequence[InputBatch]) -> str:
    """Return a digest of the inputs, their copies and views, in order and without padding."""
    rows: dict[int, bytes] = {}
    for batch in batches:
        for row, position in enumerate(batch.positions):
            inputs = {name: tensor[row] for name, tensor in sorted(batch.inputs.items())}
            mask = inputs.get("attention_mask")
            digest = hashlib.sha256()
            for name, value in inputs.items():
                if mask is not None and value.shape[:1] == mask.shape:
                    value = value[mask.bool()]
                raw = value.reshape(-1).contiguous().view(torch.uint8)  # NumPy has no bfloat16
                digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode() + raw.numpy().tobytes())
            rows[position] = digest.digest()
    return content_digest(b"".join(rows[position] for position in sorted(rows)), 8)


@contextmanager
def leave_unchanged(model: nn.Module) -> Iterator[None]:
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


def _rank() -> int:
    return dist.get_rank() if _num_processes() > 1 else 0


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
