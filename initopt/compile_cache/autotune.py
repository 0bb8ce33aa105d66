"""Which kernel won where inductor tries several, so that a later start tries only those that were close to winning.

Recorded per class of shapes and per device: how much slower than the fastest each choice was. A class is every size
rounded up to a power of two and what it divides by, dtypes and the order of strides. A later start drops, before they
are compiled and timed, the choices that were never close. A class, a choice, a version or a device that the record does
not know: all choices, as stock. That a class has one winner is a guess: one template took five times as long with 120
rows as with 112, 121 or 128.

Which kernel wins, and so the last bits of a result, differs between two stock starts, too: that is autotuning. A pruned
start picks among the kernels that stock picks from. Not known here: kernels of Triton's own `@autotune`, whose winners
lie as files in inductor's cache folder.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeGuard

FORMAT = 1
"""Version of the JSON data. It changes when a key is renamed or changes its meaning."""

AGAIN = 20
"""After so many starts with fewer choices a kernel is tuned in full again."""
CLOSE = 1.1
"""A choice up to so many times as slow as the fastest, in some shape of its class, is tried again."""

_KIND = "autotune winners"
_MARK = "initopt"
_DIVISOR = 16
"""What divides by this is one class, as for Triton, which compiles for it apart."""
_MOST = 1024
"""Kernels that are kept."""
_CHOICES = 64
"""Choices that are kept of each: the fastest."""


@dataclass(frozen=True)
class Kernel:
    """What is known of one operation in one class of shapes.

    `ratios` has the time of each choice over that of the fastest, the least seen in the class. `winner` was the
    fastest of the last tuning with all choices, which took `seconds`; `starts` have used it since.
    """

    ratios: Mapping[str, float]
    winner: str
    seconds: float
    starts: int = 0

    def close(self, top: int) -> tuple[str, ...]:
        """The choices to try: at most `top`, the winner first, then those that were close, by their ratios."""
        others = sorted((ratio, name) for name, ratio in self.ratios.items() if ratio <= CLOSE and name != self.winner)
        return (self.winner, *(name for _, name in others))[:top]


@dataclass(frozen=True)
class Winners:
    """The kernels of one device, by operation and class of shapes. `versions` are those of the libraries."""

    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    device: str = field(default_factory=lambda: device())
    versions: Mapping[str, str] = field(default_factory=lambda: versions())

    def to_data(self) -> dict[str, Any]:
        """Everything as JSON data."""
        return {"initopt": _KIND, "format": FORMAT, **asdict(self)}

    @classmethod
    def from_data(cls, data: Any) -> Winners:
        """The winners in JSON data. Raises ValueError that says what is wrong with it."""
        if not isinstance(data, Mapping) or data.get("initopt") != _KIND:
            raise ValueError("this is no record of autotune winners")
        if data.get("format") != FORMAT:
            raise ValueError(
                f"this record of autotune winners has format {data.get('format')!r}, this initopt reads format {FORMAT}"
            )
        kernels, place, made = data.get("kernels"), data.get("device"), data.get("versions")
        if not isinstance(kernels, Mapping) or len(kernels) > _MOST or not isinstance(place, str) or not _texts(made):
            raise ValueError(f"a record of autotune winners has versions, a device and at most {_MOST} kernels")
        return cls({str(name): _kernel(name, one) for name, one in kernels.items()}, place, dict(made))


@dataclass(frozen=True)
class Tuned:
    """What one tuning did: of `choices` it tried `tried`, which took `seconds` (0 where one was left: nothing to try).

    `full_seconds` is what trying all took when they were tried last, here or in the record (0 where unknown). `loss` is
    how much slower the fastest of the recorded choices is than the winner, as a fraction; it is measured where all were
    tried although a record was there, else None.
    """

    kernel: str
    choices: int
    tried: int
    seconds: float
    winner: str
    full_seconds: float = 0.0
    loss: float | None = None

    @property
    def line(self) -> str:
        """All of it in one line."""
        saved = max(0.0, self.full_seconds - self.seconds) if self.tried < self.choices else 0.0
        parts = [f"{self.kernel}: {self.tried} of {self.choices} choices in {self.seconds:.2f} s, {self.winner}"]
        parts += [f"~{saved:.2f} s saved"] if saved else []
        parts += [f"the recorded choice is {self.loss:.0%} slower"] if self.loss is not None else []
        return ", ".join(parts)


class Tuning:
    """What a start tunes, and what is known afterwards. Made by `pruned`."""

    def __init__(self, winners: Winners | None, top: int) -> None:
        # What this start finds is for the next one: the first start of all tries what stock tries.
        self._record: Mapping[str, Kernel] = winners.kernels if winners is not None else {}
        self._known = dict(self._record)
        self._used: set[str] = set()
        self._timed_before: dict[str, int] = {}
        self._top = top
        self._device = device()
        self._tuned: list[Tuned] = []
        self._broken = False

    @property
    def tuned(self) -> tuple[Tuned, ...]:
        """Every tuning of this start, in order."""
        return tuple(self._tuned)

    def winners(self) -> Winners:
        """What was known and what this start has found, for the next one."""
        kernels = {
            name: replace(kernel, starts=kernel.starts + (name in self._used)) for name, kernel in self._known.items()
        }
        # What was tuned last stays.
        return Winners(dict(list(kernels.items())[-_MOST:]), self._device)

    def choose(self, choices: list[Any]) -> list[Any]:
        """Return those of inductor's choices that are to be tried."""
        chosen: list[Any] = self._guarded(lambda: self._choose(choices), choices)
        return chosen

    def timed(self, timings: Mapping[Any, float], name: str, nodes: Any, choices: Sequence[Any], *_: Any) -> None:
        """Take in what inductor measured, in milliseconds, by choice."""
        self._guarded(lambda: self._timed(timings, name), None)

    def _guarded(self, function: Callable[[], Any], otherwise: Any) -> Any:
        if self._broken:
            return otherwise
        try:
            return function()
        except Exception as error:
            # Rather a start with all choices than none at all.
            self._broken = True
            warnings.warn(
                f"initopt: autotuning is left to torch {importlib.metadata.version('torch')}, whose choices are not as "
                f"expected ({type(error).__name__}: {error})",
                stacklevel=4,
            )
            return otherwise

    def _choose(self, choices: list[Any]) -> list[Any]:
        if len(choices) < 2:
            return choices
        kernel = _class_of(choices)
        known = self._record.get(kernel)
        kept = choices
        if known is not None and known.starts < AGAIN:
            texts = [choice_text(choice) for choice in choices]
            close = known.close(self._top)
            if known.winner in texts:
                kept = [choice for choice, text in zip(choices, texts, strict=True) if text in close]
        for choice in choices:
            choice.annotations[_MARK] = (kernel, len(choices), len(kept))
        if len(kept) < len(choices):
            self._used.add(kernel)
        if len(kept) == 1:
            # Nothing is timed then, and nothing told.
            full = known.seconds if known is not None else 0.0
            self._tuned.append(Tuned(kernel, len(choices), 1, 0.0, choice_text(kept[0]), full))
        return kept

    def _timed(self, timings: Mapping[Any, float], name: str) -> None:
        times: dict[str, float] = {}
        mark = None
        for choice, milliseconds in timings.items():
            mark = choice.annotations.get(_MARK, mark)
            if math.isfinite(milliseconds) and milliseconds > 0:
                text = choice_text(choice)
                times[text] = min(milliseconds, times.get(text, math.inf))
        if mark is None or not times:
            return
        kernel, offered, kept = mark
        winner = min(times, key=times.__getitem__)
        ratios = {text: time / times[winner] for text, time in times.items()}
        seconds, loss, starts = self._seconds(name), None, 0
        full = seconds if kept == offered else 0.0
        recorded, known = self._record.get(kernel), self._known.pop(kernel, None)
        if recorded is not None and kept == offered:
            close = [ratios[text] for text in recorded.close(self._top) if text in ratios]
            loss = min(close) - 1 if close else None
        # Where it was time to tune in full again, what the record says ends here.
        if known is not None and (kept < offered or known.starts < AGAIN):
            for text, ratio in known.ratios.items():
                ratios[text] = min(ratio, ratios.get(text, math.inf))
            # Times that inductor has on disk take no time to get.
            full, starts = max(full, known.seconds), known.starts
        best = sorted(ratios.items(), key=lambda pair: (pair[1], pair[0] != winner))[:_CHOICES]
        self._known[kernel] = Kernel(dict(best), winner, full, starts)
        self._tuned.append(Tuned(kernel, offered, kept, seconds, winner, full, loss))

    def _seconds(self, name: str) -> float:
        """What torch's tuning of `name` took since the last call: compiling its choices and timing them."""
        from torch._dynamo.utils import compilation_time_metrics

        total = 0.0
        for key in (f"{name}_template_precompiling", f"{name}_template_autotuning"):
            times = compilation_time_metrics.get(key, [])
            total += sum(times[self._timed_before.get(key, 0) :])
            self._timed_before[key] = len(times)
        return total


