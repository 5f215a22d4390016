"""Run vLLM in its own environment and pool the states of its layers; started by :mod:`midlayer_encoders.reading.vllm`.

:func:`main` reads requests from a socket and answers with vectors. Of this package it imports only modules that need
no more than torch and transformers, which vLLM installs.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock

from midlayer_encoders.reading.pooling import NormForm, pool

_MAX_STEPS = 100  # after the last text, in which vLLM hands on its states; it takes two

_vectors: dict[int, Tensor] = {}  # of the texts of a request, ``(R, L, D)`` each; vLLM runs in this process


def _norm_of(settings: dict[str, Any] | None, device: torch.device) -> NormForm:
    if settings is None:
        return NormForm(None)
    module = nn.Module()
    for name, weight in load_file(settings["weights"], device=str(device)).items():
        module.register_buffer(name, weight)
    return NormForm(module, settings["center"], settings["offset"], settings["eps"])


class _Read:
    """Tells vLLM that the states of a text were read, so that it can free them."""

    def query(self) -> bool:
        return True


class PoolingConnector(stock.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Keeps one vector per layer and reading of each text, instead of writing the states of every token.

    The stock connector copies the states through pinned memory, which needs a GPU.
    """

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        settings = self._kv_transfer_config.get_from_extra_config("norm", None)
        self._norms = {"none": NormForm(None), "final": _norm_of(settings, self._kv_cache.device)}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        delayed, parameters = super().request_finished(request, block_ids)
        if delayed:
            self._pending_saves[request.request_id].reading = request.kv_transfer_params
        return delayed, parameters

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten().to(self._kv_cache.device)
        states = stock.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))  # (T, L, D)
        _vectors[pending.reading["text"]] = self._pool(states, **pending.reading)
        self._req_copy_events[pending.req_id] = _Read()

    def _pool(self, states: Tensor, norm: str, poolings: list[Any], masks: list[str], **_: Any) -> Tensor:
        """Return the vector of each reading and layer, shape ``(R, L, D)`` float32 on the CPU."""
        layers = self._norms[norm].normalized(states).transpose(0, 1)
        readings = []
        for pooling, mask in zip(poolings, masks, strict=True):
            pooled = torch.tensor([character == "1" for character in mask], device=layers.device)
            readings.append(pool(layers, pooled.expand(len(layers), -1), pooling))
        return torch.stack(readings).float().cpu()


def _start(folder: str, layers: list[int], norm: dict[str, Any] | None, **options: Any) -> LLM:
    return LLM(
        folder,
        **options,
        # States of a prefix that an earlier text computed would depend on the order of texts.
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=True,
        seed=0,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        kv_transfer_config={
            "kv_connector": "PoolingConnector",
            "kv_connector_module_path": __name__,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"norm": norm, "use_synchronization_lock": False},
        },
    )


def _read(model: LLM, ids: list[list[int]], masks: list[list[str]], norm: str, poolings: list[str]) -> Tensor:
    """Return the vectors of texts, shape ``(N, R, L, D)``."""
    _vectors.clear()
    parameters = [
        SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args={"kv_transfer_params": {"text": text, "norm": norm, "poolings": poolings, "masks": text_masks}},
        )
        for text, text_masks in enumerate(masks)
    ]
    model.generate([{"prompt_token_ids": text_ids} for text_ids in ids], parameters, use_tqdm=False)
    for _ in range(_MAX_STEPS):
        if len(_vectors) == len(ids):
            return torch.stack([_vectors[text] for text in range(len(ids))])
        model.llm_engine.step()
    raise RuntimeError(f"vLLM gave the states of {len(_vectors)} of {len(ids)} texts")


def main(descriptor: int) -> None:
    """Start vLLM as the first message says, and read the texts of each later one, until the caller ends."""
    connection = Connection(descriptor)
    try:
        model = _start(**connection.recv())
        connection.send({})
        while True:
            vectors = _read(model, **connection.recv())
            connection.send({"shape": tuple(vectors.shape), "vectors": vectors.numpy().tobytes()})
    except EOFError:
        pass  # the caller has ended
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}"})
        raise
