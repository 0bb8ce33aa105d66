"""Compiled code of earlier starts and of other ranks: looked up, made by one rank for all, kept for the next start.

No start-up needs what is here. What is missing, damaged, foreign or late leads to compiling as without it, and one
warning. Every key has a folder of its own, which torch's compiler is pointed to: so code for another processor is never
a hit, and what a start needs are the files of one folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from initopt.compile_cache import headers, instruction_sets
from initopt.compile_cache.authenticity import SigningKey
from initopt.compile_cache.autotune import Tuned
from initopt.compile_cache.key import Key
from initopt.compile_cache.known import DOCUMENTS, Known
from initopt.compile_cache.later import call_after_compiles
from initopt.compile_cache.leader import Outcome, one_for_all
from initopt.compile_cache.meeting import all_there
from initopt.compile_cache.store import ArtifactStore, StoreError, default_place
from initopt.compile_cache.within import within
from initopt.rank_numbers import ranks_in_short
from initopt.record import CompileCache, step

if TYPE_CHECKING:
    import torch

PATIENCE = 600.0
"""Seconds that ranks wait for the one that compiles, before another one does."""
ANSWER = 30.0
"""Seconds that a store may take to answer what a start-up waits for; compiled code may take as long as the patience."""

INSTRUCTION_SETS = "instruction-sets"
"""The document with what a host's compiler can build for."""

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_OURS = "initopt-"
SAVING = 120.0
"""Seconds that keeping something may take while nobody waits; a process that ends waits for it."""

CompileNow = Callable[[Callable[[str], None]], int]
"""Compiles on the calling thread, given a function that says to whom waits what it does; returns how many graphs."""


@dataclass(frozen=True)
class Ranks:
    """Those that start up together. `store` is a torch.distributed store that all of them share; None for one rank.

    `startup` is what they call this start-up, and no other one in this attempt of the job.
    """

    store: Any
    rank: int
    world_size: int
    startup: str = ""


class Uncached:
    """A start-up without a cache: every rank compiles what it needs. `patience` is in seconds."""

    def __init__(self, ranks: Ranks, *, patience: float = PATIENCE, between: Callable[[], None] = lambda: None) -> None:
        self.ranks = ranks
        self.found = CompileCache("alone")
        self.known = Known()
        self.tuned: tuple[Tuned, ...] = ()
        """What autotuning did while the code was made."""
        self._patience = patience
        self._between = between

    def look_up(self) -> bool:
        """Say whether the code is there already."""
        return False

    def learn(self, name: str, data: Mapping[str, Any]) -> None:
        """Have a document about this model (see `known`) kept for the next start, when the code is."""

    def make(self, compile_now: CompileNow) -> int:
        """Have the code compiled, and return the number of graphs."""
        return compile_now(_to_nobody)

    def meet(self) -> tuple[int, ...]:
        """Wait until all ranks have their code; return those that were waited for in vain, after a warning.

        A rank that still compiles would else be missed by the others in a collective, whose limit is the group's.
        """
        if self.ranks.store is None:
            return ()
        missing = all_there(
            self.ranks.store,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            topic=f"{self.ranks.startup}/compiled",
            patience=self._patience,
            between=self._between,
        )
        if missing:
            named = f"rank{'s' if len(missing) > 1 else ''} {ranks_in_short(missing)}"
            warnings.warn(
                f"initopt: {named} had not compiled after {self._patience:g} s; the first step waits for it as long as "
                "the process group allows",
                stacklevel=2,
            )
        return missing

    def keep(self) -> None:
        """Keep what was compiled and learned, now and after later compiles, on threads that nobody waits for."""


