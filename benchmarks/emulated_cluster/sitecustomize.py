"""Python imports this as it starts, where `bench_run.py` has put its folder on PYTHONPATH: a cluster's waits, emulated.

So neither the trainer nor initopt knows of it, and it is there in every process, whoever starts it. Once torch is
imported, collectives and the making of groups wait as `trainers/emulation.py` says: EMULATED_COLLECTIVE is the seconds
of one (with those of its bytes), EMULATED_RENDEZVOUS the seconds of a process group. A process that has waited says so
on stderr as it ends (`emulated: 57 collectives waited 0.114 s`).
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


class _Torch:
    """Stands among the finders of imports until torch is looked for, and acts when that was executed."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        from benchmarks.trainers import emulation, emulation_values

        emulation_values.COLLECTIVE_ALPHA_SECONDS = float(os.environ["EMULATED_COLLECTIVE"])
        emulation_values.RENDEZVOUS_SECONDS = float(os.environ["EMULATED_RENDEZVOUS"])
        emulation.install("cluster")
        waited: list[float] = []
        seconds = emulation.collective_seconds

        def collective_seconds(payload: int) -> float:
            waited.append(seconds(payload))
            return waited[-1]

        emulation.collective_seconds = collective_seconds
        atexit.register(_say, waited)


def _say(waited: list[float]) -> None:
    if waited:
        # In one write: the ranks have one stderr.
        sys.stderr.write(f"emulated: {len(waited)} collectives waited {sum(waited):.3f} s\n")


if "EMULATED_COLLECTIVE" in os.environ:
    sys.meta_path.insert(0, _Torch())

# The one that would be there without this one, if any: the interpreter knows one that is missing.
_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if path != _folder]
sys.path_importer_cache.pop(_folder, None)
sys.modules.pop(__name__, None)
import sitecustomize  # noqa: E402, F401
