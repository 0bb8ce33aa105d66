"""What ranks assume when a meeting is left out, as text that is equal on two ranks if they may leave it out.

A text has a line for each thing that may differ, so that a difference is told in words of the job.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_STEERING = (
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "TOPOLOGY_DOMAIN_MULTIPLE",
    "TORCHREC_RESOLVED_POD_SIZE",
    "TORCHREC_VALIDATE_COLLECTIVES",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS",
    "TORCH_DIST_INIT_BARRIER",
    "TORCH_GLOO_LAZY_INIT",
)
"""Variables that decide which groups and collectives a start-up has."""

_PACKAGES = ("torch", "torchrec", "fbgemm_gpu", "initopt")

MOST = 64 << 20
"""Bytes of parameters whose values are compared, at 40 ms a rank. Above it a broadcast may be the quicker proof."""


def environment() -> str:
    """The variables that steer a start-up, as this rank has them."""
    return "\n".join(f"{name}={os.environ[name]}" if name in os.environ else f"{name} unset" for name in _STEERING)


def versions(model: nn.Module) -> str:
    """What runs here: Python, the packages, and the files of the script and of the model's class."""
    lines = [f"python {platform.python_version()}"]
    lines += [f"{name} {version(name)}" for name in _PACKAGES]
    for what, module in (("script", "__main__"), ("model's file", type(model).__module__)):
        lines.append(f"the {what} has sha256 {_sha256(getattr(sys.modules.get(module), '__file__', None))}")
    return "\n".join(lines)


def version(package: str) -> str:
    """The version of a package that is loaded: to look it up on disk takes longer than what is to be left out."""
    return str(getattr(sys.modules.get(package), "__version__", "of no known version"))


def tables(model: nn.Module, sharders: Sequence[Any]) -> str:
    """The shardable modules in the model's order, each table with what decides which row is looked up, and where."""
    lines = []
    kinds = {sharder.module_type for sharder in sharders}
    for path, module in model.named_modules():
        if type(module) in kinds:
            lines.append(f"{path or 'model'}: {type(module).__name__}")
            lines += [f"{path}: {line}" for line in _configs(module)]
            state = [*module.named_parameters(), *module.named_buffers()]
            lines += [f"{path}.{name}: {tuple(one.shape)} {one.dtype}" for name, one in state]
    return "\n".join(lines)


def placement(plan: Any) -> str:
    """The shards of each table, in the plan's order: kind, kernel, where each lies, and how large it is."""
    lines = []
    for path, module_plan in plan.plan.items():
        for name, one in module_plan.items():
            shards = getattr(one.sharding_spec, "shards", ())
            where = [f"{shard.shard_offsets} {shard.shard_sizes} {shard.placement}" for shard in shards]
            how = (one.sharding_type, one.compute_kernel, one.ranks, getattr(one, "output_dtensor", None))
            lines.append(f"{path}.{name}: {' '.join(map(str, how))} {', '.join(where)}")
    return "\n".join(lines)


def two_dimensional(given: Mapping[str, Any]) -> str:
    """What a DMPCollection is made with: how ranks are divided, and the same and the plan of each submodule."""
    names = ("world_size", "sharding_group_size", "node_group_size", "use_inter_host_allreduce", "sharding_strategy")
    lines = [f"{name}={given[name]}" for name in (*names, "use_sharded_relay")]
    for one in given["submodule_configs"] or ():
        lines.append(f"{one.module.__name__}: " + " ".join(f"{name}={getattr(one, name)}" for name in names[1:]))
        lines += [f"{one.module.__name__}: {line}" for line in placement(one.plan).splitlines()]
    return "\n".join(lines)


def wrapper(of: Any) -> str:
    """The class of a DataParallelWrapper, and which parameters it ignores."""
    ignored = sorted(getattr(of, "_additional_params_to_ignore", ()))
    return "\n".join([type(of).__name__, *(f"ignores {name}" for name in ignored)])


@dataclass(frozen=True)
class _Seen:
    parameter: nn.Parameter
    memory: int
    version: int

    def is_as_seen(self, parameter: nn.Parameter) -> bool:
        return parameter is self.parameter and (self.memory, self.version) == _state(parameter)


class Dense:
    """The parameters of a model that no sharder takes, with what they held when this was made."""

    def __init__(self, model: nn.Module, sharders: Sequence[Any]) -> None:
        self._seen: dict[str, _Seen] = {}
        self._values: dict[str, str] = {}
        kinds = {sharder.module_type for sharder in sharders}
        taken = {path for path, module in model.named_modules() if type(module) in kinds}
        found = {name: one for name, one in model.named_parameters() if not _is_inside(name, taken)}
        # Not yet filled: what they will hold is decided later, after other draws.
        there = {name: one for name, one in found.items() if not one.is_meta and type(one) is nn.Parameter}
        self._forms = [f"{name}: {_form(one)}" for name, one in found.items()]
        self._shapes = [f"number {at} has {_shape(one)}" for at, one in enumerate(found.values())]
        if sum(one.nbytes for one in there.values()) > MOST:
            self._forms.append("too large to compare")
            return
        for name, one in there.items():
            self._values[name] = _values(one)
            self._seen[name] = _Seen(one, *_state(one))

    def shapes(self) -> str:
        """Shapes alone: where only names differ, DistributedDataParallel goes by the order."""
        return "\n".join(self._shapes)

    def forms(self) -> str:
        """Names, shapes, types, and what else a parameter is."""
        return "\n".join(self._forms)

    def values(self) -> str:
        """What they held, as digests."""
        return "\n".join(f"{name}: values with sha256 {value}" for name, value in self._values.items())

    def covers(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether these are all among them."""
        return bool(parameters) and parameters.keys() <= self._seen.keys()

    def changed(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[str]:
        """Yield the names of those that hold something else by now."""
        for name, one in parameters.items():
            if not self._seen[name].is_as_seen(one) and _values(one) != self._values[name]:
                yield name


def _is_inside(name: str, paths: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in paths for length in range(len(parts)))


def _shape(parameter: nn.Parameter) -> str:
    # That of a lazy module, which the first batch decides.
    return "a shape that is not known yet" if nn.parameter.is_lazy(parameter) else f"{tuple(parameter.shape)}"


def _form(parameter: nn.Parameter) -> str:
    if nn.parameter.is_lazy(parameter):
        return _shape(parameter)
    place = "on the meta device" if parameter.is_meta else ""
    return f"{_shape(parameter)} {parameter.dtype} {parameter.stride()} {parameter.requires_grad} {place}"


def _values(parameter: nn.Parameter) -> str:
    data = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()[:16]


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    # The counter of writes has no public name.
    return parameter.data_ptr(), parameter._version


def _configs(module: nn.Module) -> list[str]:
    for name in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(module, name):
            configs = getattr(module, name)()
            return [
                f"{one.name} {one.num_embeddings} x {one.embedding_dim} {one.data_type} {one.feature_names} "
                f"{getattr(one, 'pooling', '')}"
                for one in configs
            ]
    return []


def _sha256(path: str | None) -> str:
    try:
        with open(path or "", "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return "none"
