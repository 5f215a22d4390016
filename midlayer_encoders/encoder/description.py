"""Describe modules and processors in memory as JSON, so that a digest shows whatever changes their results."""

import dis
import inspect
import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedTokenizerBase, ProcessorMixin

from midlayer_encoders._types import content_digest
from midlayer_encoders.encoder.digests import COPIED, read_settings, tensor_checksum, weights_digest
from midlayer_encoders.models.transformers_internals import is_recording_hook, is_remote

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Compilation sets the last three; `_compile_kwargs` is from Lightning, which wraps `torch.compile`.
_TORCH_ATTRIBUTES = vars(nn.Module()).keys() | {"_compiled_call_impl", "_is_torch_compile", "_compile_kwargs"}
# Attributes that follow from the inputs so far, or from the device.
_STATE = re.compile(
    r"cached?$|^_?cached?_(sequence|rotary|moses|get|decode|token|dict|key)|_seen|_issued|_length_mapping|^_hf_"
    r"|hf_device_map|_old_forward|_installed$|^deprecation_"
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial, type)
_METHODS = (FunctionType, property, classmethod, staticmethod)
_VALUES = (bool, int, float, str, list, tuple, dict, set, frozenset, np.ndarray, Tensor, *_FUNCTIONS)


class Description:
    """Describes values as JSON has them: equal in every process, without addresses, places and names of releases.

    Code of installed packages is described by its name; other code by its source and by the variables that it uses.

    Args:
        encoder: values refer to its modules by name.
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._modules: dict[int, Any] = {id(module): module for module in encoder.modules()}
        # The values are kept, because another could get the address of one that is gone.
        self._seen = dict(self._modules)

    def parts(self) -> dict[str, str]:
        """Return a digest of the code, settings and hooks of each module, config and processor, by its path.

        Modules are described, not identified by their vectors of a probe: a probe does not reach every path (such as a
        window longer than its input), and its digits change with the device and the number of threads.
        """
        parts = {path: self._module(module) for path, module in self._encoder.named_modules()}
        parts |= {f"processor {number}": self.processor(each) for number, each in enumerate(processors(self._encoder))}
        parts["config"] = self._config(getattr(self._encoder.transformer, "config", None))
        return {path: content_digest(json.dumps(part, sort_keys=True)) for path, part in parts.items()}

    def processor(self, processor: Any) -> Any:
        """Describe a tokenizer, a processor of images or audio, a processor that holds several, or a function."""
        saved: Any = None if isinstance(processor, PreTrainedTokenizerBase) else getattr(processor, "to_dict", dict)()
        return [self._settings(processor), self(saved)]

    def _config(self, config: Any) -> Any:
        if not hasattr(config, "to_dict"):
            return self(config)
        settings = config.to_dict() if is_remote(config) else read_settings(config.to_dict())
        return [self(type(config)), self(settings)]

    def code(self) -> Any:
        """Describe own classes of the modules, the config and the processors, and own functions in installed ones."""
        configs = [getattr(module, "config", None) for module in self._modules.values()]
        kinds = {*map(type, [*self._modules.values(), *processors(self._encoder), *configs])}
        classes = {base for kind in kinds if _is_installed(kind) for base in kind.__mro__ if _is_installed(base)}
        owners: set[Any] = classes | {sys.modules[owner.__module__] for owner in classes}
        code: dict[str, Any] = {kind.__qualname__: kind for kind in kinds}
        for owner in owners:
            functions = (item for item in vars(owner).items() if isinstance(item[1], FunctionType | partial))
            code |= {f"{owner.__name__}.{name}": function for name, function in functions}
        code |= {
            f"{interface.__name__}.{name}": interface()[name]
            for name in {getattr(config, "_attn_implementation", None) for config in configs}
            for interface in (AttentionInterface, AttentionMaskInterface)
            if name in interface()
        }
        return self._variables(
            {name: item for name, item in code.items() if isinstance(item, partial) or not _is_installed(item)}
        )

    def hooks(self, owner: Any, prefix: str = "") -> Any:
        """Describe the hooks of a module, or of all modules, that can change its output."""
        hooks = [getattr(owner, f"{prefix}_forward_{kind}").values() for kind in ("hooks", "pre_hooks")]
        return self([hook for kind in hooks for hook in kind if not is_recording_hook(hook)])

    def _module(self, module: nn.Module) -> Any:
        # Dynamic rotary embeddings replace their frequencies at each pass.
        dynamic = getattr(module, "rope_type", "") in ("dynamic", "longrope")
        names = () if dynamic else module._non_persistent_buffers_set
        buffers = {name: getattr(module, name) for name in names if not _STATE.search(name)}
        if module is self._encoder:  # its settings are in its spec, but not methods that were replaced
            own = [item for item in vars(module).items() if item[0] not in _TORCH_ATTRIBUTES]
            settings = self({n: item for n, item in own if hasattr(type(module), n) and isinstance(item, _FUNCTIONS)})
        else:
            settings = self._settings(module)
        return [settings, self(buffers), self.hooks(module)]

    def _settings(self, owner: Any) -> Any:
        """Describe the class and attributes of a module or processor; if it is installed, plain ones and own code."""
        self._seen = dict(self._modules)
        own = not _is_installed(type(owner))
        settings = {
            name: value
            for name, value in vars(owner).items()
            if name not in _TORCH_ATTRIBUTES
            and not _STATE.search(name)
            and (own or isinstance(value, _VALUES) or not _is_installed(type(value)))
        }
        return [self(type(owner)), self._variables(settings) if own else self(settings)]

    def _variables(self, values: Mapping[str, Any]) -> Any:
        """Describe attributes or variables of own code; unlike settings of a copied model, all of them count."""
        return [[name, self(value)] for name, value in sorted(values.items())]

    def __call__(self, value: Any) -> Any:
        """Describe any value."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case Mapping():
                return {str(name): self(entry) for name, entry in value.items() if name not in COPIED}
            case list() | tuple():
                return [self(entry) for entry in value]
            case set() | frozenset():
                return sorted(map(str, value))
            case Tensor():
                return [str(value.dtype), list(value.shape), tensor_checksum(value)]
            case np.ndarray():
                return self(value.tolist())
            case SimpleNamespace():
                return self._variables(vars(value))
            case MethodType():
                return [self(value.__func__), self(value.__self__)]
            case property():
                return self(value.fget)
            case classmethod() | staticmethod():
                return self(value.__func__)
            case Tokenizer():
                state = value.to_str()
                return content_digest(state[state.index('"added_tokens":') :], 16)  # after the padding of the last call
            case partial():
                return [self(value.func), self(value.args), self(value.keywords)]
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """Describe a function, a class, a module or an instance of a class; the second time by its name alone."""
        code = value if isinstance(value, ModuleType) or hasattr(value, "__qualname__") else type(value)
        name = getattr(code, "__qualname__", code.__name__)
        if id(value) in self._seen:
            return name
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            return [name, weights_digest(value), [self._settings(module) for module in value.modules()]]
        if code is not value and hasattr(code, "__array__"):  # the text of a table is an excerpt
            return [name, self(np.asarray(value))]
        if _is_installed(code):
            return [getattr(code, "__module__", ""), name] if code is value else [name, _text(value)]
        if isinstance(value, FunctionType):
            used = {
                name: value.__globals__[name] for name in _global_names(value.__code__) if name in value.__globals__
            }
            variables = (value.__kwdefaults__ or {}, inspect.getclosurevars(value).nonlocals, used)
            return [name, _instructions(code.__code__), self(value.__defaults__), *map(self._variables, variables)]
        if isinstance(value, type):
            used = {
                name: entry
                for name, entry in vars(value).items()
                if isinstance(entry, _METHODS) or (isinstance(entry, _VALUES) and not name.startswith("__"))
            }
            return [name, self(value.__bases__), self._variables(used)]
        if isinstance(value, ModuleType):
            return [name, inspect.getsource(value) if getattr(value, "__file__", None) else ""]
        if code is value:  # a function in C
            return name
        state = _state(value)
        return [self(code), self._variables(state) if isinstance(state, dict) else self(state)]


