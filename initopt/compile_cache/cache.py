"""Compiled code of earlier starts and of other ranks: looked up, made by one rank for all, kept for the next start.

No start-up needs what is here. What is missing, damaged, foreign or late leads to compiling as without it, and one
warning. Every key has a folder of its own, which torch's compiler is pointed to: so code of another processor is never
a hit, and what a start needs are the files of one folder.
"""

from __future__ import annotations

import collections
import json
import os
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from initopt.compile_cache import headers, instruction_sets
from initopt.compile_cache.authenticity import SigningKey
from initopt.compile_cache.key import Key, key_of
from initopt.compile_cache.later import call_after_compiles
from initopt.compile_cache.leader import Outcome, one_for_all
from initopt.compile_cache.meeting import all_there
from initopt.compile_cache.store import ArtifactStore, StoreError, default_place

if TYPE_CHECKING:
    import torch
    from torch import nn

PATIENCE = 600.0
"""Seconds that ranks wait for the one that compiles, before another one does."""

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_OURS = "initopt-"
_turns: collections.Counter[str] = collections.Counter()


@dataclass(frozen=True)
class Ranks:
    """Those that start up together. `store` is a torch.distributed store that all of them share; None for one rank."""

    store: Any
    rank: int
    world_size: int


@dataclass(frozen=True)
class Found:
    """How a rank came to its code, for the record. `hit`: it was there before this start."""

    role: str
    leader: int
    waited: float
    hit: bool
    files: int
    bytes: int
    why: str


