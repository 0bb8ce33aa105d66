"""Where compiled artifacts and what is known about them are kept between starts: a folder, or an address of fsspec.

Per key a set of signed bundles that is only added to, and signed JSON documents beside them. Several jobs and ranks may
read and write at once. What does not carry the signature of the job's own secret is never opened, and what goes wrong
is one `StoreError` (or a reason in `Loaded.rejected`): the caller goes on without.

    PLACE/3f2a.../key.json             the parts of the key, to be read by people; unsigned, never trusted
    PLACE/3f2a.../used                 when it was last loaded or added to
    PLACE/3f2a.../18c5...-9b01.bundle  time and digest of the content
    PLACE/documents/NAME.json
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from initopt.compile_cache.authenticity import FILE, SECRET, SIGNATURE, SigningKey
from initopt.compile_cache.bundle import (
    MOST,
    BundleError,
    merge,
    names_of,
    pack,
    stamps_in,
    unchanged_in,
    unpack,
)
from initopt.compile_cache.key import Key
from initopt.record import run_root

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

FORMAT = 1
"""Version of what is stored. It changes when an initopt of before could not read it."""

LIMIT = 10 * 2**30
"""Bytes that a store may hold: beyond it the keys that were not used for longest go."""

BUNDLES = 16
"""Bundles of one key; the addition after that makes them one."""

DOCUMENT = 2**20
"""Bytes of one document."""

DOCUMENTS = 1024
"""Documents of a store; beyond it the oldest go."""

_MAGIC = b"initopt\0"
_HEAD = struct.Struct(f">8sH8s16sQ{SIGNATURE}s")
"""Magic, format, name of the secret, digest of where it belongs, bytes of the payload, signature."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_BUNDLE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.bundle")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ABOUT = "key.json"
_USED = "used"
_SHOWN = 64 * 2**10
_STALE = 3600.0
"""Seconds after which a temporary file has no writer any more."""


