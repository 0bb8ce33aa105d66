"""The TorchX component: TorchX's own command finds it, and its job is that of `dist.ddp` with the recorder before."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torchx
from torchx import specs
from torchx.components import dist
from torchx.runner import get_runner
from torchx.specs.finder import get_component

from initopt.plugins import torchx as component
from tests.programs import program

ROOT = Path(__file__).parents[1]
JOB = ("-j", "2x8", "--gpu", "8", "--env", "A=1", "--name", "ranking/")


def job(name: str, *words: str) -> specs.AppDef:
    """What TorchX makes of a command line; it refuses a component whose form it does not know."""
    with get_runner() as runner:
        info = runner.dryrun_component(name, list(words), "local_cwd", {"log_dir": os.devnull})
    assert info._app is not None
    return info._app


def line(app: specs.AppDef) -> str:
    [role] = app.roles
    assert (role.entrypoint, role.args[0]) == ("bash", "-c")
    return role.args[1]


def test_the_job_is_that_of_ddp() -> None:
    ours = f"{component.__file__}:ddp"
    assert get_component(ours).validation_errors == []
    for named, words in ((("--script", "a/train.py"), ["a/train.py"]), (("-m", "my.train"), ["-m", "my.train"])):
        stock = job("dist.ddp", *JOB, *named, "--", "--lr", "1 e")
        for options, given in ((("--root", "/x y", "--until", "model"), "--root '/x y' --until model "), ((), "")):
            found = job(ours, *JOB, *options, *named, "--", "--lr", "1 e")
            before, after = line(stock).split(" ".join(words), 1)
            assert line(found) == f"{before}-m initopt.run {given}{' '.join(words)}{after}"
            # All else is the same: name, role, resources, environment.
            found.roles[0].args = stock.roles[0].args
            assert dataclasses.asdict(found) == dataclasses.asdict(stock)


def test_the_documented_command(tmp_path: Path) -> None:
    assert component.__doc__ is not None
    [command] = re.findall(r"^    (torchx run .*)$", component.__doc__, flags=re.MULTILINE)
    assert command in (ROOT / "docs" / "recipes" / "torchx.md").read_text()
    program(tmp_path, "python", f'exec {sys.executable} "$@"')
    program(tmp_path, "torchx", f'exec {sys.executable} -c "import torchx.cli.main as cli; cli.main()" "$@"')
    done = subprocess.run(
        ["bash", "-c", command.replace("run ", "run --dryrun -s local_cwd ", 1)],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # The lines are broken to fit the terminal.
    printed = " ".join(re.sub(r"[\"']", "", done.stdout).split())
    assert "--nnodes 2 --nproc_per_node 8 --tee 3 --role -m initopt.run train.py ARGS" in printed


def test_neither_or_both_programs_are_refused() -> None:
    for given in ({}, {"script": "train.py", "m": "train"}):
        with pytest.raises(ValueError, match="exactly one of --script and -m must be specified"):
            component.ddp(**given)


def test_another_version_is_left_alone_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchx, "__version__", "0.8.0")
    with pytest.warns(UserWarning, match=r"initopt: TorchX 0\.8\.0 is not known.*nothing is recorded") as warned:
        app = component.ddp("--lr", "1", script="train.py")
    assert [(len(warned), warned[0].filename)] == [(1, __file__)]
    assert dataclasses.asdict(app) == dataclasses.asdict(dist.ddp("--lr", "1", script="train.py"))
