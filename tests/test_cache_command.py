"""`initopt cache`: what it prints and removes, its exit codes, and that it needs neither torch nor a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from initopt import cache_view, cli
from initopt.compile_cache import store as stores
from initopt.compile_cache.authenticity import SigningKey
from initopt.compile_cache.key import Key
from initopt.compile_cache.store import ArtifactStore, Entry
from tests.golden import check_golden

PARTS = {
    "model": "1763f292cd7e43b2cef90ca65079de5a",
    "options": "dynamic=False, fullgraph=False, mode='max-autotune-no-cudagraphs', options={}",
    "inductor": "044fd79a822a",
    "torch": "2.13.0+cpu cf30153c4c13",
    "triton": "none",
    "python": "CPython 3.11",
    "platform": "linux x86_64 glibc 2.36",
    "cpu": "AuthenticAMD 25 17 1 670c9f338dd4, AVX512",
    "compiler": "(Debian 12.2.0-14+deb12u1) 12.2.0 x86_64-linux-gnu",
    "threads": "1",
    "settings": "float32, float32 matmul highest",
    "device": "cpu",
}
KEY = Key(PARTS)
NEAR = Key({**PARTS, "cpu": "GenuineIntel 6 85 7 99ab0c1d2e3f, AVX2", "threads": "8"})
FAR = Key({name: f"{text} once" for name, text in PARTS.items() if name != "device"})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with three keys: one with two bundles, one without a readable key.json."""
    monkeypatch.chdir(tmp_path)
    store = ArtifactStore(".initopt/compile_cache", SigningKey(b"k" * 32))
    made = tmp_path / "made"
    made.mkdir()
    clock = [1_795_000_000]
    with monkeypatch.context() as patch:
        patch.setattr(stores.time, "time", lambda: clock[0])
        patch.setattr(stores.time, "time_ns", lambda: clock[0] * 10**9)
        for number, key in enumerate((FAR, NEAR, KEY, KEY)):
            clock[0] += 100_000
            (made / f"f{number}").write_text("x" * 10_000)
            store.save(key, made)
        store.put_document("calls", {"shape": [1]})
    return tmp_path / ".initopt" / "compile_cache"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["cache", *words])
    said = capsys.readouterr()
    return int(str(left.value.code)), said.out, said.err


def test_the_view() -> None:
    """With sizes of its own: those of bundles depend on the version of zlib."""
    entries = [
        Entry(KEY.digest, PARTS, 2, 2_310_000, 1_795_200_000.0, 1_795_300_000.0),
        Entry(NEAR.digest, NEAR.parts, 1, 1_150_000, 1_795_100_000.0, 1_795_200_000.0),
        Entry(FAR.digest, FAR.parts, 1, 978, 1_795_000_000.0, 1_795_000_000.0),
        Entry("0" * 32, {}, 16, 12_000_000_000, 0.0, 0.0),
    ]
    view = cache_view.cache_view(entries, {"calls": 300, "verdict": 90}, place=".initopt/compile_cache")
    check_golden("cache.txt", view.plain + "\n")
    assert max(len(line.plain) for line in view.lines) <= 80


def test_the_command_prints_it_on_a_narrow_terminal(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert out.startswith(".initopt/compile_cache · 3 keys")
    assert [KEY.digest[:12] in out, NEAR.digest[:12] in out, FAR.digest[:12] in out] == [True] * 3
    assert out.splitlines()[-2].startswith("next: initopt cache --remove")


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(capsys, str(tmp_path / "none"))
    assert (code, out) == (2, "") and err == f"initopt: there is no {tmp_path / 'none'}: nothing is stored there\n"
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path / "none"))
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert "Nothing compiled is stored here yet" in out and out.splitlines()[-1].startswith("next: initopt")
    assert not (tmp_path / "none").exists()


def test_json(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(place), "--json")
    data = json.loads(out)
    assert code == 0 and data["version"] == 1 and data["place"] == str(place)
    assert [key["digest"] for key in data["keys"]] == [KEY.digest, NEAR.digest, FAR.digest]
    assert data["keys"][0]["parts"] == PARTS and data["keys"][0]["bundles"] == 2
    assert data["keys"][1]["differs"] == ["cpu", "threads"]
    assert data["bytes"] == sum(key["bytes"] for key in data["keys"]) + data["documents"]["calls"]


def test_removing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--remove", FAR.digest[:12], "--remove", NEAR.digest)
    assert code == 0 and out.startswith(f"Removed {FAR.digest}.\nRemoved {NEAR.digest}.\n")
    assert "1 key ·" in out
    assert sorted(path.name for path in place.iterdir()) == sorted([KEY.digest, "documents"])
    code, out, err = run(capsys, "--remove", "f00")
    assert (code, out) == (2, "")
    assert err.startswith("initopt: there is no key 'f00' in .initopt/compile_cache") and KEY.digest[:12] in err


def test_a_place_that_can_not_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "nosuchprotocol://x")
    assert (code, out) == (2, "")
    assert err.startswith("initopt: the artifact store nosuchprotocol://x: ")


def test_a_key_that_says_nothing_of_itself(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / KEY.digest / "key.json").write_text("{}")
    code, out, _ = run(capsys)
    assert code == 0
    assert f"{KEY.digest[:12]}: what it was made from is not known" in out
    assert f"\n{NEAR.digest[:12]}:\n  model: " in out


def test_it_needs_neither_torch_nor_a_secret(place: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from initopt import cli\n"
        "try: cli.main(['cache'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "False\n"
    assert KEY.digest[:12] in done.stdout and "\x1b" not in done.stdout
    assert not (tmp_path / "config").exists()


def test_sizes() -> None:
    said = [cache_view.size(amount) for amount in (0, 700, 300_000, 2_300_000, 80 << 30)]
    assert said == ["0", "700 B", "293 kB", "2.2 MB", "80.0 GB"]
