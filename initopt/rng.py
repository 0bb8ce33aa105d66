"""Random numbers: the state of the generators that steps share, and the ledger that lets a step draw before its turn.

The default generators are shared by all threads, so the order of draws decides the weights. A step that must start
early (a data loader draws its seed when its workers start) runs from the state that it started from in an earlier
start-up. When its turn comes, that state is compared with the real one: equal, and the generators move on to where
the step left them; different, and the step is run again in its place. So a stale or edited ledger costs time, never a
different training.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


def write(state: RngState) -> None:
    """Set torch's default generators to `state`. Raises ValueError if a state does not fit its generator."""
    import torch

    for device, content in state.items():
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        try:
            if device == "cpu":
                torch.set_rng_state(tensor)
            else:
                torch.cuda.set_rng_state(tensor, device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the state for the generator of {device!r} does not fit it: {error}") from error


def digest(state: RngState) -> str:
    """Sha256 of a state, in hex."""
    content = hashlib.sha256()
    for device in sorted(state):
        content.update(device.encode() + state[device])
    return content.hexdigest()


def others() -> int:
    """Return a fingerprint of the generators that the ledger does not keep: Python's `random` and numpy's global one.

    They are seeded from the operating system unless the trainer does it, so a state from an earlier process means
    nothing.
    """
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state(legacy=False) if numpy is not None and hasattr(numpy, "random") else None
    return hash((random.getstate(), str(state)))


@contextmanager
def swapped(state: RngState) -> Iterator[None]:
    """Run a block from `state`, then put the generators back to where they were before it."""
    if state:
        import torch  # noqa: F401  so that `read` sees the generators that `write` will set
    before = read()
    write(state)
    try:
        yield
    finally:
        write(before)


@dataclass(frozen=True)
class Entry:
    """What one early step did to the generators: `before` its first draw and `after` its last."""

    before: RngState
    after: RngState


class Ledger:
    """The generator states of early steps, kept between the start-ups of one job, one file per rank.

    `path` is the file. `first` is the digest of the state at the beginning of the start-up: a ledger made from another
    one (another seed) is not used. A file that is missing, torn or foreign is an empty ledger.
    """

    def __init__(self, path: Path, first: str) -> None:
        self.path = path
        self.first = first
        self._entries: dict[str, Entry] = {}
        self._read()

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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(
                f"initopt: {self.path} is not a readable ledger ({type(error).__name__}: {error}); "
                "this start-up runs without it and writes a new one",
                stacklevel=2,
            )

    def save(self) -> None:
        """Write the file, aside and then renamed. A folder that can't be written costs the ledger, with one warning."""
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
        except OSError as error:
            warnings.warn(
                f"initopt: the ledger {self.path} was not written ({error}); the next start-up will not know the "
                "generator states of its early steps",
                stacklevel=2,
            )


def _encode(state: RngState) -> dict[str, str]:
    return {device: base64.b64encode(content).decode() for device, content in state.items()}


def _decode(content: dict[str, str]) -> RngState:
    return {device: base64.b64decode(state, validate=True) for device, state in content.items()}
