"""Random numbers: the state of the generators that steps share, and the ledger that lets a step draw before its turn.

The default generators are shared by all threads, so the order of draws decides the weights. A step that must start
early (a data loader draws its seed when its workers start) runs from the state that it started from in an earlier
start-up. When its turn comes, that state is compared with the real one: equal, and the generators move on to where
the step left them; different, and the step is run again in its place. So a stale or edited ledger costs time, never a
different training.

The ledger keeps torch's default generator of the CPU only. A step that draws from another one waits for its turn: the
state of an accelerator's generator can't be set without starting the accelerator, which must not happen before a fork.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RngState = dict[str, bytes]
"""The state of torch's default generators: device (`cpu`, `cuda:0`, ...) -> bytes."""


def read() -> RngState:
    """Return the state of torch's default generators, without moving them and without importing torch."""
    torch = sys.modules.get("torch")
    # A thread may see torch half imported by another one.
    if torch is None or not hasattr(torch, "get_rng_state"):
        return {}
    states = {"cpu": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_initialized():
        states |= {f"cuda:{i}": s.numpy().tobytes() for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def moved(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """Whether a generator that both know stands elsewhere: one that was only made in between was not drawn from."""
    return any(before[name] != after[name] for name in before.keys() & after.keys())


def cpu() -> bytes:
    """Return the state of torch's default generator of the CPU; nothing where torch is not imported."""
    return read().get("cpu", b"")


def write(state: bytes) -> None:
    """Set torch's default generator of the CPU. Raises ValueError for a state that it can't take."""
    import torch

    try:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"no state of torch's generator: {error}") from error


def digest(state: RngState) -> str:
    """Sha256 of a state, in hex."""
    content = hashlib.sha256()
    for device in sorted(state):
        content.update(device.encode() + state[device])
    return content.hexdigest()


def keep_others() -> Callable[[], None]:
    """Return a function that puts Python's and numpy's generators back to where they are now."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None

    def put_back() -> None:
        random.setstate(python)
        if numpy is not None and state is not None:
            numpy.random.set_state(state)

    return put_back


def others() -> dict[str, object]:
    """Return the states of the generators that the ledger does not keep: accelerators', Python's and numpy's.

    The last two are seeded from the operating system unless the trainer does it, so a state from an earlier process
    means nothing.
    """
    states: dict[str, object] = {device: state for device, state in read().items() if device != "cpu"}
    states["random"] = random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        states["numpy"] = _comparable(numpy.random.get_state(legacy=False))
    return states


def _comparable(state: Any) -> object:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


_DRAWS = frozenset(
    (
        *("bernoulli", "bernoulli_", "cauchy_", "dropout", "dropout_", "exponential_", "feature_dropout", "geometric_"),
        *("log_normal_", "multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like"),
        *("randn", "randn_like", "randperm", "random_", "rrelu", "uniform_"),
    )
)
"""Names of torch's functions that draw from a default generator unless they are given another one."""


def draws(function: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of a function of torch draws from a default generator."""
    if getattr(function, "__name__", "") not in _DRAWS:
        return False
    from torch import Generator, Tensor

    given = [*args, *kwargs.values()]
    meta = any(isinstance(value, Tensor) and value.is_meta for value in given)
    return not meta and not any(isinstance(value, Generator) for value in given)


@contextmanager
def watched(drawn: Callable[[str], None]) -> Iterator[None]:
    """Call `drawn` with the name of each function that is about to draw from a default generator of torch.

    Only this thread is watched, so a draw beside another thread's is told apart. What C++ draws is not seen.
    """
    if "torch.overrides" not in sys.modules:
        yield
        return
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if draws(function, args, kwargs or {}):
                drawn(function.__name__)
            return function(*args, **(kwargs or {}))

    with Watch():
        yield


@contextmanager
def swapped(state: bytes) -> Iterator[None]:
    """Run a block from `state`, then put the generator back to where it was before it."""
    import torch  # noqa: F401  so that `cpu` sees the generator that `write` will set

    before = cpu()
    write(state)
    try:
        yield
    finally:
        write(before)


@dataclass(frozen=True)
class Entry:
    """What one early step did to the generator of the CPU: its state `before` the first draw and `after` the last."""

    before: bytes
    after: bytes


class Ledger:
    """The generator states of early steps, kept between the start-ups of one job, one file per rank.

    `path` is the file. `first` is the digest of the state at the beginning of the start-up: a ledger made from another
    one (another seed) is not used. A file that is missing, torn or foreign, or holds what is no state of a generator,
    is an empty ledger.
    """

    def __init__(self, path: Path, first: str) -> None:
        self.path = path
        self.first = first
        self._entries: dict[str, Entry] = {}
        self._read()
        self._stored = dict(self._entries)

    def __contains__(self, step: str) -> bool:
        return step in self._entries

    def __getitem__(self, step: str) -> Entry:
        return self._entries[step]

    def __setitem__(self, step: str, entry: Entry) -> None:
        self._entries[step] = entry

    def __delitem__(self, step: str) -> None:
        self._entries.pop(step, None)

    def _read(self) -> None:
        try:
            content = json.loads(self.path.read_text())
            if content["format"] == 1 and content["first"] == self.first:
                self._entries = {
                    step: Entry(_decode(entry["before"]), _decode(entry["after"]))
                    for step, entry in content["steps"].items()
                }
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            warnings.warn(
                f"initopt: {self.path} is not a readable ledger ({type(error).__name__}: {error}); "
                "this start-up runs without it and writes a new one",
                stacklevel=2,
            )

    def save(self) -> None:
        """Write the file if it has changed, aside and then renamed.

        A folder that can't be written costs the ledger, with one warning.
        """
        if self._entries == self._stored:
            return
        content = {
            "format": 1,
            "first": self.first,
            "steps": {
                step: {"before": _encode(entry.before), "after": _encode(entry.after)}
                for step, entry in self._entries.items()
            },
        }
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(content))
            os.replace(aside, self.path)
            self._stored = dict(self._entries)
        except OSError as error:
            warnings.warn(
                f"initopt: the ledger {self.path} was not written ({error}); the next start-up will not know the "
                "generator states of its early steps",
                stacklevel=2,
            )


def _encode(state: bytes) -> str:
    return base64.b64encode(state).decode()


def _decode(text: str) -> bytes:
    import torch

    state = base64.b64decode(text, validate=True)
    try:
        # Of another length, or of another version of torch.
        torch.Generator().set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return state
