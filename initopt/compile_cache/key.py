"""What compiled code depends on, as readable parts with one digest: two starts with equal keys may share it.

torch's own keys hold the graph, but on a CPU neither its instruction sets nor the C++ compiler: code of a wider CPU is
a hit on a narrower one and computes garbage. This key is coarser, and holds them. It does not know what is stored (see
`store`). torch is imported where it is asked.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
import json
import os
import platform
import subprocess
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

FORMAT = 1
"""Version of the keys. It changes when a part is made from something else; older artifacts are not found then."""

HOST = ("torch", "triton", "python", "platform", "cpu", "compiler", "gpu")
"""The parts that say what this machine and its installation are, whatever the model."""

_DEPTH = 8


@dataclass(frozen=True)
class Key:
    """What a compile depends on, by name: `parts` are short texts for people, or digests of what is long.

    The names of parts are those of `key_of`; any other mapping of texts is a key as well.
    """

    parts: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """32 hex digits over all parts."""
        return _digest(["key", FORMAT, sorted(self.parts.items())])

    @property
    def model(self) -> str:
        """32 hex digits of the model alone, for what does not depend on the host (how its parts are called)."""
        return _digest(["model", FORMAT, self.parts.get("model", "")])

    @property
    def host(self) -> str:
        """32 hex digits of this machine and its installation alone (see HOST)."""
        return _digest(["host", FORMAT, [[name, self.parts.get(name, "")] for name in HOST]])

    def differences(self, other_parts: Mapping[str, str]) -> tuple[str, ...]:
        """The names of the parts that are not the same there, in the order of this key's parts."""
        names = dict.fromkeys((*self.parts, *other_parts))
        return tuple(name for name in names if self.parts.get(name) != other_parts.get(name))


def key_of(model: str, *, options: Mapping[str, object], device: torch.device) -> Key:
    """The key of a model (its `model_digest`) compiled with `options` (of `torch.compile`) on `device`, as things are.

    Two processes have the same key if they have the same modules (classes, their code, attributes, shapes; not the
    values of parameters), settings of torch and of Inductor, and machine. On CUDA the index of the device is in it,
    as compiled code may name it; on a CPU the ranks of a host share one key.
    """
    found = {"model": model, "options": _text(dict(options)), "inductor": _inductor()}
    found |= {**host_key(device), **_settings()}
    found["device"] = str(device) if device.type != "cpu" else "cpu"
    return Key(found)


def host_key(device: torch.device) -> dict[str, str]:
    """The parts HOST: versions, CPU, C++ compiler, and for a `device` on CUDA the GPU."""
    import torch

    found = {
        "torch": f"{torch.__version__} {(torch.version.git_version or '')[:12]}".rstrip(),
        "triton": _triton(),
        "python": f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}",
        "platform": f"{sys.platform} {platform.machine()} {' '.join(platform.libc_ver())}".rstrip(),
        # torch has read the variable when it was imported; its compiler reads it whenever it compiles.
        "cpu": ", ".join(
            filter(None, (_cpu(), torch.backends.cpu.get_cpu_capability(), os.environ.get("ATEN_CPU_CAPABILITY")))
        ),
        "compiler": _compiler(),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
        found["gpu"] = f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}, {runtime}"
    return found


def model_digest(parts: Mapping[str, nn.Module]) -> str:
    """32 hex digits of the modules, by name: classes, their code, plain attributes, parameters and buffers."""
    seen: dict[int, str] = {}
    described = [
        [part, [[path, _module(module, f"{part}.{path}", seen)] for path, module in root.named_modules()]]
        for part, root in sorted(parts.items())
    ]
    return _digest(described)


def _module(module: nn.Module, where: str, seen: dict[int, str]) -> list[Any]:
    from torch import nn

    tensors = []
    for kind, found in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
        for name, tensor in found(recurse=False):
            # Tied weights make another graph than two weights of the same shape.
            same_as = seen.setdefault(id(tensor), f"{where}.{name}")
            shape = "none yet" if nn.parameter.is_lazy(tensor) else list(tensor.shape)
            tensors.append([kind, name, shape, str(tensor.dtype), tensor.requires_grad, same_as])
    # What every module has (hooks, what `compile` leaves) is torch's, and the tensors were described above; but a
    # forward of its own is what is compiled.
    own = {
        name: value
        for name, value in vars(module).items()
        if name == "forward" or not (hasattr(_bare(), name) or name.startswith("__"))
    }
    attributes = sorted([name, _plain(value, _DEPTH)] for name, value in own.items())
    cls: Any = type(module)
    return [_classes(cls), module.training, attributes, tensors]


@functools.cache
def _bare() -> nn.Module:
    from torch import nn

    return nn.Module()


@functools.cache
def _classes(cls: Any) -> list[list[str]]:
    """The class and those it inherits from, each with what it does."""
    return [[one.__module__, one.__qualname__, _does(one)] for one in cls.__mro__ if one is not object]


def _does(cls: type) -> str:
    """A digest of the functions and plain attributes of one class, wherever in their file they stand.

    Not in it: functions of elsewhere that they call. torch's own key of a graph, which is made anew, holds those.
    """
    if cls.__module__.partition(".")[0] == "torch":
        # Its version is a part of the key.
        return ""
    described = []
    for name, value in sorted(vars(cls).items()):
        functions = _functions(value)
        if functions:
            described.append([name, [_function(one) for one in functions]])
        elif not name.startswith("_"):
            described.append([name, _plain(value, _DEPTH)])
    return _digest(described)


