"""Which instruction sets of this CPU the compiler can build code for: asked once per host, known from then on.

Inductor asks by compiling a probe per instruction set and loading it in a child process, in every process anew. What
came out can be recorded and given to a later process of the same host and compiler. Its own switch for this,
`cpp.vec_isa_ok`, enters the key of every graph; what is done here enters none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_one_at_a_time = threading.Lock()


def candidates() -> list[Any]:
    """Return inductor's candidates for this CPU; none on other than x86, or on a torch that is not known.

    The truth of each is whether code for it compiles and loads here. Inductor asks all of them before its first C++
    kernel; the answers are kept in the process, the binaries on disk.
    """
    # All of this is private; there is no public way to ask.
    try:
        from torch._inductor import cpu_vec_isa

        there = cpu_vec_isa.x86_isa_checker()
        return [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in there for flag in str(isa).split())]
    except (ImportError, AttributeError):
        return []


def ask() -> None:
    """Ask for all candidates at once, each on a thread: inductor does one after the other, and waits for compilers."""
    isas = candidates()
    if isas:
        with ThreadPoolExecutor(len(isas), thread_name_prefix="initopt-isa") as pool:
            list(pool.map(bool, isas))


def verdicts() -> dict[str, bool]:
    """Ask for all candidates, and return what came out by name: `avx512`, and `avx512 with avx512_bf16` for an extra.

    Takes seconds where the probes are to be compiled, and a child process for each where they are not.
    """
    found: dict[str, bool] = {}
    for isa in candidates():
        found[str(isa)] = bool(isa)
        found |= {f"{isa} with {extra}": getattr(isa, _attribute(extra)) for extra in _extras(isa)}
    return found


def know(recorded: Mapping[str, bool]) -> bool:
    """Make recorded `verdicts` the answers of this process, and say whether that was done.

    It is not where they are for another CPU or torch than the one that is here, or where the user has set what
    inductor is to answer. Then inductor asks, as it would anyway. Other threads that ask meanwhile get its answer.
    """
    from torch._inductor import config

    isas = candidates()
    names = {name for isa in isas for name in (str(isa), *(f"{isa} with {extra}" for extra in _extras(isa)))}
    known = all(callable(getattr(isa, "check_build", None)) for isa in isas)
    if not isas or not known or names != set(recorded) or getattr(config.cpp, "vec_isa_ok", False) is not None:
        return False
    if not all(isinstance(verdict, bool) for verdict in recorded.values()):
        return False
    # Inductor's own questions to the CPU are asked as ever: only what takes a compiler is answered from the record.
    with _one_at_a_time:
        for isa in isas:
            with _answered(isa, recorded):
                bool(isa)
    return True


def _extras(isa: Any) -> list[str]:
    """What inductor's question for this instruction set also asks for, if the CPU has it, and keeps on the object."""
    from torch import cpu

    codes = [name.removeprefix("_").removesuffix("_code") for name in dir(isa) if name.endswith("_code")]
    kept = [extra for extra in codes if hasattr(isa, _attribute(extra))]
    return [extra for extra in kept if getattr(cpu, _attribute(extra), bool)()]


def _attribute(extra: str) -> str:
    return f"_is_{extra}_supported"


@contextmanager
def _answered(isa: Any, recorded: Mapping[str, bool]) -> Iterator[None]:
    thread = threading.get_ident()
    ask: Callable[[str], bool] = isa.check_build
    extras = {getattr(isa, f"_{extra}_code"): f"{isa} with {extra}" for extra in _extras(isa)}

    def answer(code: str) -> bool:
        return recorded[extras.get(code, str(isa))] if threading.get_ident() == thread else ask(code)

    # On the object, where it hides the method of its class.
    isa.check_build = answer
    try:
        yield
    finally:
        del isa.check_build
