"""Files to bytes and back: equal, complete, inside the folder, and refused before anything is written."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from initopt.compile_cache import bundle
from initopt.compile_cache.bundle import BundleError, merge, names_in, names_of, pack, unpack

FILES = {"ab/one.py": b"print()", "ab/cd/two.so": bytes(range(256)) * 50, "empty": b""}


def written(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()}


def raw(rows: list[tuple[bytes, int]], body: bytes, *, count: int | None = None) -> bytes:
    """A bundle with any table, right or wrong."""
    table = b"".join(struct.pack(">HBQ", len(name), 0, size) + name for name, size in rows)
    head = b"initopt-files-1\n" + struct.pack(">I", len(rows) if count is None else count)
    return head + table + zlib.compress(body)


def test_there_and_back(tmp_path: Path) -> None:
    here = written(tmp_path / "here")
    os.chmod(here / "ab/cd/two.so", 0o755)
    data = pack(here, names_in(here))
    before = os.umask(0)
    try:
        assert unpack(data, tmp_path / "there" / "deep") == tuple(sorted(FILES))
    finally:
        os.umask(before)
    assert read(tmp_path / "there" / "deep") == FILES
    modes = {str(p.relative_to(tmp_path)): stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "there").rglob("*")}
    assert modes.pop("there/deep/ab/cd/two.so") == 0o700
    assert {mode for name, mode in modes.items() if name.endswith(("empty", ".py"))} == {0o600}
    assert modes["there/deep/ab"] == modes["there/deep/ab/cd"] == 0o700


def test_equal_files_give_equal_bytes(tmp_path: Path) -> None:
    one, other = written(tmp_path / "1"), written(tmp_path / "2", dict(reversed(FILES.items())))
    os.utime(other / "empty", (0, 0))
    assert pack(one, names_in(one)) == pack(other, sorted(names_in(other)))
    assert names_of(pack(one, names_in(one))) == FILES.keys()
    assert unpack(pack(one, []), tmp_path / "3") == () and read(tmp_path / "3") == {}


def test_only_files_that_are_done_are_named(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "folder", {**FILES, "locks/key.lock": b"", "x.lock": b"", ".1.2.tmp": b"", "a/b.tmp": b""}
    )
    written(tmp_path / "outside", {"secret": b""})
    (folder / "link").symlink_to(tmp_path / "outside" / "secret")
    (folder / "links").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "pipe")
    os.mkdir(os.fsencode(folder) + b"/\xff")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff/file")).write_text("")
    assert names_in(folder) == FILES.keys()
    assert names_in(tmp_path / "none") == frozenset()


def test_a_file_whose_lock_is_held_is_not_done(tmp_path: Path) -> None:
    folder = written(
        tmp_path, {"ab/cab.main.so": b"half", "ab/cab.main.cpp": b"", "ab/cac.so": b"", "locks/cab.lock": b""}
    )
    with open(folder / "locks/cab.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert names_in(folder) == {"ab/cac.so"}
    assert names_in(folder) == {"ab/cab.main.so", "ab/cab.main.cpp", "ab/cac.so"}


def test_what_is_there_stays_and_what_differs_is_replaced(tmp_path: Path) -> None:
    data = pack(written(tmp_path / "here"), FILES)
    there = written(tmp_path / "there", {"empty": b"torn", "ab/one.py": b"print()"})
    kept = (there / "ab/one.py").stat()
    assert unpack(data, there) == ("ab/cd/two.so", "empty")
    assert read(there) == FILES
    assert (there / "ab/one.py").stat().st_ino == kept.st_ino
    assert unpack(data, there) == ()


def test_of_two_bundles_the_later_counts(tmp_path: Path) -> None:
    one = pack(written(tmp_path / "1", {"a": b"1", "b": b"1"}), ["a", "b"])
    other = pack(written(tmp_path / "2", {"b": b"2", "c": b"2"}), ["b", "c"])
    unpack(merge([one, other]), tmp_path / "3")
    assert read(tmp_path / "3") == {"a": b"1", "b": b"2", "c": b"2"}


NAMES = {
    b"../x": "leads out of the folder",
    b"a/../../b": "leads out of the folder",
    b"..": "leads out of the folder",
    b"/abs": "is absolute",
    b"//abs": "is absolute",
    b"a//b": "has an empty part",
    b"a/": "has an empty part",
    b"": "has an empty part",
    b"./a": "has an empty part",
    b"a/.": "has an empty part",
    b"C:\\x": "has a character that is not allowed",
    b"C:x": "has a drive",
    b"a\\b": "has a character that is not allowed",
    b"a\0b": "has a character that is not allowed",
    b"a\x1b[2Jb": "has a character that is not allowed",
    b"a\n": "has a character that is not allowed",
    b"x" * 256: "is too long",
    b"x/" * 600 + b"x": "is too long",
    b"\xff": "is no UTF-8",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", [True, False])
def test_a_name_that_is_not_allowed_stops_everything(name: bytes, first: bool, tmp_path: Path) -> None:
    rows = [(b"fine", 1), (name, 1)]
    with pytest.raises(BundleError, match=NAMES[name]):
        unpack(raw(rows[:: -1 if first else 1], b"xy"), tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in NAMES if b"\xff" not in name])
def test_no_such_name_is_packed(name: bytes, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=NAMES[name]):
        pack(tmp_path, [name.decode()])


@pytest.mark.parametrize("names", [(b"a", b"a"), (b"a", b"a/b"), (b"a/b/c", b"a/b")])
def test_names_that_exclude_each_other(names: tuple[bytes, ...], tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is there twice|is a file and a folder"):
        unpack(raw([(name, 0) for name in names], b""), tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\3\4",
        raw([(b"a", 2)], b"x"),
        raw([(b"a", 1)], b"xy"),
        raw([(b"a", 2**64 - 1)], b"x"),
        raw([(b"a", 1)], b"x", count=2),
        raw([(b"a", 1)], b"x", count=2**32 - 1),
        raw([], b"x"),
        raw([(b"a", 1)], b"x") + b"more",
        raw([(b"a", 1)], b"x")[:-1],
        raw([(b"a", 1)], b"x")[:-8] + b"damaged!",
        raw([(b"a", 1)], b"x")[:25],
    ],
)
def test_a_bundle_that_is_not_what_it_says(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        unpack(data, tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


def test_what_is_larger_than_it_says_is_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb: 64 MiB of zeros in 64 kB, said to be one byte, and said to be what they are."""
    made = []

    class Watched:
        def __init__(self) -> None:
            self._real = zlib.decompressobj()

        def decompress(self, data: bytes, most: int) -> bytes:
            made.append(self._real.decompress(data, most))
            return made[-1]

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    class Zlib:
        error, decompressobj = zlib.error, Watched

    bomb = bytes(64 * 2**20)
    monkeypatch.setattr(bundle, "zlib", Zlib)
    with pytest.raises(BundleError, match="the sizes in its table are not those of its files"):
        unpack(raw([(b"a", 1)], bomb), tmp_path / "in")
    assert [len(piece) for piece in made] == [2]
    with pytest.raises(BundleError, match="more than the 1000 that are allowed"):
        unpack(raw([(b"a", len(bomb))], bomb), tmp_path / "in", most=1000)
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == []


