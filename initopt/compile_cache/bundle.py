"""Files of a folder as one piece of bytes, and back: equal files give equal bytes, and nothing gets outside the folder.

A format of its own, and not tar: it has no way to say link, device, owner or absolute path, so there is nothing to
filter, and its table can be checked in full before anything is decompressed or written. Who made the bytes is not known
here; `store` checks that first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MOST = 2 * 2**30
"""Bytes of all files of one bundle."""

_MAGIC = b"initopt-files-1\n"
_COUNT = struct.Struct(">I")
_ROW = struct.Struct(">HBQ")
"""Length of the name, whether its owner may execute the file, size of the file."""

_NAME = 1024
_PART = 255
_FILES = 100_000
_TEMPORARY = ".tmp"
_LOCK = ".lock"
_LOCKS = "locks"


class BundleError(ValueError):
    """Bytes that are no bundle, or one that is not to be unpacked: nothing was written. The message says why."""


@dataclass(frozen=True)
class _Entry:
    name: str
    executable: bool
    size: int


def names_in(folder: str | Path) -> frozenset[str]:
    """The names, relative to `folder`, of the files that are worth keeping: none if there is no folder.

    Left out are links and other special files, locks, temporaries, and what some process holds a lock of (torch writes
    binaries under their final name).
    """
    root = os.fspath(folder)
    found: set[str] = set()
    unfinished = _unfinished(os.path.join(root, _LOCKS))
    for where, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != _LOCKS]
        for file in files:
            path = os.path.join(where, file)
            name = os.path.relpath(path, root)
            if file.endswith((_LOCK, _TEMPORARY)) or file.partition(".")[0] in unfinished or _problem(name):
                continue
            with suppress(FileNotFoundError):
                if stat.S_ISREG(os.lstat(path).st_mode):
                    found.add(name)
    return frozenset(found)


def stamps_in(folder: str | Path) -> dict[str, tuple[int, int]]:
    """The names of `names_in`, each with size and time of its last change."""
    found = {}
    for name in names_in(folder):
        with suppress(FileNotFoundError):
            there = os.lstat(os.path.join(os.fspath(folder), name))
            found[name] = there.st_size, there.st_mtime_ns
    return found


def unchanged_in(folder: str | Path, stamps: Mapping[str, tuple[int, int]]) -> frozenset[str]:
    """Those that are as they were, and that nobody has begun to write: what was read in between is whole."""
    now = stamps_in(folder)
    return frozenset(name for name, stamp in stamps.items() if now.get(name) == stamp)


def _unfinished(locks: str) -> frozenset[str]:
    """The beginnings of the names that somebody has locked in this folder."""
    held: set[str] = set()
    try:
        names = os.listdir(locks)
    except OSError:
        return frozenset()
    for name in names:
        try:
            file = os.open(os.path.join(locks, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.add(name.partition(".")[0])
        finally:
            os.close(file)
    return frozenset(held)


def pack(folder: str | Path, names: Iterable[str]) -> bytes:
    """The files of these names. Raises BundleError for a name that `unpack` refuses, OSError for a file not there."""
    contents: dict[str, tuple[bytes | memoryview, bool]] = {}
    wanted = sorted(names)
    _check([_Entry(name, False, 0) for name in wanted])
    for name in wanted:
        file = os.open(os.path.join(os.fspath(folder), name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(file, "rb") as opened:
            executable = bool(os.fstat(opened.fileno()).st_mode & stat.S_IXUSR)
            contents[name] = opened.read(), executable
    return _packed(contents)


def merge(bundles: Iterable[bytes]) -> bytes:
    """One bundle with the files of all: of two with the same name the later one's. Raises BundleError as `unpack`."""
    contents: dict[str, tuple[bytes | memoryview, bool]] = {}
    for data in bundles:
        entries, body = _opened(data, MOST)
        for entry, content in zip(entries, body, strict=True):
            contents[entry.name] = content, entry.executable
    return _packed(contents)


def _packed(contents: Mapping[str, tuple[bytes | memoryview, bool]]) -> bytes:
    entries = [_Entry(name, contents[name][1], len(contents[name][0])) for name in sorted(contents)]
    _check(entries)
    if sum(entry.size for entry in entries) > MOST or len(entries) > _FILES:
        raise BundleError(f"its files are more than the {_FILES} files and {MOST} bytes that one bundle may have")
    table = b"".join(
        _ROW.pack(len(name), entry.executable, entry.size) + name
        for entry, name in ((entry, entry.name.encode()) for entry in entries)
    )
    # Level 3: of these files higher ones save little and take several times as long.
    squeeze = zlib.compressobj(3)
    body = [squeeze.compress(contents[entry.name][0]) for entry in entries]
    return b"".join((_MAGIC, _COUNT.pack(len(entries)), table, *body, squeeze.flush()))


def names_of(data: bytes) -> frozenset[str]:
    """The names in a bundle. Raises BundleError as `unpack` does for its table."""
    return frozenset(entry.name for entry in _table(data)[0])


