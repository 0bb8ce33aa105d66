"""Loading compiled code without making the compiled headers that only compiling needs.

Before Inductor loads a binary it makes a compiled header, in seconds of the C++ compiler and some 150 MB where the host
has none yet, whether or not anything is left to compile. Where the binaries came from elsewhere that would be most of
what a start costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from initopt.replaced import on_this_thread


@contextmanager
def as_text() -> Iterator[None]:
    """Let this thread's compiles include headers as they are, until a graph is found that is yet to be compiled.

    Neither the code nor any key of a cache depends on it. On a torch that makes its headers elsewhere it does nothing.
    """
    before = missed()
    with ExitStack() as stack:
        try:
            from torch._inductor import codecache

            # There is no public way: the option that switches these headers off enters the key of every graph.
            replaced = on_this_thread(codecache, "_precompile_header", _as_it_is, when=lambda: missed() == before)
            stack.enter_context(replaced)
        except (ImportError, AttributeError):
            pass
        yield


def missed() -> int:
    """How many graphs Inductor's cache did not have, in this process."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_miss"])


def _as_it_is(header: str, *_: Any, **__: Any) -> str:
    # What comes of this is included by its name, which the compiler looks up where it finds torch's headers.
    return header
