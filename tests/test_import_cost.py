"""What `import initopt` brings into a worker: nothing heavy, and nothing that the machine of a reader may lack."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "asyncio",
    "click",
    "fbgemm_gpu",
    "hypothesis",
    "matplotlib",
    "msgspec",
    "networkx",
    "numpy",
    "opentelemetry",
    "rich",
    "sqlite3",
    "torch",
    "torchrec",
    "typer",
    "unittest",
}

WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchrec", "fbgemm_gpu", "numpy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""

AROUND_THE_IMPORT = """
import json, logging, os, signal, sys, threading, warnings
def state():
    return {
        "environment": dict(os.environ),
        "threads": threading.active_count(),
        "logging": len(logging.root.handlers),
        "warnings": len(warnings.filters),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "excepthook": sys.excepthook is sys.__excepthook__,
    }
before = state()
import initopt
print(json.dumps([before, state()]))
"""


def fresh(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_brings_nothing_heavy() -> None:
    loaded = set(json.loads(fresh("import json, sys, initopt; print(json.dumps(list(sys.modules)))")))
    assert "initopt" in loaded
    assert loaded & HEAVY == set()


def test_import_has_no_effect() -> None:
    before, after = json.loads(fresh(AROUND_THE_IMPORT))
    assert before == after


@pytest.mark.parametrize("module", ["initopt", "initopt.report", "initopt.cli"])
def test_reading_a_run_needs_no_torch(module: str) -> None:
    assert fresh(f"{WITHOUT_TORCH}\nimport {module}\nprint('fine')") == "fine\n"