@contextmanager
def pruned(winners: Winners | None = None, *, top: int = 3) -> Iterator[Tuning]:
    """Inside, inductor's autotuning tries the recorded choices only, at most `top` per kernel, and is recorded.

    It holds for the whole process. Without `winners`, or with those of another device or other versions, all choices
    are tried. Raises ValueError for `top` below 1.
    """
    if top < 1:
        raise ValueError(f"top={top}: at least one choice has to be tried")
    if winners is not None and (winners.device != device() or dict(winners.versions) != versions()):
        winners = None
    tuning = Tuning(winners, top)
    try:
        # Public by name in a private module. What is registered can only be removed all at once, others' too.
        from torch._inductor import select_algorithm

        selector = select_algorithm.get_algorithm_selector_cache()
        hooks: list[tuple[list[Any], Any]] = [
            (selector.preprocessing_fns, tuning.choose),
            (selector.feedback_saver_fns, tuning.timed),
        ]
    except (ImportError, AttributeError) as error:
        warnings.warn(f"initopt: autotuning is left to this torch, which is unknown ({error})", stacklevel=3)
        yield tuning
        return
    for functions, function in hooks:
        functions.append(function)
    try:
        yield tuning
    finally:
        for functions, function in hooks:
            if function in functions:
                functions.remove(function)