class Cache:
    """The compiled code of one key, in one start-up; made by `look_up`. Its methods are called in their order here."""

    def __init__(self, ranks: Ranks, place: str, *, shared: bool, patience: float, between: Callable[[], None]) -> None:
        self.ranks = ranks
        self.place = place
        self.hit = False
        self._shared = shared
        self._patience = patience
        self._between = between
        self._key: Key | None = None
        self._store: ArtifactStore | None = None
        self._folder = Path()
        self._scope = ""
        self._outcome: Outcome | None = None
        self._loaded = (0, 0)
        self._keeps = True
        self._known: frozenset[str] = frozenset()
        self._missed = ""
        self._warned = False
        self._saving = threading.Lock()

    @classmethod
    def look_up(
        cls,
        parts: Mapping[str, nn.Module],
        options: Mapping[str, object],
        device: torch.device,
        ranks: Ranks,
        *,
        place: str | Path | None = None,
        shared: bool | None = None,
        patience: float = PATIENCE,
        between: Callable[[], None] = lambda: None,
    ) -> Cache:
        """Point torch's compiler at the folder of this key, and fill it from what is stored, if anything is.

        One rank looks for all that share a place (with `shared`, which is the default for an address of fsspec, all of
        the job, else those of a host) and have the same key, so that all of them find something or none does.
        Whatever fails leads to a cache that has nothing. `between` is called while this rank waits.
        """
        where = default_place() if place is None else os.fspath(place)
        shared = "://" in where if shared is None else shared
        cache = cls(ranks, where, shared=shared, patience=patience, between=between)
        try:
            cache._key = key_of(parts, options=options, device=device)
            cache._enter_folder()
            cache._open_store(device)
        except Exception as error:
            cache._warn(f"compiled code is neither looked up nor kept ({_first_line(error)})")
            return cache
        cache._outcome = one_for_all(
            ranks.store,
            rank=ranks.rank,
            topic=cache._topic("look-up"),
            patience=patience,
            work=cache._look,
            use=cache._look_as_told,
            between=between,
        )
        return cache

    def document(self, name: str) -> Mapping[str, Any] | None:
        """What an earlier start left about this model under this name, None if nothing that can be used."""
        return self._document(f"{name}-{self._key.model}") if self._key is not None else None

    def put_document(self, name: str, data: Mapping[str, Any]) -> None:
        """Leave something about this model for the next start, from the rank that keeps the code."""
        if self._key is not None and self._keeps:
            self._put_document(f"{name}-{self._key.model}", data)

    def make(self, compile_now: Callable[[Callable[[str], None]], int]) -> int:
        """Have the code compiled: here if it is there already or this rank leads, else after the rank that does.

        `compile_now` gets a function to say what it does to, and returns the number of graphs, as this does.
        """
        if self._key is None:
            return compile_now(_to_nobody)
        if self.hit:
            with headers.as_text():
                return compile_now(_to_nobody)
        graphs = 0

        def work(say: Callable[[str], None]) -> str:
            nonlocal graphs
            graphs = compile_now(say)
            if graphs:
                self._save()
                self._done()
            return json.dumps({"graphs": graphs, "folder": _identity(self._folder)})

        def use(told: str) -> None:
            made = json.loads(told)
            self._keeps = made["folder"] != _identity(self._folder)
            if made["graphs"] and self._keeps and not self._load():
                raise StoreError(self.place, "what the other rank compiled is not there")

        self._outcome = one_for_all(
            self.ranks.store,
            rank=self.ranks.rank,
            topic=self._topic("compile"),
            patience=self._patience,
            work=work,
            use=use,
            between=self._between,
        )
        if self._outcome.role == "followed":
            with headers.as_text():
                graphs = compile_now(_to_nobody)
        return graphs

    def meet(self) -> tuple[int, ...]:
        """Wait until all ranks have their code, and return those that were waited for in vain.

        A rank that is still compiling would else be missed by the others in a collective, which has a limit.
        """
        if self.ranks.store is None:
            return ()
        missing = all_there(
            self.ranks.store,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            topic=f"compiled/{_turn('compiled')}",
            patience=self._patience,
            between=self._between,
        )
        return missing

    @property
    def found(self) -> Found:
        """How this rank came to its code so far."""
        outcome = self._outcome or Outcome("alone", None, 0.0)
        role = {"led": "leader", "followed": "follower", "alone": "alone"}[outcome.role]
        if outcome.role == "led" and self.ranks.world_size == 1:
            role = "alone"
        leader = -1 if outcome.leader is None else outcome.leader
        files, size = self._loaded
        why = "; ".join(filter(None, (self._missed, outcome.why)))
        return Found(role, leader, outcome.waited, self.hit, files, size, why)

    def keep(self) -> None:
        """Keep what was compiled since, now and after every later compile, on threads that the training doesn't see."""
        if self._key is None or self._store is None or not self._keeps:
            return
        self._save_aside()
        call_after_compiles(self._save_aside)

    def _enter_folder(self) -> None:
        assert self._key is not None
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        base = Path(cache_dir())
        if base.name.startswith(_OURS):
            base = base.parent
        self._folder = base / f"{_OURS}{self._key.digest}"
        self._folder.mkdir(parents=True, exist_ok=True)
        os.environ[_FOLDER] = str(self._folder)
        self._scope = _identity(self._folder)

    def _open_store(self, device: torch.device) -> None:
        assert self._key is not None
        try:
            self._store = ArtifactStore(self.place, SigningKey.find())
            if not self._shared:
                os.makedirs(self.place, exist_ok=True)
                self._scope = _identity(Path(self.place))
        except Exception as error:
            self._store = None
            self._warn(f"compiled code is not kept ({_first_line(error)})")
            return
        if self._shared:
            self._scope = "job"
        if device.type == "cpu":
            verdicts = self._document(f"instruction-sets-{self._key.host}")
            if verdicts is None or not instruction_sets.know(verdicts):
                self._ask_later = True

    _ask_later = False
    """Whether the compiler asked for this host's instruction sets itself, which the next start then needn't."""

    def _look(self, say: Callable[[str], None]) -> str:
        """Look in the folder and in the store; return whether the code is there, for the other ranks."""
        assert self._key is not None
        if self._complete.exists():
            # Somebody may have emptied the store, which others rely on.
            if self._store is not None and not self._has_stored():
                self._save()
            self.hit = True
        elif self._store is not None:
            self.hit = self._load()
            if not self.hit and not self._missed:
                self._missed = self._why_missed()
        return json.dumps({"hit": self.hit, "folder": _identity(self._folder), "why": self._missed})

    def _look_as_told(self, told: str) -> None:
        found = json.loads(told)
        self._missed = found["why"]
        self._keeps = found["folder"] != _identity(self._folder)
        if found["hit"] and self._keeps and not self._complete.exists() and not self._load():
            self._missed = f"what rank {self.ranks.rank} was told of is not in {self.place}"
            return
        self.hit = bool(found["hit"])

    def _load(self) -> bool:
        """Fill the folder from the store, and say whether there was anything."""
        assert self._key is not None
        if self._store is None:
            return False
        try:
            loaded = self._store.load(self._key, self._folder)
        except StoreError as error:
            self._missed = _first_line(error)
            self._warn(f"compiled code could not be read ({_first_line(error)})")
            return False
        if loaded.rejected:
            more = f" and {len(loaded.rejected) - 1} more" if len(loaded.rejected) > 1 else ""
            self._missed = loaded.rejected[0]
            self._warn(f"compiled code in {self.place} was not opened ({loaded.rejected[0]}{more})")
        self._known |= loaded.names
        self._loaded = (len(loaded.names), loaded.bytes)
        if loaded.bundles:
            self._done()
        return loaded.bundles > 0

    def _save(self) -> None:
        assert self._key is not None
        if self._store is None:
            return
        try:
            with self._saving:
                self._store.save(self._key, self._folder, self._known)
            if self._ask_later:
                self._ask_later = False
                self._store.put_document(f"instruction-sets-{self._key.host}", instruction_sets.verdicts())
        except (StoreError, OSError, ValueError) as error:
            self._warn(f"compiled code was not kept ({_first_line(error)})")

    def _save_aside(self) -> None:
        # Not a daemon: it takes moments, and what it writes is for the next start even if this job ends now.
        threading.Thread(target=self._save, name="initopt-compile-cache").start()

    def _has_stored(self) -> bool:
        assert self._key is not None and self._store is not None
        try:
            return self._store.has(self._key)
        except StoreError:
            return True

    def _why_missed(self) -> str:
        assert self._key is not None and self._store is not None
        try:
            return self._store.why_missed(self._key)
        except StoreError as error:
            return _first_line(error)

    def _document(self, name: str) -> Mapping[str, Any] | None:
        if self._store is None:
            return None
        try:
            return self._store.document(name)
        except StoreError as error:
            self._warn(_first_line(error))
            return None

    def _put_document(self, name: str, data: Mapping[str, Any]) -> None:
        if self._store is None:
            return
        try:
            self._store.put_document(name, data)
        except (StoreError, ValueError) as error:
            self._warn(f"{name} was not kept ({_first_line(error)})")

    @property
    def _complete(self) -> Path:
        # Beside the folder, so that it is no file of it.
        return self._folder.with_name(f"{self._folder.name}.complete")

    def _done(self) -> None:
        """Note that the folder has all that a start compiles ahead."""
        self._complete.touch()

    def _topic(self, what: str) -> str:
        assert self._key is not None
        topic = f"{what}/{self._key.digest}/{self._scope}"
        return f"{topic}/{_turn(topic)}"

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"initopt: {text}; compiling goes on as without it", stacklevel=3)


def _turn(topic: str) -> int:
    """How often this process had the topic: ranks that start up several times do so together."""
    _turns[topic] += 1
    return _turns[topic]


def _identity(folder: Path) -> str:
    """The same text on two ranks if, as far as they can see, it is the same folder."""
    there = folder.stat()
    return f"{socket.gethostname()}:{there.st_dev}:{there.st_ino}"


def _to_nobody(text: str) -> None:
    pass


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"
