"""What only a rank has, or has for itself: its variables, `__main__`, random numbers. Who asks for it is noticed."""

from __future__ import annotations

import functools
import os
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, ClassVar, SupportsIndex

_BLOCK = 624
_BLOCKS = 200
"""So many blocks of 624 numbers may imports draw and still count as not having seeded the generator."""

_TORCHMETRICS = "torchmetrics.utilities.prints"

OF_A_RANK = frozenset(
    {
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "WORLD_SIZE"),
    }
)
"""The variables that torchrun 2.13 sets for each rank."""

_COPIERS = frozenset(
    {
        *("networkx.utils.backends", "tqdm.utils", "fsspec.config", "dask.config"),
        *("ctypes.util", "platform", "uuid", "initopt.launch.settings"),
    }
)
"""Modules that go through all variables and mean no rank's: for those that begin with their own name (the first four),
to hand them to a program that tells what the system has (those of Python), or to see what imports change. torch,
torchrec, fbgemm_gpu, numpy, sympy, tensordict and torchmetrics go through none."""

_ON_BEHALF = ("os", "collections.abc", __name__)
"""Here an environment does what somebody else asked for: `os.getenv`, `get`, `setdefault`, `items`."""

_OF_ANY_MAIN = frozenset(
    {"__cached__", "__class__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}
)  # as `as_script` makes it


_OF_NO_MAIN = frozenset({"__path__", "__requires__"})
"""What `from __main__ import` asks for, and pkg_resources: no script has these, but one that sets them itself."""


class _Watched(type(os.environ)):  # type: ignore[misc]
    """An environment that says which variables are asked for or changed, by name or all of them."""

    use: ClassVar[EnvironmentUse]

    def __getitem__(self, name: Any) -> Any:
        _Watched.use.asked(name)
        return super().__getitem__(name)

    def __setitem__(self, name: Any, value: Any) -> None:
        _Watched.use.changed(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: Any) -> None:
        _Watched.use.changed(name)
        super().__delitem__(name)

    def __iter__(self) -> Iterator[Any]:
        _Watched.use.copied()
        return iter(super().__iter__())

    def __repr__(self) -> str:
        _Watched.use.copied()
        return str(super().__repr__())

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        _Watched.use.copied()
        return super().__reduce_ex__(protocol)


@dataclass(slots=True)
class EnvironmentUse:
    """Who used `os.environ` and `os.environb` while modules were imported.

    `users` are the modules that used a variable, by variable, `copiers` those that went through all of them.
    """

    users: dict[str, set[str]] = field(default_factory=dict)
    copiers: set[str] = field(default_factory=set)
    _plain: Any = None

    def __enter__(self) -> EnvironmentUse:
        self._plain = type(os.environ)
        _Watched.use = self
        os.environ.__class__ = os.environb.__class__ = _Watched
        return self

    def __exit__(self, *raised: object) -> None:
        os.environ.__class__ = os.environb.__class__ = self._plain

    def asked(self, name: Any) -> None:
        """Somebody asks for a variable."""
        user, call = _user()
        # These two of the script ask for what only they change, and a rank does that again.
        if user and (user, call) not in (("__main__", "setdefault"), ("__main__", "pop")):
            self.users.setdefault(os.fsdecode(name), set()).add(user)

    def changed(self, name: Any) -> None:
        """Somebody is about to set a variable, or to delete it."""
        user, _ = _user()
        if user and user != "__main__":
            self.users.setdefault(os.fsdecode(name), set()).add(user)

    def copied(self) -> None:
        """Somebody goes through all variables."""
        if user := _user()[0]:
            self.copiers.add(user)

    def reasons(self, own: Set[str]) -> Iterator[str]:
        """Which modules can't be imported for all ranks, and why: they use `own`, the variables that only a rank has.

        Without what `tell_known` tells later.
        """
        asked: dict[str, list[str]] = {}
        for variable in sorted(own & self.users.keys()):
            for module in sorted(self.users[variable]):
                if (module, variable) != (_TORCHMETRICS, "LOCAL_RANK"):
                    asked.setdefault(module, []).append(variable)
        for module in sorted(self.copiers) if own else ():
            asked[module] = [f"all variables ({'RANK' if 'RANK' in own else min(own)} among them)"]
        for module, variables in asked.items():
            yield f"{module} uses {', '.join(variables)} from the environment while it is imported"


def _user() -> tuple[str, str]:
    """The module that uses the environment, and the method that it called; empty for those known to do no harm."""
    frame: Any = sys._getframe(3)
    call = ""
    while frame.f_back is not None and _name(frame) in _ON_BEHALF:
        call, frame = frame.f_code.co_name, frame.f_back
    if _name(frame) in _COPIERS:
        return "", call
    # Python's own modules ask for somebody, too, such as `os.path.expandvars`, unless it's they who are imported.
    while _is_python_s(frame) and frame.f_back is not None and not _name(frame.f_back).startswith("importlib."):
        frame = frame.f_back
    return _name(frame), call


def _name(frame: Any) -> str:
    return str(frame.f_globals.get("__name__"))


def _is_python_s(frame: Any) -> bool:
    return _name(frame).partition(".")[0] in sys.stdlib_module_names


class _WatchedMain(types.ModuleType):
    """A `__main__` that says who looks for what only the running script puts there."""

    users: ClassVar[list[str]]
    script: ClassVar[Mapping[str, Any]]

    def __getattribute__(self, name: str) -> Any:
        user = _name(sys._getframe(1))
        try:
            found = super().__getattribute__(name)
        except AttributeError:
            if name not in _OF_NO_MAIN or name in _WatchedMain.script:
                _WatchedMain._looked(user, name)
            raise
        if name not in _OF_ANY_MAIN:
            _WatchedMain._looked(user, name)
        return found

    @staticmethod
    def _looked(user: str, name: str) -> None:
        # It looks whether what it is asked about is the script's, and finds nothing in time.
        if user != "inspect":
            _WatchedMain.users.append(f"{user} looks for {name} in __main__")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "__class__":
            _WatchedMain.users.append(f"{_name(sys._getframe(1))} sets {name} in __main__")
        super().__setattr__(name, value)


@contextmanager
def main_users(script: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Note who uses `__main__` in the block, in words: the script has not run, so what is there is not a rank's.

    `script` has what those of the script's own lines have put there that were run.
    """
    main = sys.modules["__main__"]
    users = _WatchedMain.users = []
    _WatchedMain.script = script
    main.__class__ = _WatchedMain
    try:
        yield users
    finally:
        main.__class__ = types.ModuleType


def tell_known(before: Mapping[str, str]) -> None:
    """Tell modules that are known to note their rank at import, when the environment was `before`: torchmetrics."""
    only = getattr(sys.modules.get(_TORCHMETRICS), "rank_zero_only", None)
    if only is not None and getattr(only, "rank", None) == int(before.get("LOCAL_RANK", "0")):
        only.rank = int(os.environ.get("LOCAL_RANK", "0"))


class Generators:
    """The generators of `random`, `numpy.random` and `torch`, which a fresh process seeds from the system by itself.

    Make one before the imports, call `imported` after them, and `fork` in each forked process: it has numbers of its
    own then, unless a module seeded them while it was imported, which holds for each rank. `seed()` without a seed is
    none.
    """

    def __init__(self) -> None:
        self._seed = os.urandom(32)
        self._seeded: Any = None
        self._numbers: Any = None
        self._undo: list[Callable[[], None]] = []
        self._torch: int | None = None
        random.seed(self._seed)
        self._python_s()
        self._of("numpy.random.mtrand", self._numpy_s)
        self._of("torch", self._torch_s)

    def imported(self) -> None:
        """Find out whether the imports seeded anything, and stop looking out."""
        for undo in self._undo:
            undo()
        state = random.getstate()
        ours = random.Random(self._seed)
        if not _leads_to(
            lambda: ours.getstate()[1][:-1] == state[1][:-1],
            lambda: ours.getrandbits(32 * _BLOCK),
        ):
            self._seeded = state
        if self._numbers is not None:
            numpy: Any = sys.modules["numpy.random.mtrand"]
            theirs, copy = numpy.get_state(), numpy.RandomState()
            copy.set_state(self._numbers)
            # Another kind of generator is a module's choice, and its seed, too.
            if theirs[0] != self._numbers[0] or not _leads_to(
                lambda: (copy.get_state()[1] == theirs[1]).all(), lambda: copy.bytes(4 * _BLOCK)
            ):
                self._numbers = None

    def fork(self) -> None:
        """Give this process its own numbers. `random` has seeded itself after the fork."""
        if self._seeded is not None:
            random.setstate(self._seeded)
        if self._numbers is not None:
            sys.modules["numpy.random.mtrand"].seed()
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.initial_seed() == self._torch:
            # Of the CPU only: those of devices start from a constant.
            torch.default_generator.seed()

    def _of(self, name: str, act: Callable[[Any, bool], None]) -> None:
        """Act on a module as soon as it is imported, or now if it is, and say which."""
        if name in sys.modules:
            act(sys.modules[name], True)
            return
        finder = _Finder(name, act)
        sys.meta_path.insert(0, finder)
        self._undo.append(finder.leave)

    def _python_s(self) -> None:
        plain = random.seed

        @functools.wraps(plain)
        def seed(a: Any = None, version: int = 2) -> None:
            if a is None:
                a = self._seed = os.urandom(32)
            plain(a, version)

        random.seed = seed
        self._undo.append(lambda: setattr(random, "seed", plain))

    def _numpy_s(self, module: Any, early: bool) -> None:
        # Seeding leaves no sequence. What seeded it before Python's first line was ours does so for each rank.
        if early and getattr(module.get_bit_generator(), "seed_seq", None) is None:
            return
        plain = module.seed
        self._numbers = module.get_state()

        @functools.wraps(plain)
        def seed(seed: Any = None) -> None:
            plain(seed)
            if seed is None:
                self._numbers = module.get_state()

        def undo() -> None:
            for place in (module, sys.modules.get("numpy.random")):
                if getattr(place, "seed", None) is seed:
                    setattr(place, "seed", plain)  # noqa: B010

        module.seed = seed
        if early:
            sys.modules["numpy.random"].seed = seed  # type: ignore[attr-defined]
        self._undo.append(undo)

    def _torch_s(self, module: Any, early: bool) -> None:
        seed = module.initial_seed()
        # Those that torch gives itself have 53 bits, those that a `sitecustomize` chooses for all ranks are small.
        if not early or seed >> 32:
            self._torch = seed


def _leads_to(reached: Callable[[], bool], advance: Callable[[], object]) -> bool:
    """Whether a generator gets there by what imports may draw."""
    for _ in range(_BLOCKS):
        if reached():
            return True
        advance()
    return False


class _Finder:
    """Acts as soon as one module is imported, and is seen by nobody: see PEP 451."""

    def __init__(self, name: str, act: Callable[[Any, bool], None]) -> None:
        self._name = name
        self._act = act
        self._loader: Any = None

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        self.leave()
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
        self._act(module, False)