class Cache(Uncached):
    """The compiled code of one key in one start-up, made by `open`. The methods are called in their order here."""

    def __init__(
        self,
        key: Key,
        store: ArtifactStore | None,
        scope: str,
        secret: str,
        ranks: Ranks,
        *,
        patience: float,
        between: Callable[[], None],
    ) -> None:
        super().__init__(ranks, patience=patience, between=between)
        self.key = key
        self.folder = Path()
        self._store = store
        self._scope = scope
        self._secret = secret
        self._topics = 0
        self._outcome = Outcome("alone", None, 0.0)
        self._hit = False
        self._why: list[str] = []
        self._files = self._bytes = 0
        self._names: frozenset[str] = frozenset()
        self._learned: dict[str, Mapping[str, Any]] = {}
        self._keeps = True
        self._warned = False
        self._saving = threading.Lock()

    @classmethod
    def open(
        cls,
        key: Key,
        device: torch.device,
        ranks: Ranks,
        *,
        place: str | Path | None = None,
        shared: bool | None = None,
        patience: float = PATIENCE,
        between: Callable[[], None] = lambda: None,
    ) -> Uncached:
        """Point torch's compiler at the folder of this key, for which `place` has what other starts made.

        With `shared` (default: for an address of fsspec) all hosts see the same there. Whatever fails leads to a cache
        that has nothing. `patience` is in seconds; `between` is called while this rank waits.
        """
        where = default_place() if place is None else os.fspath(place)
        shared = "://" in where if shared is None else shared
        store, secret, scope, problem = None, "", "", ""
        try:
            signing = SigningKey.find()
            store = within(ANSWER, lambda: ArtifactStore(where, signing))
            if not shared:
                os.makedirs(where, exist_ok=True)
            # Who has another secret can use nothing of what these ranks make.
            secret = signing.name.hex()[:8]
            scope = f"{'job' if shared else _identity(Path(where))}/{secret}"
        except Exception as error:
            store, problem = None, f"compiled code is not kept ({_said(error)}); all compiles as without a cache"
        cache = cls(key, store, scope, secret, ranks, patience=patience, between=between)
        if problem:
            cache._warn(problem)
        try:
            if device.type == "cpu":
                cache.key = Key({**key.parts, "instruction sets": cache._instruction_sets()})
            cache.folder = _entered(cache.key)
        except Exception as error:
            cache._warn(
                f"compiled code is neither looked up nor kept ({_said(error)}); all compiles as without a cache"
            )
            return Uncached(ranks, patience=patience, between=between)
        cache._scope = scope or _identity(cache.folder)
        about = {name: cache._named(name) for name in DOCUMENTS}
        documents = cache._documents(tuple(about.values()))
        cache.known = Known.of({name: documents[stored] for name, stored in about.items() if stored in documents})
        return cache

    def look_up(self) -> bool:
        """Fill the folder from what is stored, and say whether the code is there.

        One rank looks for all that share a place and have the same key, so that all of them find it or none does.
        """
        self._outcome = self._one_for_all("look-up", self._look, self._look_as_told)
        self.found = replace(self.found, hit=self._hit, files=self._files, bytes=self._bytes, why="; ".join(self._why))
        return self._hit

    def learn(self, name: str, data: Mapping[str, Any]) -> None:
        """Have a document about this model (see `known`) kept for the next start, when the code is."""
        self._learned[name] = data

    def make(self, compile_now: CompileNow) -> int:
        """Have the code compiled: here if it is there already or this rank leads, else after the rank that does."""
        graphs = 0

        def work(say: Callable[[str], None]) -> str:
            nonlocal graphs
            graphs = compile_now(say)
            if graphs:
                self._save(self._patience)
                self._done()
            return json.dumps({"graphs": graphs, "folder": _identity(self.folder)})

        def use(told: str) -> None:
            made = json.loads(told)
            if made["graphs"] and made["folder"] != _identity(self.folder) and not self._load():
                raise RuntimeError("what the other rank compiled is not in the store, as far as this rank can see")

        if not self._hit:
            own = self._documents((self._class_name,)).get(self._class_name, {})
            self._outcome = self._one_for_all(f"compile/{own.get('graphs', '')}", work, use)
        if self._hit or self._outcome.role == "followed":
            self._keeps = self._outcome.role != "followed"
            before = headers.missed()
            with headers.as_text():
                graphs = compile_now(_to_nobody)
            if headers.missed() > before:
                self._differs()
        outcome = self._outcome
        roles: dict[str, Literal["leader", "follower", "alone"]] = {"led": "leader", "followed": "follower"}
        self.found = CompileCache(
            role="alone" if self.ranks.world_size == 1 else roles.get(outcome.role, "alone"),
            leader=-1 if outcome.leader is None else outcome.leader,
            waited=outcome.waited,
            hit=self._hit,
            files=self._files,
            bytes=self._bytes,
            why="; ".join(dict.fromkeys(filter(None, (*self._why, outcome.why)))),
        )
        return graphs

    def keep(self) -> None:
        """Keep what was compiled and learned, now and after later compiles, on threads that nobody waits for.

        Ranks that use what another one compiled leave that to it.
        """
        if self._store is not None and self._keeps:
            self._save_aside()
            call_after_compiles(self._save)

    def keep_now(self) -> threading.Thread | None:
        """Keep what was compiled until now, once for all ranks that looked it up together; nothing later.

        Returns the thread that does so, None if there is nothing to do.
        """
        return self._save_aside() if self._store is not None and self._outcome.role != "followed" else None

    def by_one_rank(self, what: str, work: Callable[[Callable[[str], None]], str]) -> Outcome:
        """Do `work` on one of the ranks whose compiler uses the same folder; return on each when it is done.

        `what` is used once. `work` gets a function that says to whom waits what it does. See `leader.one_for_all`.
        """
        return one_for_all(
            self.ranks.store,
            rank=self.ranks.rank,
            topic=f"{self.ranks.startup}/{what}/{self.key.digest}/{_identity(self.folder)}",
            patience=self._patience,
            work=work,
            use=_to_nobody,
            between=self._between,
        )

    def _one_for_all(
        self, what: str, work: Callable[[Callable[[str], None]], str], use: Callable[[str], None]
    ) -> Outcome:
        self._topics += 1
        topic = f"{self.ranks.startup}/{self._topics}/{what}/{self.key.digest}/{self._scope}"
        return one_for_all(
            self.ranks.store,
            rank=self.ranks.rank,
            topic=topic,
            patience=self._patience,
            work=work,
            use=use,
            between=self._between,
        )

    def _look(self, say: Callable[[str], None]) -> str:
        """Look in the folder and in the store, and tell the others whether the code is there."""
        if self._complete.exists():
            self._hit = True
            self._restock()
        else:
            self._hit = self._load()
            store = self._store
            if not self._hit and not self._why and store is not None:
                with _problems(self):
                    self._why.append(within(ANSWER, lambda: store.why_missed(self.key)))
        return json.dumps({"hit": self._hit, "folder": _identity(self.folder), "why": self._why[:1]})

    def _look_as_told(self, told: str) -> None:
        found = json.loads(told)
        self._why += found["why"]
        here = found["folder"] == _identity(self.folder) or self._complete.exists()
        self._hit = found["hit"] and (here or self._load())

    def _load(self) -> bool:
        """Fill the folder from the store, and say whether there was anything."""
        store = self._store
        if store is None:
            return False
        with _problems(self):
            loaded = within(self._patience, lambda: store.load(self.key, self.folder))
            if loaded.rejected:
                more = f" and {len(loaded.rejected) - 1} more" if len(loaded.rejected) > 1 else ""
                self._why.append(loaded.rejected[0])
                without = "" if loaded.bundles else "; the start-up compiles as without it"
                self._warn(f"compiled code in {store.place} was not opened ({loaded.rejected[0]}{more}){without}")
            self._names |= loaded.names
            self._files, self._bytes = len(loaded.names), loaded.bytes
            # What a bundle that was not opened had is compiled, and kept, once more: then the others are all there is.
            if loaded.bundles:
                self._done()
            return loaded.bundles > 0
        return False

    def _save(self, seconds: float = SAVING) -> None:
        store = self._store
        if store is None:
            return
        with _problems(self), self._saving:
            within(seconds, lambda: store.save(self.key, self.folder, self._names))
            while self._learned:
                name, data = self._learned.popitem()
                self._put_document(self._named(name), data)

    def _restock(self) -> None:
        """Store what is in the folder if somebody has emptied the store, which others rely on."""
        store = self._store
        if store is not None:
            with _problems(self):
                if not within(ANSWER, lambda: store.has(self.key)):
                    self._save(self._patience)

    def _save_aside(self) -> threading.Thread:
        # Not a daemon: it takes moments, and what it writes is for the next start even if this job ends now.
        thread = threading.Thread(target=self._save, name="initopt-compile-cache")
        thread.start()
        return thread

    def _differs(self) -> None:
        """Remember that this rank has other graphs than the one that compiled for it, and needs another leader."""
        leader = self._outcome.leader
        others = leader not in (None, self.ranks.rank)
        self._why.append(f"some graphs are not those of rank {leader}" if others else "but not all of it")
        self._keeps = True
        self._put_document(self._class_name, {"graphs": _graphs() or f"rank {self.ranks.rank}"})

    @property
    def _class_name(self) -> str:
        return self._named(f"class-{self.ranks.rank}-of-{self.ranks.world_size}")

    def _named(self, name: str) -> str:
        """The stored name of a document. Users with other secrets have others, which they can't read."""
        return f"{name}-{self.key.host if name == INSTRUCTION_SETS else self.key.model}-{self._secret}"

    @property
    def _complete(self) -> Path:
        """The mark that the folder has all that a start compiles ahead."""
        # Among torch's locks, which are no part of what is kept.
        return self.folder / "locks" / "initopt.complete"

    def _done(self) -> None:
        self._complete.parent.mkdir(exist_ok=True)
        self._complete.touch()

    def _instruction_sets(self) -> str:
        """Let one rank of each host ask what the compiler can build for, unless that is known; say what came out.

        It decides what code is made of a graph, and no key of torch's has it.
        """
        name = self._named(INSTRUCTION_SETS)
        known = self._documents((name,)).get(name)
        if known is None or not instruction_sets.know(known):

            def work(say: Callable[[str], None]) -> str:
                say("looks what this CPU can do")
                with step("instruction_sets"):
                    instruction_sets.ask()
                return json.dumps(instruction_sets.verdicts())

            def use(told: str) -> None:
                if not instruction_sets.know(json.loads(told)):
                    raise RuntimeError("this rank has another CPU or compiler")

            host = f"instruction-sets/{self.key.host}/{socket.gethostname()}"
            one_for_all(
                self.ranks.store,
                rank=self.ranks.rank,
                topic=f"{self.ranks.startup}/{host}",
                patience=self._patience,
                work=work,
                use=use,
                between=self._between,
            )
            verdicts = instruction_sets.verdicts()
            # A no may be that of a busy machine, and is asked for again.
            if known is None and verdicts and all(verdicts.values()):
                self._put_document(name, verdicts)
        return ", ".join(name for name, can in instruction_sets.verdicts().items() if can) or "none"

    def _documents(self, names: tuple[str, ...]) -> dict[str, Mapping[str, Any]]:
        """Those of these documents that are there and can be opened."""
        found: dict[str, Mapping[str, Any]] = {}
        for name in names:
            # It is None from the first one on that is waited for in vain.
            store = self._store
            if store is not None:
                with _problems(self):
                    document = within(ANSWER, functools.partial(store.document, name))
                    if document is not None:
                        found[name] = document
        return found

    def _put_document(self, name: str, data: Mapping[str, Any]) -> None:
        store = self._store
        if store is not None:
            with _problems(self):
                within(ANSWER, lambda: store.put_document(name, data))

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _warn(text)


