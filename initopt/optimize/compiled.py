"""`compile`: what torch compiles in a start-up is kept for the next start, and shared by the ranks of a host.

The parts of the model are not known here, so nothing is compiled before its turn. Before the first compile the compiler
is pointed at a folder for this script and this machine, filled with what earlier starts of the script have left in the
store (see `compile_cache`). Where ranks have no more than a core each, a graph is compiled by the first rank that comes
to it; the others, which come to the same number of compile, wait for that one and find its code. Nobody waits while it
compiles itself, so nobody waits in a circle. What torch keys its code by stays torch's affair: code of another graph is
not found.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from initopt.cores import share_of_rank
from initopt.optimize.saying import Saying
from initopt.record import Advised, CompileCache

if TYPE_CHECKING:
    from initopt.compile_cache.cache import Cache

NAME = "compile"

_TORCH = "2.13."
"""The versions whose compiler does nothing with other ranks unless one of the settings below says so."""

_MEETS = (
    ("torch._dynamo.config", "enable_compiler_collectives"),
    ("torch._inductor.config", "distributed_max_autotune_gemm"),
)
"""Settings with which ranks meet while they compile: then none may wait for another one."""

_OTHERS = ("fxgraph", "aotautograd")
"""Folders in torch's cache that say that it is in use."""


class CompiledOnce:
    """The compiled code of this process. `script` is what the job is called, `root` where its runs are kept."""

    def __init__(self, script: str, root: str, saying: Saying) -> None:
        self._script = script
        self._place = os.path.join(root, "compile_cache")
        self._saying = saying
        self._pid = os.getpid()
        self._handler: Any = None
        self._began = False
        self._cache: Cache | None = None
        self._hit = self._shares = False
        self._turn: _Turn | None = None
        self._led = self._followed = 0
        self._leader = -1
        self._waited = 0.0
        self._line = ""

    def watch(self, module: Any) -> None:
        """Hear of compiles from now on. `module` is torch's, with the documented way to do so."""
        self._handler = module.callback_handler
        self._handler.register_start_callback(self._starts)
        self._handler.register_end_callback(self._ends)

    def keep(self) -> None:
        """Keep what was compiled until now for the next start, on a thread of its own."""
        if self._cache is None:
            return
        count = self._cache.found.files
        told = [
            f"compiled code of an earlier start was there{f' ({count} files)' if count else ''}" if self._hit else "",
            f"{self._led} compiles were made here, for all ranks of this host, and are kept" if self._led else "",
            f"{self._followed} compiles were made by rank {self._leader}" if self._followed else "",
            "" if self._hit or self._shares else "what each rank compiled is kept",
        ]
        said = "; ".join(filter(None, told))
        if not said:
            return
        self._saying.applied(NAME, said, self._line)
        self._saying.code(self._found(self._cache))
        if not self._hit:
            text = "the parts of a model that `initopt.Compile` is told compile before the first batch is there"
            self._saying.advise(Advised(text, self._line, {}))
        saving = self._cache.keep_now()
        if saving is not None:
            # No fork meanwhile: a loader's worker would inherit what that thread holds.
            os.register_at_fork(before=saving.join)

    def end(self) -> None:
        """Hear of compiles no more."""
        handler, self._handler = self._handler, None
        if handler is not None:
            for callbacks, ours in ((handler.start_callbacks, self._starts), (handler.end_callbacks, self._ends)):
                if ours in callbacks:  # `torch._dynamo.reset` may have taken it away
                    callbacks.remove(ours)

    def _starts(self, about: Any) -> None:
        # Another backend than Inductor, which is not imported for this: it has no such cache.
        if os.getpid() != self._pid or "torch._inductor" not in sys.modules:
            return
        with self._saying.costs_only(NAME):
            if not self._began:
                self._began = True
                self._open()
            if self._cache is not None and self._shares:
                self._turn = _Turn(self._cache, f"{about.callback_trigger.name}/{about.compile_id}")
                self._waited += self._turn.wait()

    def _ends(self, about: Any) -> None:
        turn, self._turn = self._turn, None
        if turn is not None and os.getpid() == self._pid:
            with self._saying.costs_only(NAME):
                turn.over()
                self._led += turn.leads
                self._followed += not turn.leads
                self._leader = turn.leader

    def _open(self) -> None:
        torch: Any = sys.modules["torch"]
        distributed = torch.distributed
        self._line = self._saying.here()
        why = self._why_not()
        if why:
            self._saying.left(NAME, why)
            return
        from initopt.compile_cache.cache import Cache, Ranks
        from initopt.compile_cache.key import key_of

        joined = distributed.is_available() and distributed.is_initialized()
        # Private, as all ways to the store of the default group are.
        store = distributed.distributed_c10d._get_default_store() if joined else None
        rank, world_size = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        model = hashlib.sha256(f"script {self._script}".encode()).hexdigest()[:32]
        ranks = Ranks(store if world_size > 1 else None, rank, world_size, "optimize")
        cache = Cache.open(key_of(model, options={}, device=device), device, ranks, place=self._place)
        if not isinstance(cache, Cache):
            self._saying.left(NAME, "it could not be found out what compiled code depends on here")
            return
        self._hit = cache.look_up()
        # Ranks with cores to spare compile at once, and would only be later one after the other.
        self._shares = not self._hit and share_of_rank() == 1
        self._cache = cache

    def _why_not(self) -> str:
        import torch
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        if not str(torch.__version__).startswith(_TORCH):
            return f"torch {torch.__version__} is not one that is known"
        for module, name in _MEETS:
            if getattr(sys.modules.get(module), name, False):
                return f"{module}.{name} is set, so ranks meet while they compile"
        config = torch._inductor.config
        if config.force_disable_caches or not config.fx_graph_cache:
            return "torch's caches of compiled code are switched off"
        base = Path(cache_dir())
        base = base.parent if base.name.startswith("initopt-") else base
        if any((base / name).is_dir() for name in _OTHERS) and not any(base.glob("initopt-*")):
            return f"torch's own cache in {base} is in use, and stays so: a first start would compile all of it anew"
        return ""

    def _found(self, cache: Cache) -> CompileCache:
        alone = cache.ranks.world_size == 1 or not (self._led or self._followed)
        return CompileCache(
            role="alone" if alone else "leader" if self._led else "follower",
            leader=self._leader,
            waited=self._waited,
            hit=self._hit,
            files=cache.found.files,
            bytes=cache.found.bytes,
            why=cache.found.why,
        )


class _Turn:
    """One compile, for which this rank leads or waits. Who waits is told so on a thread of its own."""

    def __init__(self, cache: Cache, what: str) -> None:
        self.leads = False
        self.leader = -1
        self._cache = cache
        self._what = what
        self._may_go = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="initopt-compile", daemon=True)

    def wait(self) -> float:
        """Return once this rank may compile: it leads, or its leader is done. Returns the seconds waited."""
        begun = time.monotonic()
        self._thread.start()
        self._may_go.wait()
        return time.monotonic() - begun

    def over(self) -> None:
        """This rank has compiled."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        def work(say: Any) -> str:
            say(f"compiles {self._what}")
            self.leads = True
            self._may_go.set()
            self._over.wait()
            return ""

        try:
            outcome = self._cache.by_one_rank(self._what, work)
            self.leader = self._cache.ranks.rank if outcome.leader is None else outcome.leader
        finally:
            self._may_go.set()
