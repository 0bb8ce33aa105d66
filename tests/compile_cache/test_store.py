"""The store: what is kept and found again, what is refused and why, and what several users at once can do to it."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from initopt.compile_cache import store as stores
from initopt.compile_cache.authenticity import SigningKey
from initopt.compile_cache.bundle import pack
from initopt.compile_cache.key import Key
from initopt.compile_cache.store import ArtifactStore, StoreError

SIGNING = SigningKey(b"k" * 32)
KEY = Key({"cpu": "A", "threads": "1", "torch": "2.13"})
OTHER = Key({"cpu": "B", "threads": "2", "torch": "2.13"})
FILES = {"ab/one.py": "print()", "ab/two.so": "\0" * 300}


def folder(path: Path, files: dict[str, str] = FILES) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    return path


def read(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): p.read_text() for p in path.rglob("*") if p.is_file()}


def open_store(place: str | Path, **options: Any) -> ArtifactStore:
    return ArtifactStore(place, SIGNING, **options)


def the_bundle(place: Path, key: Key = KEY) -> Path:
    (found,) = (place / key.digest).glob("*.bundle")
    return found


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    address = f"memory://{tmp_path.name}/store"
    yield address
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A store in a folder, with one bundle of KEY."""
    saved = open_store(tmp_path / "store").save(KEY, folder(tmp_path / "made"))
    assert saved is not None
    return tmp_path / "store"


# Kept and found again


def test_what_was_saved_is_loaded(place: str, tmp_path: Path) -> None:
    made = folder(tmp_path / "made")
    assert open_store(place).load(KEY, tmp_path / "there").bundles == 0
    assert not (tmp_path / "there").exists()
    saved = open_store(place).save(KEY, made)
    assert saved is not None and (saved.files, saved.merged, saved.evicted) == (2, 0, ())
    loaded = open_store(place).load(KEY, tmp_path / "there")
    assert (loaded.bundles, loaded.files, loaded.rejected) == (1, 2, ()) and loaded.bytes > 0
    assert loaded.names == FILES.keys() and read(tmp_path / "there") == FILES
    again = open_store(place).load(KEY, tmp_path / "there")
    assert (again.bundles, again.files, again.names) == (1, 0, loaded.names)
    assert open_store(place).load(OTHER, tmp_path / "other") == replace(
        stores.Loaded(), seconds=pytest.approx(0, abs=60)
    )


def test_only_what_is_new_is_added(place: str, tmp_path: Path) -> None:
    made = folder(tmp_path / "made")
    store = open_store(place)
    store.save(KEY, made)
    assert store.save(KEY, made) is None and open_store(place).save(KEY, made) is None
    folder(made, {"later": "1", "locks/x.lock": ""})
    assert store.save(KEY, made, known=frozenset({"later"})) is None
    added = open_store(place).save(KEY, made)
    assert added is not None and added.files == 1
    loaded = open_store(place).load(KEY, tmp_path / "there")
    assert (loaded.bundles, loaded.files) == (2, 3)
    assert read(tmp_path / "there") == {**FILES, "later": "1"}


def test_the_later_bundle_counts(place: str, tmp_path: Path) -> None:
    """Two ranks that compiled the same, each unaware of the other."""
    one, other = open_store(place), open_store(place)
    folder(tmp_path / "1", {"a": "1"})
    folder(tmp_path / "2", {"a": "2", "b": "2"})
    one.save(KEY, tmp_path / "1")
    other.save(KEY, tmp_path / "2")
    assert open_store(place).load(KEY, tmp_path / "there").bundles == 2
    assert read(tmp_path / "there") == {"a": "1", "b": "2"}