def processors(encoder: Any) -> list[Any]:
    """Return the processor of an encoder, and the tokenizer and others inside it."""
    processor = encoder[0].processor
    inside = processor.get_attributes() if isinstance(processor, ProcessorMixin) else []
    return [processor, *(getattr(processor, name) for name in inside)]


def vocabulary(tokenizer: Any) -> Any:
    """Return the vocabulary of a tokenizer, and all steps from a text to its tokens."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or hasattr(tokenizer, "backend_tokenizer"):
        return getattr(tokenizer, "backend_tokenizer", None)
    with TemporaryDirectory() as folder:
        files = sorted(map(Path, tokenizer.save_vocabulary(folder, filename_prefix=None)))
        contents = [content_digest(path.read_bytes(), 16) for path in files]
    return [contents, str(tokenizer.added_tokens_decoder)]


def _is_installed(code: Any) -> bool:
    """Return whether a class, function or module is of an installed package, of Python or of this package."""
    package = (code.__name__ if isinstance(code, ModuleType) else str(code.__module__)).partition(".")[0]
    if package in ("builtins", "midlayer_encoders") or package in sys.stdlib_module_names:
        return True
    file = str(getattr(sys.modules.get(package), "__file__", ""))
    return package != "__main__" and ("site-packages" in file or "dist-packages" in file)


def _text(value: Any) -> str:
    """Return a value as text; empty if its class fails, such as a processor with a function among its settings."""
    try:
        return _ADDRESS.sub("", str(value))
    except Exception:
        return ""


def _state(value: Any) -> Any:
    """Return the attributes of an instance, those in ``__slots__`` too."""
    try:
        return object.__getstate__(value)
    except TypeError:  # of a class in C
        return _text(value)


def _global_names(code: CodeType) -> list[str]:
    """Return the names of the global variables that code uses, in the functions inside it too."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    return sorted(names.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType))))


def _instructions(code: Any) -> Any:
    """Describe compiled code, and the functions inside it, without its place."""
    if not isinstance(code, CodeType):
        return _text(code)
    return [code.co_code.hex(), str(code.co_names), [_instructions(constant) for constant in code.co_consts]]