def versions() -> dict[str, str]:
    """The versions, as installed, of what makes the kernels."""
    found = {}
    for name in ("torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def device() -> str:
    """What the times were measured on: the accelerator, or the processor with its vector width and thread count."""
    import torch

    precision = torch.get_float32_matmul_precision()
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} {major}.{minor}, float32 {precision}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_processor()} {capability}, {torch.get_num_threads()} threads, float32 {precision}"


def choice_text(choice: Any) -> str:
    """A choice with its parameters, the same in every process: inductor numbers the names."""
    kind = getattr(choice, "category", None) or re.sub(r"_\d+$", "", str(choice.name))
    about = str(choice.description or "").strip()
    return f"{kind}({about})" if about else str(kind)


def _class_of(choices: Sequence[Any]) -> str:
    """The operation and the class of its shapes. Choices of other kinds than before are another class."""
    kinds = sorted({choice_text(choice).partition("(")[0] for choice in choices})
    # Templates may see their inputs packed or in another order.
    plain = next((choice for choice in choices if type(choice).__name__ == "ExternKernelCaller"), choices[0])
    inputs = ", ".join(_tensor(node.get_size(), node.get_stride(), node.get_dtype()) for node in plain.input_nodes)
    layout = plain.layout
    out = _tensor(layout.size, layout.stride, layout.dtype)
    return f"{'|'.join(kinds)}: {inputs} -> {out} on {layout.device.type}"


def _tensor(size: Sequence[Any], stride: Sequence[Any], dtype: Any) -> str:
    numbers = [_rounded(one) for one in size]
    try:
        order = sorted(range(len(stride)), key=lambda dim: (-int(stride[dim]), dim))
    except TypeError:  # a stride that is a symbol
        order = list(range(len(stride)))
    transposed = "" if order == sorted(order) else f"[{''.join(map(str, order))}]"
    return f"{'x'.join(numbers)}{transposed} {str(dtype).removeprefix('torch.')}"


def _rounded(size: Any) -> str:
    try:
        number = int(size)
    except TypeError:  # a symbol
        return "s"
    if number <= 0:
        return "0"
    divisor = min(number & -number, _DIVISOR)
    rounded = 1 << (number - 1).bit_length()
    return str(rounded) if divisor == min(rounded, _DIVISOR) else f"{rounded}/{divisor}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _kernel(name: Any, data: Any) -> Kernel:
    if not isinstance(data, Mapping) or set(data) != {"ratios", "winner", "seconds", "starts"}:
        raise ValueError(f"kernel {name!r} has not ratios, winner, seconds and starts, but {data!r}")
    ratios, winner, seconds, starts = data["ratios"], data["winner"], data["seconds"], data["starts"]
    good = (
        isinstance(ratios, Mapping)
        and 0 < len(ratios) <= _CHOICES
        and all(isinstance(text, str) and _is_time(ratio) and ratio >= 1 for text, ratio in ratios.items())
        and winner in ratios
        and _is_time(seconds)
        and type(starts) is int
        and starts >= 0
    )
    if not good:
        raise ValueError(f"kernel {name!r} has ratios from 1 on, a winner among them, seconds and starts; not {data!r}")
    return Kernel({text: float(ratio) for text, ratio in ratios.items()}, winner, float(seconds), starts)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _texts(value: Any) -> TypeGuard[Mapping[str, str]]:
    return isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)