def test_many_additions_become_one_bundle(place: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    store = open_store(place)
    for number in range(16):
        saved = store.save(KEY, folder(made, {f"f{number}": str(number)}))
        assert saved is not None and saved.merged == 0
    merged = open_store(place).save(KEY, folder(made, {"last": ""}))
    assert merged is not None and (merged.merged, merged.files) == (17, 17)
    loaded = store.load(KEY, tmp_path / "there")
    assert (loaded.bundles, loaded.files) == (1, 17) and read(tmp_path / "there") == read(made)


def test_documents(place: str) -> None:
    store = open_store(place)
    assert store.document("calls") is None and store.documents() == {}
    store.put_document("calls", {"shape": [1, 2], "name": "ü"})
    store.put_document("calls", {"shape": [3]})
    store.put_document("9.verdict-x_1", {})
    assert open_store(place).document("calls") == {"shape": [3]}
    assert list(open_store(place).documents()) == ["9.verdict-x_1", "calls"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/abs", "a/b", "a\\b", ".hidden", "a\0", "a\n", "x" * 129, "ä"]
)
def test_names_of_documents_are_checked(name: str, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    with pytest.raises(ValueError, match="is no name of a document"):
        store.put_document(name, {})
    with pytest.raises(ValueError, match="is no name of a document"):
        store.document(name)
    assert list(tmp_path.iterdir()) == []


def test_a_document_may_not_be_large(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has \d+ bytes as JSON: at most 1048576 are stored"):
        open_store(tmp_path).put_document("large", {"text": "x" * 2**20})
    open_store(tmp_path).put_document("fits", {"text": "x" * (2**20 - 20)})
    assert open_store(tmp_path).document("fits")


def test_old_documents_go(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "DOCUMENTS", 8)
    store = open_store(place)
    for number in range(9):
        store.put_document(f"d{number}", {})
    assert len(store.documents()) == 7 and store.document("d8") == {}


# Refused, and why. A sentinel would be there if anything of it had run.


class Bomb:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sentinel),)


def refused(place: Path, tmp_path: Path, key: Key = KEY, signing: SigningKey = SIGNING) -> str:
    """Load, which must write nothing, and return the one reason."""
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    loaded = ArtifactStore(place, signing).load(key, tmp_path / "there")
    assert (loaded.bundles, loaded.files, loaded.names) == (0, 0, frozenset())
    assert not (tmp_path / "there").exists()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (reason,) = loaded.rejected
    return reason


@pytest.mark.parametrize("quarter", range(4))
def test_a_truncated_bundle(quarter: int, local: Path, tmp_path: Path) -> None:
    bundle = the_bundle(local)
    whole = bundle.read_bytes()
    bundle.write_bytes(whole[: len(whole) * quarter // 4])
    assert "it is truncated" in refused(local, tmp_path)
    bundle.write_bytes(whole[:-1])
    assert "it is truncated" in refused(local, tmp_path)


def test_one_flipped_bit_anywhere(local: Path, tmp_path: Path) -> None:
    bundle = the_bundle(local)
    whole = bundle.read_bytes()
    store = open_store(local)
    seen = set()
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        bundle.write_bytes(damaged)
        loaded = store.load(KEY, tmp_path / "there")
        assert loaded.bundles == 0 and len(loaded.rejected) == 1
        seen.add(loaded.rejected[0].partition(": ")[2].split(":")[0].split(" 0x")[0][:20])
    assert not (tmp_path / "there").exists()
    assert len(seen) >= 5
    bundle.write_bytes(whole)
    assert store.load(KEY, tmp_path / "there").files == 2


def test_appended_bytes(local: Path, tmp_path: Path) -> None:
    bundle = the_bundle(local)
    bundle.write_bytes(bundle.read_bytes() + b"garbage")
    assert "it was edited: 7 bytes too many" in refused(local, tmp_path)


def test_another_secret(local: Path, tmp_path: Path) -> None:
    reason = refused(local, tmp_path, signing=SigningKey(b"l" * 32))
    assert "signed with another key: all hosts need the same INITOPT_CACHE_KEY" in reason


def test_another_secret_that_claims_to_be_ours(local: Path, tmp_path: Path) -> None:
    theirs = SigningKey(b"l" * 32)
    bundle = the_bundle(local)
    where = f"{KEY.digest}/{bundle.name}"
    sealed = bytearray(stores._seal(theirs, where, pack(tmp_path / "made", FILES)))
    sealed[10:18] = SIGNING.name
    bundle.write_bytes(sealed)
    assert "its signature does not fit" in refused(local, tmp_path)


def test_the_bundle_of_another_key(local: Path, tmp_path: Path) -> None:
    (local / KEY.digest).rename(local / OTHER.digest)
    assert "it was stored for another key" in refused(local, tmp_path, OTHER)
    # What was refused does not count as stored either.
    store = open_store(local)
    store.load(OTHER, tmp_path / "there")
    assert store.save(OTHER, tmp_path / "made") is not None


def test_a_renamed_bundle(local: Path, tmp_path: Path) -> None:
    bundle = the_bundle(local)
    bundle.rename(bundle.with_name(f"{0:016x}-{bundle.name[17:]}"))
    assert "under another name" in refused(local, tmp_path)


def test_another_format(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stores, "FORMAT", 2)
        (local / KEY.digest / the_bundle(local).name).unlink()
        open_store(local).save(KEY, tmp_path / "made")
    assert "it has format 2, and this initopt reads 1" in refused(local, tmp_path)


def test_what_is_unsigned_is_never_opened(local: Path, tmp_path: Path) -> None:
    """A pickle, and what `pack` makes: nothing of it runs or is written."""
    sentinel = tmp_path / "sentinel"
    bomb = pickle.dumps(Bomb(sentinel))
    bundle = the_bundle(local)
    for content in (
        bomb,
        pack(tmp_path / "made", FILES),
        bundle.read_bytes()[: stores._HEAD.size] + bomb,
        b"PK\3\4" + bomb,
    ):
        bundle.write_bytes(content)
        refused(local, tmp_path)
        (local / "documents").mkdir(exist_ok=True)
        (local / "documents/calls.json").write_bytes(content)
        with pytest.raises(StoreError, match="document 'calls' is not used: "):
            open_store(local).document("calls")
        (local / KEY.digest / "key.json").write_bytes(content)
        (local / KEY.digest / "used").write_bytes(content)
        (entry,) = open_store(local).entries()
        assert entry.parts == {}
    assert not sentinel.exists()
    pickle.loads(bomb)
    assert sentinel.exists()


def hostile(rows: list[tuple[bytes, int]], body: bytes) -> bytes:
    table = b"".join(struct.pack(">HBQ", len(name), 0, size) + name for name, size in rows)
    return b"initopt-files-1\n" + struct.pack(">I", len(rows)) + table + zlib.compress(body)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (hostile([(b"fine", 1), (b"../x", 1)], b"xy"), "leads out of the folder"),
        (hostile([(b"/abs", 1)], b"x"), "is absolute"),
        (hostile([(b"a/../../b", 1)], b"x"), "leads out of the folder"),
        (hostile([(b"a//b", 1)], b"x"), "has an empty part"),
        (hostile([(b"C:\\x", 1)], b"x"), "has a character that is not allowed"),
        (hostile([(b"a", 10)], bytes(10**7)), "the sizes in its table"),
        (hostile([(b"a", 2**50)], b"x"), "more than the"),
        (b"no bundle", "it is no bundle of files"),
    ],
)
def test_a_hostile_bundle_with_the_right_signature(data: bytes, reason: str, local: Path, tmp_path: Path) -> None:
    bundle = the_bundle(local)
    bundle.write_bytes(stores._seal(SIGNING, f"{KEY.digest}/{bundle.name}", data))
    assert reason in refused(local, tmp_path)


def test_a_link_in_the_target_folder_is_not_followed(local: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "ab").symlink_to(outside)
    with pytest.raises(StoreError, match=r"its files can't be written to .*there: a part of the name is a link"):
        open_store(local).load(KEY, tmp_path / "there")
    assert list(outside.iterdir()) == []


def test_links_in_the_store_are_not_followed(local: Path, tmp_path: Path) -> None:
    """Who may write there could send writes and removals elsewhere."""
    outside = folder(tmp_path / "outside", {"mine": "1", "key.json": "1"})
    (local / OTHER.digest).symlink_to(outside)
    (local / "documents").symlink_to(outside)
    store = open_store(local, limit=1)
    for act in (
        lambda: store.save(OTHER, tmp_path / "made"),
        lambda: store.remove(OTHER.digest),
        lambda: store.put_document("x", {}),
    ):
        with pytest.raises(StoreError, match="is a link there, which is not followed"):
            act()
    assert [entry.digest for entry in store.entries()] == [KEY.digest]
    assert read(outside) == {"mine": "1", "key.json": "1"}


def test_one_bad_bundle_does_not_cost_the_others(local: Path, tmp_path: Path) -> None:
    open_store(local).save(KEY, folder(tmp_path / "made", {"later": ""}))
    first = sorted((local / KEY.digest).glob("*.bundle"))[0]
    first.write_bytes(b"")
    loaded = open_store(local).load(KEY, tmp_path / "there")
    assert loaded.bundles == 1 and loaded.names == {"later"}
    assert loaded.rejected == (f"{KEY.digest}/{first.name}: it is truncated: 0 bytes are less than a head",)
    # What it held is not stored any more.
    saved = open_store(local).save(KEY, tmp_path / "made")
    assert saved is not None and saved.files == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(path.read_bytes().replace(b"right", b"wrong")),
        lambda path: path.write_bytes(b"{}"),
        lambda path: path.write_bytes(bytes(2**21)),
        lambda path: path.with_name("verdict.json").replace(path),
    ],
)
def test_a_document_is_bound_to_its_name_and_content(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put_document("calls", {"text": "right"})
    store.put_document("verdict", {"text": "right"})
    damage(tmp_path / "documents/calls.json")
    with pytest.raises(StoreError, match="document 'calls' is not used: it ") as raised:
        open_store(tmp_path).document("calls")
    assert raised.value.place == str(tmp_path) and str(tmp_path) in str(raised.value)
    store.put_document("calls", {"text": "new"})
    assert store.document("calls") == {"text": "new"}


def test_documents_and_bundles_are_not_exchanged(local: Path, tmp_path: Path) -> None:
    (local / "documents").mkdir()
    (local / "documents/calls.json").write_bytes(the_bundle(local).read_bytes())
    with pytest.raises(StoreError, match="under another name"):
        open_store(local).document("calls")


# Listed, removed, evicted


def test_entries_are_described(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(place)
    made = folder(tmp_path / "made")
    clock = [1_000_000_000.0]
    monkeypatch.setattr(stores.time, "time", lambda: clock[0])
    monkeypatch.setattr(stores.time, "time_ns", lambda: int(clock[0] * 1e9))
    store.save(KEY, made)
    clock[0] += 100
    store.save(OTHER, made)
    clock[0] += 100
    open_store(place).load(KEY, tmp_path / "there")
    first, second = ArtifactStore(place, None).entries()
    assert (first.digest, first.parts, first.bundles) == (KEY.digest, dict(KEY.parts), 1)
    assert (first.created, first.used) == (1_000_000_000.0, 1_000_000_200.0)
    assert (second.digest, second.used) == (OTHER.digest, 1_000_000_100.0)
    assert first.bytes > 300 // 10
    store.remove(KEY.digest)
    assert [entry.digest for entry in store.entries()] == [OTHER.digest]
    store.remove(KEY.digest)
    assert store.remove_named([OTHER.digest[:6]]) == [OTHER.digest] and store.entries() == []


def test_what_a_key_says_of_itself_must_be_its_own(local: Path) -> None:
    about = local / KEY.digest / "key.json"
    for text in (
        json.dumps({"parts": dict(OTHER.parts)}),
        json.dumps({"parts": {"cpu": 1}}),
        json.dumps({"parts": ["cpu"]}),
        json.dumps([]),
        "[" * 60_000,
        " " * 70_000,
        "",
    ):
        about.write_text(text)
        (entry,) = open_store(local).entries()
        assert entry.parts == {}
    escape = Key({"cpu": "\x1b[2J"})
    (local / KEY.digest).rename(local / escape.digest)
    about = local / escape.digest / "key.json"
    about.write_text(json.dumps({"parts": dict(escape.parts)}))
    assert open_store(local).entries()[0].parts == {}


@pytest.mark.parametrize("digest", ["", "..", "../" + "0" * 29, "0" * 31, "G" * 32, "documents"])
def test_only_digests_are_removed(digest: str, local: Path) -> None:
    with pytest.raises(ValueError, match="is no digest of a key"):
        open_store(local).remove(digest)
    with pytest.raises(ValueError, match="there is no key"):
        open_store(local).remove_named([digest or "x"])
    with pytest.raises(ValueError, match="there is no key"):
        open_store(local).remove_named([""])


def test_the_keys_not_used_for_longest_go(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000_000_000.0]
    monkeypatch.setattr(stores.time, "time", lambda: clock[0])
    monkeypatch.setattr(stores.time, "time_ns", lambda: int(clock[0] * 1e9))
    made = tmp_path / "made"
    made.mkdir()
    (made / "noise").write_bytes(hashlib.shake_128(b"").digest(10_000))
    keys = [Key({"cpu": str(number)}) for number in range(5)]
    store = open_store(place, limit=35_000)
    for key in keys[:3]:
        clock[0] += 10
        assert store.save(key, made).evicted == ()  # type: ignore[union-attr]
    clock[0] += 10
    store.load(keys[0], tmp_path / "there")
    clock[0] += 10
    assert store.save(keys[3], made).evicted == (keys[1].digest,)  # type: ignore[union-attr]
    # The one that was just saved stays, even if it alone is too much.
    clock[0] += 10
    last = open_store(place, limit=5_000).save(keys[4], made)
    assert last is not None and set(last.evicted) == {keys[number].digest for number in (0, 2, 3)}
    assert [entry.digest for entry in store.entries()] == [keys[4].digest]
    # And one that went may come again, also from the process that had stored it.
    assert store.save(keys[1], made) is not None


def test_a_time_to_come_does_not_keep_a_key(local: Path, tmp_path: Path) -> None:
    (local / KEY.digest / "used").write_text(str(10**15))
    open_store(local).save(OTHER, folder(tmp_path / "made"))
    assert all(entry.used < 10**11 for entry in open_store(local).entries())


def test_what_killed_writers_left_goes(local: Path, tmp_path: Path) -> None:
    old, new = local / KEY.digest / ".1.tmp", local / KEY.digest / ".2.tmp"
    old.write_text("")
    new.write_text("")
    os.utime(old, (0, 0))
    open_store(local).save(KEY, folder(tmp_path / "made", {"later": ""}))
    assert not old.exists() and new.exists()
    open_store(local).remove(KEY.digest)
    assert not (local / KEY.digest).exists()


def test_why_a_key_was_missed(place: str, tmp_path: Path) -> None:
    store = open_store(place)
    assert store.why_missed(KEY) == f"no artifact for this key; nothing else is stored in {place}"
    store.save(OTHER, folder(tmp_path / "made"))
    near = Key({**KEY.parts, "threads": "8"})
    said = store.why_missed(KEY)
    assert said == f"no artifact for this key; the nearest, {OTHER.digest[:12]}, differs in cpu, threads"
    store.save(near, tmp_path / "made")
    assert store.why_missed(KEY).endswith(f"the nearest, {near.digest[:12]}, differs in threads")


# Several at once, and what fails


def _write(place: str, made: str, number: int, barrier: Any) -> None:
    store = open_store(place)
    barrier.wait()
    for step in range(8):
        own = Path(made) / str(number)
        folder(own, {f"f{number}-{step}": "x" * 1000, "shared": "s"})
        store.save(KEY, own)


def test_writers_and_readers_at_once(tmp_path: Path) -> None:
    """Three writers add 24 files, past the number at which bundles are merged; a reader never sees anything torn."""
    place = tmp_path / "store"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    writers = [context.Process(target=_write, args=(str(place), str(tmp_path), number, barrier)) for number in range(3)]
    for writer in writers:
        writer.start()
    barrier.wait()
    store = open_store(place)
    before: frozenset[str] = frozenset()
    while any(writer.is_alive() for writer in writers):
        loaded = store.load(KEY, tmp_path / "there")
        assert loaded.rejected == () and before <= loaded.names
        before = loaded.names
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    expected = {f"f{number}-{step}" for number in range(3) for step in range(8)} | {"shared"}
    assert open_store(place).load(KEY, tmp_path / "there").names == expected
    assert set(read(tmp_path / "there")) == expected
    assert not list(place.rglob("*.tmp"))


def test_a_reader_while_bundles_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was about to read is gone, and its files are in the bundle that came."""
    made = tmp_path / "made"
    writer, reader = open_store(tmp_path / "store"), open_store(tmp_path / "store")
    for number in range(16):
        writer.save(KEY, folder(made, {f"f{number}": ""}))
    real = reader._read
    turns = iter(range(100))

    def read_late(name: str, most: int) -> bytes | None:
        if next(turns) == 3:
            writer.save(KEY, folder(made, {"last": ""}))
        return real(name, most)

    monkeypatch.setattr(reader, "_read", read_late)
    loaded = reader.load(KEY, tmp_path / "there")
    assert len(loaded.names) == 17 and loaded.rejected == ()


@pytest.mark.parametrize("failing", ["open", "replace", "makedirs"])
def test_a_full_disk(failing: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))

    store = open_store(local)
    folder(tmp_path / "made", {"later": ""})
    with monkeypatch.context() as patch:
        if failing == "open":
            patch.setattr(stores, "open", full, raising=False)
        else:
            patch.setattr(stores.os, failing, full)
        with pytest.raises(StoreError, match=f"the artifact store {local}: OSError: No space left on device"):
            store.save(KEY, tmp_path / "made")
        with pytest.raises(StoreError, match="No space left on device"):
            store.put_document("calls", {})
    assert not list(local.rglob("*.tmp"))
    assert open_store(local).load(KEY, tmp_path / "there").names == FILES.keys()
    assert store.save(KEY, tmp_path / "made") is not None


def test_a_store_that_can_only_be_read(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EROFS, "Read-only file system", str(args[0]))

    store = open_store(local)
    monkeypatch.setattr(stores, "open", denied, raising=False)
    assert store.load(KEY, tmp_path / "there").files == 2
    folder(tmp_path / "made", {"later": ""})
    with pytest.raises(StoreError, match="Read-only file system"):
        store.save(KEY, tmp_path / "made")


def test_a_place_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = open_store(tmp_path / "file")
    with pytest.raises(StoreError, match=r"the artifact store .*file"):
        store.save(KEY, folder(tmp_path / "made"))


def test_a_place_that_fails_in_its_own_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Exception):
        pass

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise Unreachable("no route to host\nsecond line")

    store = open_store("memory://gone")
    monkeypatch.setattr(store._fs, "ls", fails, raising=False)
    for act in (
        lambda: store.load(KEY, tmp_path / "there"),
        lambda: store.save(KEY, folder(tmp_path / "made")),
        store.entries,
        store.documents,
        lambda: store.why_missed(KEY),
    ):
        with pytest.raises(
            StoreError, match=r"the artifact store memory://gone: Unreachable: no route to host$"
        ) as raised:
            act()
    assert pickle.loads(pickle.dumps(raised.value)).place == "memory://gone"


@pytest.mark.parametrize("place", ["nosuchprotocol://x", "s3://bucket/x"])
def test_an_address_that_can_not_be_used_here(place: str) -> None:
    with pytest.raises(StoreError, match=place):
        open_store(place)


def test_a_store_that_is_gone_meanwhile(local: Path, tmp_path: Path) -> None:
    store = open_store(local)
    local.rename(tmp_path / "away")
    assert store.load(KEY, tmp_path / "there").bundles == 0
    assert store.document("calls") is None and store.entries() == []


def test_without_a_secret_it_only_lists(local: Path, tmp_path: Path) -> None:
    store = ArtifactStore(local, None)
    for act in (lambda: store.load(KEY, tmp_path), lambda: store.save(KEY, tmp_path), lambda: store.document("x")):
        with pytest.raises(ValueError, match="can only list and remove"):
            act()
