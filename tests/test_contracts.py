"""Who may import whom: the contracts in pyproject.toml hold, and each of them notices when it is broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint(folder: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """Check the package in `folder` with the contracts of the `pyproject.toml` there: all, or those with these ids."""
    code = (
        "import sys; from importlinter.cli import lint_imports\n"
        f"sys.exit(lint_imports('pyproject.toml', limit_to_contracts={contracts!r}, no_cache=True, no_logo=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        text=True,
        capture_output=True,
        timeout=60,
    )


def test_the_contracts_hold() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("contract", "module", "imported"),
    [
        ("layers", "graph", "initopt.record"),
        ("layers", "ett", "initopt.bench"),
        ("layers", "bench", "initopt.report"),
        ("plugins-are-found", "overlap", "initopt.plugins.torchrec"),
        ("plugins-are-found", "plugins.cuda", "initopt.plugins.torchrec"),
        ("plugins-use-public-names", "plugins.cuda", "initopt.graph"),
        ("torchrec", "overlap", "torchrec"),
        ("torchrec", "plugins.cuda", "fbgemm_gpu"),
        ("terminal", "record", "rich"),
        ("terminal", "report", "typer"),
        ("pictures", "bench", "matplotlib"),
        ("installed-alone", "bench", "benchmarks"),
    ],
)
def test_a_wrong_import_is_named(tmp_path: Path, contract: str, module: str, imported: str) -> None:
    copy_package(tmp_path)
    # Inside a function: an import that is put off is an import all the same.
    with open(tmp_path / f"initopt/{module.replace('.', '/')}.py", "a") as source:
        source.write(f"\n\ndef wrong() -> None:\n    import {imported}\n")
    result = lint(tmp_path, contract)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(rf"initopt\.{module} -> {imported} \(", result.stdout), result.stdout


def test_a_new_file_needs_its_place_among_the_layers(tmp_path: Path) -> None:
    copy_package(tmp_path)
    (tmp_path / "initopt/new_idea.py").write_text("")
    result = lint(tmp_path, "layers")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "- initopt.new_idea" in result.stdout


def copy_package(folder: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "initopt", folder / "initopt", ignore=shutil.ignore_patterns("__pycache__"))