def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside = written(tmp_path / "outside", {"file": b"mine"})
    there = tmp_path / "there"
    there.mkdir()
    (there / "ab").symlink_to(outside)
    (there / "empty").symlink_to(outside / "file")
    data = pack(written(tmp_path / "here"), FILES)
    with pytest.raises(OSError, match="a part of the name is a link or a file there"):
        unpack(data, there)
    assert read(outside) == {"file": b"mine"}
    (there / "ab").unlink()
    unpack(data, there)
    assert read(there) == FILES and read(outside) == {"file": b"mine"}


def test_a_write_that_fails_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack(written(tmp_path / "here"), FILES)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(data, tmp_path / "there")
    assert read(tmp_path / "there") == {}


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_unpacked(data: bytes) -> None:
    for start in (b"", b"initopt-files-1\n", b"initopt-files-1\n\0\0\0\1"):
        try:
            names_of(start + data)
        except BundleError:
            continue


@given(st.data())
def test_any_change_of_a_bundle_is_noticed_or_stays_inside(data: st.DataObject) -> None:
    """Without any signature: a table can be changed to other names, but to none that leads outside."""
    good = bytearray(raw([(b"aa/bb", 3), (b"cc", 2)], b"12345"))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        names = names_of(bytes(good))
    except BundleError:
        return
    assert all(name and not name.startswith("/") and ".." not in name.split("/") for name in names)
