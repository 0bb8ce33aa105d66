"""Where the secret comes from, which ones are refused, and that a signature is of these fields and no others."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from initopt.compile_cache.authenticity import SigningKey, SigningKeyError

KEY = SigningKey(b"k" * 32)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("INITOPT_CACHE_KEY", raising=False)
    monkeypatch.delenv("INITOPT_CACHE_KEY_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "initopt" / "cache.key"


def test_a_key_file_is_made_at_first_use_for_its_owner_alone(file: Path) -> None:
    before = os.umask(0)
    try:
        made = SigningKey.find()
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert list(file.parent.iterdir()) == [file]
    assert len(bytes.fromhex(file.read_text())) == 32
    assert SigningKey.find() == made
    file.unlink()
    assert SigningKey.find() != made


def test_the_file_may_be_elsewhere_and_its_text_may_be_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INITOPT_CACHE_KEY_FILE", str(tmp_path / "mine"))
    found = SigningKey.find()
    text = (tmp_path / "mine").read_text()
    monkeypatch.setenv("INITOPT_CACHE_KEY", text)
    monkeypatch.setenv("INITOPT_CACHE_KEY_FILE", str(tmp_path / "none"))
    assert SigningKey.find() == found
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("text", ["", "short", "x" * 31, " " * 40])
def test_a_short_variable_is_an_error_and_no_reason_to_take_the_file(
    text: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INITOPT_CACHE_KEY", text)
    with pytest.raises(SigningKeyError, match=r"INITOPT_CACHE_KEY has \d+ bytes: it must have at least 32"):
        SigningKey.find()
    assert not file.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o610])
@pytest.mark.parametrize("linked", [False, True])
def test_a_file_that_others_can_open_is_refused(mode: int, linked: bool, file: Path, tmp_path: Path) -> None:
    SigningKey.find()
    file.chmod(mode)
    if linked:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SigningKeyError, match=rf"{file} has mode {mode:04o}: .*`chmod 600 {file}`"):
        SigningKey.find()


def test_a_link_to_an_own_file_is_one(file: Path, tmp_path: Path) -> None:
    made = SigningKey.find()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert SigningKey.find() == made


def test_a_file_of_somebody_else_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SigningKey.find()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SigningKeyError, match=rf"{file} belongs to user {os.getuid()}, not to you"):
        SigningKey.find()


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"\n" * 64, b"x" * 5000])
def test_a_file_without_a_secret_is_refused(content: bytes, file: Path) -> None:
    SigningKey.find()
    file.write_bytes(content)
    with pytest.raises(SigningKeyError, match="Remove it for a new one"):
        SigningKey.find()


def test_what_is_no_file_is_refused_and_not_waited_for(file: Path) -> None:
    file.parent.mkdir()
    os.mkfifo(file, 0o600)
    with pytest.raises(SigningKeyError, match="is not a regular file"):
        SigningKey.find()
    file.unlink()
    file.mkdir(0o700)
    with pytest.raises(SigningKeyError, match="is not a regular file"):
        SigningKey.find()


def test_a_file_that_can_not_be_made(file: Path) -> None:
    file.parent.write_text("")
    with pytest.raises(SigningKeyError, match="Set INITOPT_CACHE_KEY"):
        SigningKey.find()


def _find(barrier: object, found: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    found.put(SigningKey.find().secret)  # type: ignore[attr-defined]


def test_ranks_that_make_the_file_at_once_agree(file: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        barrier, found = context.Barrier(4), context.Queue()
        ranks = [context.Process(target=_find, args=(barrier, found)) for _ in range(4)]
        for rank in ranks:
            rank.start()
        secrets = {found.get(timeout=30) for _ in ranks}
        for rank in ranks:
            rank.join()
        assert secrets == {file.read_bytes().strip()}
        assert list(file.parent.iterdir()) == [file]
        file.unlink()


def test_a_secret_is_not_shown_and_too_short_ones_are_none() -> None:
    assert "k" * 8 not in repr(KEY) and KEY.name != SigningKey(b"l" * 32).name
    with pytest.raises(SigningKeyError, match="at least 32"):
        SigningKey(b"x")


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_a_signature_is_of_these_fields(one: list[bytes], other: list[bytes]) -> None:
    signature = KEY.sign(*one)
    assert KEY.check(signature, *one)
    assert KEY.check(signature, *other) == (one == other)
    assert not SigningKey(b"l" * 32).check(signature, *one)
    assert not KEY.check(signature[:-1], *one) and not KEY.check(b"", *one)


def test_fields_are_framed() -> None:
    assert not KEY.check(KEY.sign(b"ab", b"c"), b"a", b"bc")
    assert not KEY.check(KEY.sign(b"ab"), b"ab", b"")
