"""What a fresh process has of its own and a forked one must be given: its environment and its random numbers."""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, ClassVar

_BLOCKS = 200
"""So many blocks of 624 numbers may imports draw and still count as not having seeded the generator."""

_TORCHMETRICS = "torchmetrics.utilities.prints"


class _Watched(type(os.environ)):  # type: ignore[misc]
    """An environment that says which variables are asked for or changed by name. Copying all of it is not noticed."""

    noticed: Callable[[str], None]
    copied: ClassVar[deque[str]] = deque()

    def __getitem__(self, name: str) -> str:
        copied = _Watched.copied
        if copied and name == copied[0]:
            copied.popleft()
        else:
            copied.clear()
            self.noticed(name)
        return str(super().__getitem__(name))

    def __setitem__(self, name: str, value: str) -> None:
        self.noticed(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.noticed(name)
        super().__delitem__(name)

    def __iter__(self) -> Iterator[str]:
        # `dict(os.environ)` takes all names and then asks for each in turn, `os.environ.items()` for one at a time.
        names = list(super().__iter__())
        _Watched.copied = deque(names)
        return iter(names)


@contextmanager
def environment_users() -> Iterator[Mapping[str, set[str]]]:
    """Note who uses which variable of `os.environ` in the block: the modules, by variable."""
    users: dict[str, set[str]] = {}
    plain = type(os.environ)

    def noticed(name: str) -> None:
        frame: Any = sys._getframe(2)
        # The standard library asks on behalf of somebody: `os.getenv`, `get`, `setdefault`.
        while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", __name__):
            frame = frame.f_back
        users.setdefault(name, set()).add(str(frame.f_globals.get("__name__")))

    _Watched.noticed = staticmethod(noticed)
    os.environ.__class__ = _Watched
    try:
        yield users
    finally:
        os.environ.__class__ = plain


def askers(users: Mapping[str, set[str]], own: set[str]) -> Mapping[str, list[str]]:
    """The modules that asked for one of the variables `own`, which only a rank has, and those of them they asked for.

    Without those that `tell_known` tells later.
    """
    found: dict[str, list[str]] = {}
    for variable in sorted(own & users.keys()):
        for module in sorted(users[variable]):
            if (module, variable) != (_TORCHMETRICS, "LOCAL_RANK"):
                found.setdefault(module, []).append(variable)
    return found


def tell_known(before: Mapping[str, str]) -> None:
    """Tell modules that are known to note their rank at import, when the environment was `before`: torchmetrics."""
    only = getattr(sys.modules.get(_TORCHMETRICS), "rank_zero_only", None)
    if only is not None and getattr(only, "rank", None) == int(before.get("LOCAL_RANK", "0")):
        only.rank = int(os.environ.get("LOCAL_RANK", "0"))


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """The variables that differ."""
    return {name for name in (*before, *after) if before.get(name) != after.get(name)}


def set_environment(before: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Change what differs between the two, and leave what imports have changed since `before` was the environment."""
    for name in changed_variables(before, wanted):
        if name in wanted:
            os.environ[name] = wanted[name]
        else:
            os.environ.pop(name, None)


class Generators:
    """The generators of `random`, `numpy.random` and `torch`, which a fresh process seeds from the system by itself.

    Make one before the imports, call `imported` after them, and `fork` in each forked process: it has numbers of its
    own then, unless a module seeded them while it was imported, which holds for each rank.
    """

    def __init__(self) -> None:
        self._seed = os.urandom(32)
        self._seeded: Any = None
        self._torch = _TorchSeed()
        random.seed(self._seed)
        sys.meta_path.insert(0, self._torch)

    def imported(self) -> None:
        """Find out whether the imports seeded `random`, and stop looking out for torch."""
        if self._torch in sys.meta_path:
            sys.meta_path.remove(self._torch)
        state = random.getstate()
        ours = random.Random(self._seed)
        for _ in range(_BLOCKS):
            if ours.getstate()[1][:-1] == state[1][:-1]:
                return
            ours.getrandbits(32 * 624)
        self._seeded = state

    def fork(self) -> None:
        """Give this process its own numbers. `random` has seeded itself after the fork."""
        if self._seeded is not None:
            random.setstate(self._seeded)
        numbers = sys.modules.get("numpy.random")
        generator = getattr(numbers, "get_bit_generator", None)
        # Seeding leaves no sequence.
        if generator is not None and getattr(generator(), "seed_seq", None) is not None:
            sys.modules["numpy.random"].seed()
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.initial_seed() == self._torch.seed:
            # Of the CPU only: those of devices start from a constant.
            torch.default_generator.seed()


class _TorchSeed:
    """Notes the seed that torch has given itself as soon as it is imported, and is seen by nobody: see PEP 451."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self._loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self.seed = module.initial_seed()