class StoreError(OSError):
    """A store, or something in it, that can't be used. The message names it and the cause; `place` is the store."""

    def __init__(self, place: str, problem: str) -> None:
        self.place = place
        self.problem = problem
        super().__init__(f"the artifact store {place}: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.place, self.problem)


class _Refused(Exception):
    """Why a file of the store is not opened."""


@dataclass(frozen=True)
class Loaded:
    """What `load` found: bundles that were opened, files they wrote and their bytes as stored, seconds it took.

    `names` are those of all files that are now in the folder from the store (also those that were there already), for
    `save`. `rejected` has a reason for each bundle that was not opened.
    """

    bundles: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    names: frozenset[str] = frozenset()
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Saved:
    """What `save` added: the bundle's name, files, bytes as stored, seconds. `evicted` are digests of keys that went.

    `merged` is how many bundles became this one, 0 for an addition.
    """

    name: str
    files: int
    bytes: int
    seconds: float
    merged: int = 0
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """What is stored for one key. Times are unix time in seconds, 0.0 where they are not known.

    `parts` are those of the key as written down beside the bundles, empty where they don't have the key's digest.
    """

    digest: str
    parts: Mapping[str, str]
    bundles: int
    bytes: int
    created: float
    used: float


def default_place() -> str:
    """Where artifacts are kept if nothing else is said: beside the runs (see `record.run_root`)."""
    return str(run_root() / "compile_cache")


class ArtifactStore:
    """The artifacts under `place`: a folder, made when something is saved, or an address such as `s3://bucket/job`.

    Without `signing` it can only list and remove. `limit` is in bytes. May be used from several threads and processes.
    Raises StoreError for an address that fsspec can't use here.
    """

    def __init__(self, place: str | Path, signing: SigningKey | None, *, limit: int = LIMIT) -> None:
        self.place = os.fspath(place)
        self._signing = signing
        self._limit = limit
        # Names of the files in a bundle: bundles don't change.
        self._known: dict[str, frozenset[str]] = {}
        with self._errors():
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self.place)
        self._fs: AbstractFileSystem = fs
        self._root = str(root).rstrip("/")
        from fsspec.implementations.local import LocalFileSystem

        self._local = isinstance(fs, LocalFileSystem)

    def load(self, key: Key, folder: str | Path) -> Loaded:
        """Unpack all bundles of the key into `folder`, oldest first; each is verified before it is opened.

        Nothing stored is no error. Raises StoreError if the store can't be read or the folder can't be written.
        """
        began = time.monotonic()
        bundles = files = size = 0
        names: set[str] = set()
        rejected: list[str] = []
        signing = self._secret()
        with self._errors():
            for name, data, problem in self._bundles(signing, key.digest):
                if not problem:
                    try:
                        files += len(unpack(data, folder))
                    except BundleError as error:
                        problem = str(error)
                    except OSError as error:
                        why = f"its files can't be written to {folder}: {error.strerror or error}"
                        raise StoreError(self.place, why) from error
                if problem:
                    rejected.append(f"{key.digest}/{name}: {problem}")
                    continue
                bundles += 1
                size += len(data)
                here = self._known[f"{key.digest}/{name}"] = names_of(data)
                names |= here
            if bundles:
                # A store that can only be read is as good.
                with suppress(Exception):
                    self._stamp(key.digest)
        return Loaded(bundles, files, size, time.monotonic() - began, frozenset(names), tuple(rejected))

    def has(self, key: Key) -> bool:
        """Whether anything is stored for the key. Raises StoreError if the store can't be read."""
        with self._errors():
            return bool(_bundles_in(self._files(key.digest)))

    def save(self, key: Key, folder: str | Path, known: frozenset[str] = frozenset()) -> Saved | None:
        """Add the files of `folder` (see `bundle.names_in`) that are not stored for this key yet; None if all are.

        `known` are names that need not be stored, such as those of `Loaded`. Keys that were not used for longest go
        until the store is within its limit. Raises StoreError if that can't be done.
        """
        began = time.monotonic()
        signing = self._secret()
        digest = key.digest
        with self._errors():
            stamps = stamps_in(folder)
            new = frozenset(stamps) - known
            # Most saves add nothing, and need not ask the store then.
            if not new:
                return None
            stored = self._names_stored(signing, digest)
            new -= frozenset[str]().union(*stored.values())
            if not new:
                return None
            data = pack(folder, new)
            # What was being written meanwhile may be half there: its turn comes with the next save.
            whole = unchanged_in(folder, stamps)
            if not new <= whole:
                new &= whole
                if not new:
                    return None
                data = pack(folder, new)
            replaced: list[str] = []
            if len(stored) >= BUNDLES:
                opened = [(name, content) for name, content, problem in self._bundles(signing, digest) if not problem]
                data = merge([*(content for _, content in opened), data])
                replaced = [name for name, _ in opened]
            content = hashlib.sha256(data).hexdigest()[:32]
            name = f"{time.time_ns():016x}-{content}.bundle"
            sealed = _seal(signing, f"{digest}/{name}", data)
            # Before the bundle: who evicts meanwhile sees that the key is in use.
            self._write(f"{digest}/{_ABOUT}", json.dumps({"format": FORMAT, "parts": dict(key.parts)}).encode())
            self._stamp(digest)
            self._write(f"{digest}/{name}", sealed)
            files = self._known[f"{digest}/{name}"] = names_of(data)
            # Whoever reads them now finds their files in the new one.
            self._delete(f"{digest}/{old}" for old in replaced)
            evicted = self._evict(digest)
        merged = len(replaced)
        return Saved(name, len(files), len(sealed), time.monotonic() - began, merged and merged + 1, evicted)

    def document(self, name: str) -> dict[str, Any] | None:
        """The document of this name, None if there is none.

        Raises StoreError, which says why, for one that is not opened: damaged, edited, or signed with another secret.
        """
        signing = self._secret()
        path = _document(name)
        with self._errors():
            try:
                sealed = self._read(path, _HEAD.size + DOCUMENT)
                if sealed is None:
                    return None
                found = json.loads(_open(signing, path, sealed))
            except _Refused as refused:
                raise StoreError(self.place, f"document {name!r} is not used: {refused}") from None
        assert isinstance(found, dict)
        return found

    def put_document(self, name: str, data: Mapping[str, Any]) -> None:
        """Store a document under this name, in place of one that is there.

        `name` is made of letters, digits, dots, dashes and underscores. Raises ValueError for another name, and for
        data that is more than 1 MiB as JSON; StoreError if it can't be written.
        """
        signing = self._secret()
        path = _document(name)
        payload = json.dumps(dict(data), allow_nan=False).encode()
        if len(payload) > DOCUMENT:
            raise ValueError(f"document {name!r} has {len(payload)} bytes as JSON: at most {DOCUMENT} are stored")
        with self._errors():
            self._write(path, _seal(signing, path, payload))
            there = self._files("documents")
            if len(there) > DOCUMENTS:
                age = {one: self._fs.modified(self._path(f"documents/{one}")) for one in there}
                # Some more than are too many, so that the next ones need not ask again.
                oldest = sorted(there, key=lambda one: age[one])[: len(there) - DOCUMENTS * 7 // 8]
                self._delete(f"documents/{one}" for one in oldest if one != f"{name}.json")

    def documents(self) -> dict[str, int]:
        """The names of the documents and their bytes as stored."""
        with self._errors():
            files = self._files("documents")
        return {name.removesuffix(".json"): size for name, size in sorted(files.items()) if name.endswith(".json")}

    def entries(self) -> list[Entry]:
        """What is stored, the key that was used last first. Raises StoreError if the store can't be read."""
        with self._errors():
            entries = [self._entry(name, files) for name, files in self._keys().items() if _bundles_in(files)]
        return sorted(entries, key=lambda entry: (-entry.used, entry.digest))

    def remove(self, digest: str) -> None:
        """Remove what is stored for the key of this digest; nothing if there is nothing.

        Raises ValueError for what is no digest, StoreError if it can't be removed.
        """
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is no digest of a key: it has 32 digits 0-9 and a-f")
        with self._errors():
            self._refuse_link(digest)
            # The bundles first: what an interruption leaves is no artifact then. Files of another name are not ours.
            files = self._files(digest)
            ours = [*_bundles_in(files), *(name for name in files if name.endswith(".tmp")), _ABOUT, _USED]
            self._delete(f"{digest}/{name}" for name in ours)
            # Object stores have no folders, and say so in many ways.
            with suppress(Exception):
                self._fs.rmdir(self._path(digest))

    def remove_named(self, beginnings: Iterable[str]) -> list[str]:
        """Remove the keys whose digests begin like these, and return their digests.

        Raises ValueError, before any is removed, if for one of them there is none or there are several; StoreError if
        they can't be removed.
        """
        with self._errors():
            there = list(self._keys())
        named: dict[str, None] = {}
        for beginning in beginnings:
            found = [digest for digest in there if beginning and digest.startswith(beginning.lower())]
            if len(found) != 1:
                known = ", ".join(digest[:12] for digest in found or there) or "none"
                said = "several keys begin with" if found else "there is no key"
                these = "these do" if found else "there are"
                raise ValueError(f"{said} {beginning!r} in {self.place}: {these} {known}")
            named[found[0]] = None
        for digest in named:
            self.remove(digest)
        return list(named)

    def exists(self) -> bool:
        """Whether there is such a folder or address. Raises StoreError if that can't be found out."""
        with self._errors():
            return bool(self._fs.exists(self._root or "/"))

    def why_missed(self, key: Key) -> str:
        """Why nothing was found for the key, in words: the stored key that is nearest, and what differs."""
        entries = [entry for entry in self.entries() if entry.digest != key.digest and entry.parts]
        if not entries:
            return f"no artifact for this key; nothing else is stored in {self.place}"
        # Of two that are equally near the one that was used last, which comes first.
        nearest = min(entries, key=lambda entry: len(key.differences(entry.parts)))
        differ = ", ".join(key.differences(nearest.parts))
        return f"no artifact for this key; the nearest, {nearest.digest[:12]}, differs in {differ}"

    def _secret(self) -> SigningKey:
        if self._signing is None:
            raise ValueError("a store without a signing key can only list and remove")
        return self._signing

    def _bundles(self, signing: SigningKey, digest: str) -> Iterator[tuple[str, bytes, str]]:
        """Name and content of every bundle of the key, oldest first, or why it is not opened."""
        seen: set[str] = set()
        while True:
            files = self._files(digest)
            names = [name for name in _bundles_in(files) if name not in seen]
            missing = 0
            for name in names:
                seen.add(name)
                sealed = None
                problem = ""
                data = b""
                try:
                    sealed = self._read(f"{digest}/{name}", MOST)
                    if sealed is None:
                        missing += 1
                        continue
                    data = _open(signing, f"{digest}/{name}", sealed)
                except _Refused as refused:
                    problem = str(refused)
                yield name, data, problem
            # What went meanwhile has become a part of another bundle, which has come meanwhile.
            if not missing:
                return

    def _names_stored(self, signing: SigningKey, digest: str) -> dict[str, frozenset[str]]:
        """The names of the files in each bundle of the key that can be opened."""
        there = _bundles_in(self._files(digest))
        if all(f"{digest}/{name}" in self._known for name in there):
            return {name: self._known[f"{digest}/{name}"] for name in there}
        found = {}
        for name, data, problem in self._bundles(signing, digest):
            if not problem:
                with suppress(BundleError):
                    found[name] = self._known[f"{digest}/{name}"] = names_of(data)
        return found

    def _entry(self, digest: str, files: Mapping[str, int]) -> Entry:
        bundles = _bundles_in(files)
        created, used = _created(bundles), self._used(digest)
        return Entry(digest, self._parts(digest), len(bundles), sum(files.values()), created, max(used, created))

    def _used(self, digest: str) -> float:
        with suppress(_Refused, ValueError):
            text = self._read(f"{digest}/{_USED}", 32)
            # A time to come would keep a key for ever.
            return min(float(int(text)), time.time()) if text else 0.0
        return 0.0

    def _parts(self, digest: str) -> dict[str, str]:
        """The parts written down beside the bundles, if they are those of a key with this digest."""
        try:
            parts = json.loads(self._read(f"{digest}/{_ABOUT}", _SHOWN) or b"{}")["parts"]
            texts = [*parts.keys(), *parts.values()]
            if all(isinstance(text, str) and text.isprintable() for text in texts) and Key(parts).digest == digest:
                return dict(parts)
        except (_Refused, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return {}

    def _evict(self, keep: str) -> tuple[str, ...]:
        """Remove the keys that were not used for longest until the rest fits; never `keep`."""
        keys = self._keys()
        sizes = {digest: sum(files.values()) for digest, files in keys.items()}
        total = sum(sizes.values()) + sum(self._files("documents").values())
        self._sweep(keys)
        gone: list[str] = []
        if total <= self._limit:
            return ()
        last = {one: max(self._used(one), _created(_bundles_in(files))) for one, files in keys.items()}
        for digest in sorted(keys.keys() - {keep}, key=lambda one: (last[one], one)):
            if total <= self._limit:
                break
            self.remove(digest)
            total -= sizes[digest]
            gone.append(digest)
        return tuple(gone)

    def _sweep(self, keys: Mapping[str, Mapping[str, int]]) -> None:
        """Remove what killed writers left."""
        if not self._local:
            return
        for digest, files in keys.items():
            for name in files:
                path = self._path(f"{digest}/{name}")
                with suppress(FileNotFoundError):
                    if name.endswith(".tmp") and time.time() - os.lstat(path).st_mtime > _STALE:
                        os.unlink(path)

    def _stamp(self, digest: str) -> None:
        self._write(f"{digest}/{_USED}", str(int(time.time())).encode())

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _keys(self) -> dict[str, dict[str, int]]:
        """The files of every key, with their bytes."""
        self._fs.invalidate_cache()
        try:
            folders = self._fs.ls(self._root or "/", detail=True)
        except FileNotFoundError:
            return {}
        names = sorted(_last_part(one) for one in folders if one["type"] == "directory")
        return {name: self._files(name) for name in names if _DIGEST.fullmatch(name)}

    def _files(self, folder: str) -> dict[str, int]:
        """The files directly in this folder of the store, with their bytes; none if there is no folder."""
        # Some file systems remember what they listed, and others write here.
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {_last_part(one): int(one["size"] or 0) for one in found if one["type"] == "file"}

    def _read(self, name: str, most: int) -> bytes | None:
        """The content of a file, None if it is not there. Raises _Refused for one that is larger than it may be."""
        try:
            data = self._fs.cat_file(self._path(name), 0, most + 1)
        except FileNotFoundError:
            return None
        if len(data) > most:
            raise _Refused(f"it is larger than the {most} bytes that are read")
        return bytes(data)

    def _write(self, name: str, data: bytes) -> None:
        """Make the file, or replace it, so that readers see the old content or the new one."""
        self._refuse_link(name.partition("/")[0])
        path = self._path(name)
        if not self._local:
            # One put, which object stores make visible as a whole.
            self._fs.pipe_file(path, data)
            return
        folder, _, base = path.rpartition("/")
        for last in (False, True):
            os.makedirs(folder, exist_ok=True)
            aside = f"{folder}/.{secrets.token_hex(8)}.tmp"
            try:
                try:
                    with open(aside, "xb") as opened:
                        opened.write(data)
                    os.replace(aside, f"{folder}/{base}")
                except BaseException:
                    with suppress(OSError):
                        os.unlink(aside)
                    raise
                return
            except FileNotFoundError:
                # The folder was empty yet, and another process has just evicted it.
                if last:
                    raise

    def _refuse_link(self, folder: str) -> None:
        if self._local and os.path.islink(self._path(folder)):
            raise StoreError(self.place, f"{folder} is a link there, which is not followed: remove it")

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Make one kind of error of what file systems raise: each of fsspec's has its own."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            said = getattr(error, "strerror", None) or "".join(str(error).splitlines()[:1])
            about = getattr(error, "filename", None)
            what = f"{type(error).__name__}: {said}" if said else type(error).__name__
            raise StoreError(self.place, f"{what} ({about})" if isinstance(about, str) else what) from error


def _bundles_in(files: Iterable[str]) -> list[str]:
    """The names of bundles among these, oldest first."""
    return sorted(name for name in files if _BUNDLE.fullmatch(name))


def _created(bundles: list[str]) -> float:
    """Unix time of the first of these bundles, by its name; 0.0 where there is none."""
    return int(bundles[0][:16], 16) / 1e9 if bundles else 0.0


def _last_part(listed: Mapping[str, Any]) -> str:
    return str(listed["name"]).rstrip("/").rpartition("/")[2]


def _document(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of a document: letters, digits, dots, dashes and underscores, at most 128, "
            "the first one a letter or a digit"
        )
    return f"documents/{name}.json"


def _seal(signing: SigningKey, where: str, payload: bytes) -> bytes:
    """The payload, signed for this place in the store."""
    place = hashlib.sha256(where.encode()).digest()[:16]
    signature = signing.sign(_MAGIC, FORMAT.to_bytes(2, "big"), where.encode(), payload)
    return _HEAD.pack(_MAGIC, FORMAT, signing.name, place, len(payload), signature) + payload


def _open(signing: SigningKey, where: str, sealed: bytes) -> bytes:
    """The payload, if it was signed with this secret for this place in the store. Raises _Refused, which says why not.

    What the head says only serves to name the reason: the signature decides.
    """
    if len(sealed) < _HEAD.size:
        raise _Refused(f"it is truncated: {len(sealed)} bytes are less than a head")
    magic, format_, name, place, size, signature = _HEAD.unpack_from(sealed)
    payload = sealed[_HEAD.size :]
    if magic != _MAGIC:
        raise _Refused("it is no file of initopt's")
    if format_ != FORMAT:
        raise _Refused(f"it has format {format_}, and this initopt reads {FORMAT}")
    if len(payload) < size:
        raise _Refused(f"it is truncated: {len(payload)} of {size} bytes are there")
    if len(payload) > size:
        raise _Refused(f"it was edited: {len(payload) - size} bytes too many are there")
    if name != signing.name:
        raise _Refused(f"it was signed with another key: all hosts need the same {SECRET} or {FILE}")
    if place != hashlib.sha256(where.encode()).digest()[:16]:
        raise _Refused("it was stored for another key or under another name")
    if not signing.check(signature, magic, format_.to_bytes(2, "big"), where.encode(), payload):
        raise _Refused("it was edited: its signature does not fit")
    return payload