class _problems:
    """What goes wrong with the store inside the block is one warning and a remark, and no more."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self._cache._why.append(_said(error))
        self._cache._warn(f"the store of compiled code can't be used as it should ({_said(error)})")
        if isinstance(error, TimeoutError):
            # It would be waited for again and again.
            self._cache._store = None
        return True


def _entered(key: Key) -> Path:
    """Make the folder of the key, inside of what torch's compiler uses, and point the compiler at it."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    base = Path(cache_dir())
    if base.name.startswith(_OURS):
        base = base.parent
    folder = base / f"{_OURS}{key.digest}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[_FOLDER] = str(folder)
    return folder


def _graphs() -> str:
    """A digest of the graphs that this process has compiled or found, by torch's own keys of them; empty if unknown."""
    import torch

    try:
        saved = torch.compiler.save_cache_artifacts()
        artifacts = saved[1].artifacts if saved is not None else {}
    except Exception:
        return ""
    keys = sorted(f"{kind}/{key}" for kind, all_keys in artifacts.items() for key in all_keys)
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:32] if keys else ""


def _identity(folder: Path) -> str:
    """The same text on two ranks if, as far as they can see, it is the same folder."""
    there = folder.stat()
    return f"{socket.gethostname()}:{there.st_dev}:{there.st_ino}"


def _to_nobody(text: str) -> None:
    pass


def _warn(text: str) -> None:
    warnings.warn(f"initopt: {text}", stacklevel=4)


def _said(error: BaseException) -> str:
    """The first line of an error, after its type unless that only says whose it is."""
    text = "".join(str(error).splitlines()[:1])
    return text if isinstance(error, StoreError) else f"{type(error).__name__}: {text}"
