"""Who may import whom: the contracts in pyproject.toml hold, and each of them notices when it is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the package in `folder` with the contracts of the `pyproject.toml` there."""
    code = (
        "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports('pyproject.toml', no_cache=True))"
    )
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=wide, text=True, capture_output=True, timeout=60
    )


def test_the_contracts_hold() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("graph.py", "import initopt.record", "a file imports only files of the layers below it"),
        ("ett.py", "import initopt.bench", "a file imports only files of the layers below it"),
        ("new_idea.py", "", "a file imports only files of the layers below it"),
        ("overlap.py", "import initopt.plugins.torchrec", "no plugin is imported by name"),
        ("plugins/cuda.py", "import initopt.plugins.torchrec", "no plugin is imported by name"),
        ("plugins/torchrec.py", "import initopt.graph", "a plugin imports from initopt and initopt.plugins only"),
        ("overlap.py", "import torchrec", "torchrec and fbgemm_gpu are imported by the torchrec plugin only"),
        ("plugins/cuda.py", "import fbgemm_gpu", "torchrec and fbgemm_gpu are imported by the torchrec plugin only"),
        ("record.py", "import rich", "rich and typer are imported by report.py and cli.py only"),
        ("report.py", "import typer", "rich and typer are imported by report.py and cli.py only"),
        ("bench.py", "import matplotlib", "matplotlib is imported by picture.py only"),
        ("bench.py", "import benchmarks", "the package needs neither its benchmarks nor its tests"),
    ],
)
def test_a_wrong_import_breaks_its_contract(tmp_path: Path, file: str, line: str, contract: str) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for source in (ROOT / "initopt").rglob("*.py"):
        copy = tmp_path / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text())
    # Inside a function: an import that is put off is an import all the same.
    with open(tmp_path / "initopt" / file, "a") as changed:
        changed.write(f"\n\ndef wrong() -> None:\n    {line or 'pass'}\n")
    result = lint(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    broken = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    assert [text.startswith(contract) for text in broken] == [True], result.stdout