def _functions(value: Any) -> list[types.FunctionType]:
    """The functions in an attribute of a class, and those that they wrap."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    found = [value.fget, value.fset] if isinstance(value, property) else [value]
    functions: list[types.FunctionType] = []
    for one in found:
        while isinstance(one, types.FunctionType) and len(functions) < _DEPTH:
            functions.append(one)
            one = getattr(one, "__wrapped__", None)
    return functions


def _function(function: types.FunctionType) -> list[Any]:
    held = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            held.append(_plain(cell.cell_contents, _DEPTH))
    defaults = [_plain(function.__defaults__, _DEPTH), _plain(function.__kwdefaults__, _DEPTH)]
    return [_code(function.__code__), defaults, held]


def _code(code: types.CodeType) -> list[Any]:
    constants = [_code(one) if isinstance(one, types.CodeType) else _constant(one) for one in code.co_consts]
    names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    return [code.co_code.hex(), code.co_flags, code.co_argcount, code.co_kwonlyargcount, names, constants]


def _constant(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_constant(one) for one in value]
    # Sets of texts have another order in each process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else [type(value).__name__, repr(value)]


@functools.cache
def _triton() -> str:
    try:
        return str(importlib.import_module("triton").__version__)
    except Exception:
        return "none"


def _settings() -> dict[str, str]:
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled()
    settings = [
        str(torch.get_default_dtype()).removeprefix("torch."),
        f"float32 matmul {torch.get_float32_matmul_precision()}",
        *(["deterministic"] if deterministic else []),
    ]
    return {"threads": str(torch.get_num_threads()), "settings": ", ".join(settings)}


def _inductor() -> str:
    """Inductor's options that are not at their default, and a digest of all of them."""
    from torch._inductor import config as module

    # There is no public way to ask for the defaults. An option that is set to its default is no change: Inductor itself
    # does that while it compiles. What it reads from the environment is a default for it, so all values are digested.
    config: Any = module
    values = config.save_config_portable(ignore_private_configs=False)
    changed = {name: value for name, value in values.items() if value != config._config[name].default}
    digest = _digest(sorted([name, _plain(value, _DEPTH)] for name, value in values.items()))[:12]
    return f"{_text(changed)} {digest}" if changed else digest


@functools.cache
def _cpu() -> str:
    """The processors of this machine: who made them, which, and a digest of what they can do."""
    about = ("vendor_id", "CPU implementer", "cpu family", "model", "CPU part", "stepping")
    kinds: set[tuple[str, ...]] = set()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    for block in text.split("\n\n"):
        fields = {n.strip(): v.strip() for n, _, v in (line.partition(":") for line in block.splitlines())}
        can = " ".join(sorted(fields.get("flags", fields.get("Features", "")).split()))
        kinds.add((*(fields.get(name, "") for name in about), can))
    kinds.discard(("",) * (len(about) + 1))
    if not kinds:
        return platform.processor() or platform.machine()
    *who, _ = min(kinds)
    return f"{' '.join(part for part in who if part)} {_digest(sorted(kinds))[:12]}".strip()


@functools.cache
def _compiler() -> str:
    """The C++ compiler by what it says of itself, wherever it is installed."""
    try:
        # Which one Inductor takes; there is no public way to ask.
        from torch._inductor.cpp_builder import get_cpp_compiler

        program = get_cpp_compiler()
        environment = {**os.environ, "LC_ALL": "C"}
        asked = [
            subprocess.run([program, option], env=environment, capture_output=True, text=True, timeout=30, check=True)
            for option in ("--version", "-dumpmachine")
        ]
    except Exception:
        # Inductor says so itself where it needs one.
        return "none"
    version, machine = (done.stdout.splitlines()[0].strip() for done in asked)
    # GCC begins with the name that it was called by.
    return f"{version.removeprefix(os.path.basename(program)).strip()} {machine}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:32]


def _text(values: Mapping[str, Any]) -> str:
    """Options as text: `dynamic=False, mode=None`."""
    return ", ".join(f"{name}={_short(value)}" for name, value in sorted(values.items())) or "none"


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    plain = _plain(value, _DEPTH)
    return str(plain[1]) if isinstance(plain, list) and plain[0] == "name" else json.dumps(plain)


def _plain(value: Any, depth: int) -> Any:
    """The value as JSON data that is equal in two processes if the value is; of an object only its class."""
    import torch

    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, enum.Enum):
        return ["name", f"{type(value).__qualname__}.{value.name}"]
    if isinstance(value, int):
        return ["int", str(int(value))]
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, torch.dtype | torch.device | torch.Size | complex | bytes | range):
        return ["value", repr(value)]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return ["name", f"{getattr(value, '__module__', '')}.{value.__qualname__}"]
    if depth and isinstance(value, functools.partial):
        bound = [value.func, value.args, value.keywords]
        return ["partial", [_plain(one, depth - 1) for one in bound]]
    if depth and isinstance(value, Mapping):
        return ["mapping", [[_plain(k, depth - 1), _plain(v, depth - 1)] for k, v in value.items()]]
    if depth and isinstance(value, list | tuple):
        return [type(value).__qualname__, [_plain(one, depth - 1) for one in value]]
    if depth and isinstance(value, set | frozenset):
        return ["set", sorted((_plain(one, depth - 1) for one in value), key=json.dumps)]
    if depth and dataclasses.is_dataclass(value):
        held = [[one.name, _plain(getattr(value, one.name, None), depth - 1)] for one in dataclasses.fields(value)]
        return [type(value).__qualname__, held]
    if isinstance(value, torch.Tensor):
        return ["tensor", list(value.shape), str(value.dtype)]
    return ["object", f"{type(value).__module__}.{type(value).__qualname__}"]