def unpack(data: bytes, folder: str | Path, *, most: int = MOST) -> tuple[str, ...]:
    """Write the files of the bundle into `folder`, which is made if missing; return the names of those written.

    A file that is there with the same content is left alone, one with other content is replaced. Each appears complete
    under its name; it belongs to its owner alone (0600, 0700 if executable, whatever the umask). Subfolders that are
    links are not entered. Everything is checked before the first file is written: raises BundleError then, also for
    more than `most` bytes of files; OSError if a file can't be written.
    """
    entries, contents = _opened(data, most)
    written = []
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry, content in zip(entries, contents, strict=True):
            if _put(root, entry, content):
                written.append(entry.name)
    finally:
        os.close(root)
    return tuple(written)


def _opened(data: bytes, most: int) -> tuple[list[_Entry], list[memoryview]]:
    """The checked table and the content of each of its files."""
    entries, start = _table(data)
    total = sum(entry.size for entry in entries)
    if total > most:
        raise BundleError(f"its files have {total} bytes, more than the {most} that are allowed")
    inflate = zlib.decompressobj()
    try:
        # One byte more than there may be: what is larger than it says is noticed, and never made.
        body = inflate.decompress(memoryview(data)[start:], total + 1)
    except zlib.error as error:
        raise BundleError(f"it can't be decompressed: {error}") from error
    if len(body) != total or not inflate.eof or inflate.unused_data:
        raise BundleError("the sizes in its table are not those of its files")
    contents, at, view = [], 0, memoryview(body)
    for entry in entries:
        contents.append(view[at : at + entry.size])
        at += entry.size
    return entries, contents


def _table(data: bytes) -> tuple[list[_Entry], int]:
    """The table, checked, and where the files begin."""
    if not data.startswith(_MAGIC):
        raise BundleError("it is no bundle of files, or of another format")
    at = len(_MAGIC)
    entries = []
    try:
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        if count > _FILES:
            raise BundleError(f"it has {count} files, more than the {_FILES} that are allowed")
        for _ in range(count):
            length, executable, size = _ROW.unpack_from(data, at)
            at += _ROW.size
            name = data[at : at + length]
            if len(name) != length:
                raise BundleError("its table is cut off")
            at += length
            entries.append(_Entry(name.decode(), bool(executable), size))
    except struct.error as error:
        raise BundleError("its table is cut off") from error
    except UnicodeDecodeError as error:
        raise BundleError("a name in its table is no UTF-8") from error
    _check(entries)
    return entries, at


def _check(entries: list[_Entry]) -> None:
    names: set[str] = set()
    folders: set[str] = set()
    for entry in entries:
        if problem := _problem(entry.name):
            raise BundleError(f"the name {entry.name[:100]!r} {problem}")
        if entry.name in names:
            raise BundleError(f"the name {entry.name!r} is there twice")
        names.add(entry.name)
        parts = entry.name.split("/")
        folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
    for name in sorted(names & folders):
        raise BundleError(f"the name {name!r} is a file and a folder")


def _problem(name: str) -> str:
    """What is wrong with a name, empty if nothing is."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is no UTF-8"
    parts = name.split("/")
    if name.startswith("/"):
        return "is absolute"
    if ".." in parts:
        return "leads out of the folder"
    if "" in parts or "." in parts:
        return "has an empty part"
    if "\\" in name or not name.isprintable():
        return "has a character that is not allowed"
    if len(name) > 1 and name[0].isalpha() and name[1] == ":":
        return "has a drive"
    if size > _NAME or any(len(part.encode()) > _PART for part in parts):
        return "is too long"
    return ""


def _put(root: int, entry: _Entry, content: memoryview) -> bool:
    """Write one file, relative to the open folder; False if it was there."""
    *parts, name = entry.name.split("/")
    with _entered(root, parts) as folder:
        if _same(folder, name, content):
            return False
        aside = f".{secrets.token_hex(8)}{_TEMPORARY}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(aside, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as opened:
                os.fchmod(opened.fileno(), 0o700 if entry.executable else 0o600)
                opened.write(content)
            # Replaces a link, and does not follow it.
            os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=folder)
            raise
    return True


@contextmanager
def _entered(root: int, parts: list[str]) -> Iterator[int]:
    """The subfolder, opened step by step so that none of the steps can be a link; made where it is missing."""
    here = os.dup(root)
    try:
        for part in parts:
            with suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=here)
            try:
                there = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise OSError(
                        error.errno, "a part of the name is a link or a file there", "/".join(parts)
                    ) from None
                raise
            os.close(here)
            here = there
        yield here
    finally:
        os.close(here)


def _same(folder: int, name: str, content: memoryview) -> bool:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    with os.fdopen(file, "rb") as opened:
        about = os.fstat(opened.fileno())
        return stat.S_ISREG(about.st_mode) and about.st_size == len(content) and opened.read() == content
