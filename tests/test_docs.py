"""Every command and every Python block of the pages runs, as it stands or as what stands for it on this machine.

What stands for it is written beside the pattern of the command. A command that no pattern knows fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from packaging.requirements import Requirement

from initopt import cli
from initopt.chain import finished_ranks
from initopt.plugins import torchx as component
from initopt.runs import Run
from tests.comm_elim.recorded import stock
from tests.multirank.launch import free_port
from tests.programs import program
from tests.synthetic import wasteful, write_run
from tests.test_plan_command import MODEL

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += sorted(ROOT.glob("docs/**/*.md"))

PROGRAMS = "bash|docker|git|initopt|kubectl|make|mkdocs|npm|npx|openssl|pip|python3?|sbatch|srun|torchrun|torchx"
COMMAND = re.compile(rf"(?:\w+=\S* )*(?:(?:{PROGRAMS})\s+\S.*|initopt)", flags=re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A piece of code of a page: `language` is that of its fence, or `inline`, or `indented`."""

    place: str
    language: str
    text: str


def snippets() -> Iterator[Snippet]:
    parser = MarkdownIt("commonmark").enable("table")
    for page in PAGES:
        line = 0
        for token in parser.parse(page.read_text()):
            line = token.map[0] + 1 if token.map else line
            place = f"{page.relative_to(ROOT)}:{line}"
            if token.type == "fence":
                yield Snippet(place, token.info, token.content)
            elif token.type == "code_block":
                yield Snippet(place, "indented", token.content)
            for child in token.children or ():
                if child.type == "code_inline":
                    yield Snippet(place, "inline", child.content)


def commands() -> dict[str, str]:
    """Each command of the pages, and where it stands first."""
    found: dict[str, str] = {}
    for snippet in snippets():
        if snippet.language == "bash" and snippet.text.startswith("#!"):
            lines = [snippet.text]
        elif snippet.language == "bash":
            lines = snippet.text.replace("\\\n", "").splitlines()
        elif snippet.language == "console":
            lines = [line[2:] for line in snippet.text.splitlines() if line.startswith("$ ")]
        else:
            lines = [snippet.text] if snippet.language == "inline" and COMMAND.fullmatch(snippet.text) else []
        for line in lines:
            command = line if line.startswith("#!") else re.sub(r"\s+#.*", "", line).strip()
            if command and not command.startswith("# "):
                found.setdefault(command, snippet.place)
    return found


class Here:
    """A folder with the scripts that the commands name. What is alike is run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[str, Path] = {}
        [script] = [one.text for one in snippets() if one.language == "python" and "first-run.md" in one.place]
        files = {"train.py": script, "tzrec/__init__.py": "", "tzrec/train_eval.py": script, "ranking.py": MODEL}
        light = 'import initopt\nwith initopt.Recorder("light", mode="stock"), initopt.step("first_step"):\n    pass\n'
        for name, text in {**files, "before.py": light, "after.py": light}.items():
            path = folder / "scripts" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (folder / "bin").mkdir()
        program(folder / "bin", "python", f'exec {sys.executable} "$@"')
        program(folder / "bin", "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
        program(folder / "bin", "initopt", f'exec {sys.executable} -c "from initopt.cli import main; main()" "$@"')
        spans, graph, noted = wasteful()
        write_run(folder / "with_graph", spans, graph=graph, extra=noted)
        stock().run(folder / "with_tables", number=1)

    def run(self, command: str) -> Path:
        """The run root that the command has left, which is run once by bash."""
        if command not in self._done:
            place = self.folder / f"runs{len(self._done)}"
            env = {
                **os.environ,
                "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "INITOPT_ROOT": str(place),
                "OMP_NUM_THREADS": "1",
                # For torchrun: a port of its own. For a script that it does not start: one rank.
                "PET_STANDALONE": "1",
                **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
            }
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder / "scripts",
                env=env,
                capture_output=True,
                text=True,
                timeout=80,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            self._done[command] = place
        return self._done[command]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Here:
    return Here(tmp_path_factory.mktemp("docs"))


RECORDED = "torchrun --nproc-per-node 2 -m initopt.run train.py"
LAUNCHED = "initopt launch --nproc-per-node 1 --max-restarts 3 train.py"


def starts(here: Here, command: str) -> None:
    """A start of train.py, which is the script of the first run's page, or of a package tzrec that has nothing else.

    One rank, or two for what the first run's page has, and without arguments of the script. A package without torchrun,
    which hands its words on as those of a script. Python alone with a script that is nearly nothing.
    """
    wanted = command.replace(" -m MODULE", " -m tzrec.train_eval").replace(" SCRIPT", " train.py").replace(" ARGS", "")
    wanted = wanted.replace(" --lr 1", "").replace(" --standalone", "").replace("torchrun -m", "torchrun ... -m")
    ranks = 1 if re.search("-m tzrec|--optimize|initopt launch", wanted) else 2
    for given in ("...", "--nproc-per-node 8", "--nproc-per-node 2"):
        wanted = wanted.replace(given, f"--nproc-per-node {ranks}")
    wanted = wanted.replace("torchrun --nproc-per-node 1 -m initopt.run -m", "python -m initopt.run -m")
    wanted = re.sub(r"^(python|python -u) train\.py$", r"\1 before.py", wanted)
    if wanted in ("initopt launch train.py", LAUNCHED.replace(" --max-restarts 3", "")):
        wanted = LAUNCHED
    root = here.run(wanted)
    if "initopt.run" in wanted:
        assert finished_ranks(Run.latest(root)) == list(range(ranks if "torchrun" in wanted else 1))


def reads(here: Here, command: str) -> None:
    """A view: of the run that a start has recorded, or of a made-up one where it has to have a graph or tables."""
    words = shlex.split(re.sub(r"^INITOPT_ROOT=\S+ ", "", command))[1:]
    words = ["1" if word == "RUN" else word for word in words]
    made_up = {"draw": "with_graph", "--why": "with_tables"}
    wanted = [name for word, name in made_up.items() if word in words]
    root = here.folder / wanted[0] if wanted else here.run(RECORDED)
    words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, os.devnull)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INITOPT_ROOT", str(root))
        patch.chdir(here.folder)
        with open(target, "w") as printed, contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            cli.main(words)
    # 1 is a finding.
    assert ended.value.code in (0, 1)
    for name in [word for word in (*words, target) if word.endswith((".html", ".svg", ".gz"))]:
        assert (here.folder / name).stat().st_size > 0


def only_named(here: Here, command: str) -> None:
    """The name of a command without its arguments: its help."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*shlex.split(command)[1:], "--help"])
    assert ended.value.code == 0


def plans(here: Here, command: str) -> None:
    """A plan of a small model, which is written to a file, too."""
    here.run(f"{command.replace('MODULE:FUNCTION', 'ranking:small').removesuffix(' -o plan.json')} -o plan.json")


def measures(here: Here, command: str) -> None:
    """Both sides once, as scripts that record one step and nothing else."""
    wanted = command.replace("torchrun --nproc-per-node 8 -m initopt.run", "python")
    wanted = wanted.replace("COMMAND", "python before.py").replace(" -- ", " --runs 1 --warmup 0 -- ")
    here.run(wanted)


def installs(here: Here, command: str) -> None:
    """Nothing is installed: what is named must be an extra, or stand in requirements-cpu.txt or the Makefile."""
    extras = metadata.metadata("initopt").get_all("Provides-Extra")
    asked = (ROOT / "requirements-cpu.txt").read_text() + (ROOT / "Makefile").read_text()
    for word in shlex.split(command)[2:]:
        if word != "--no-deps":
            wanted = Requirement(word)
            assert (wanted.extras <= set(extras or ())) if wanted.name == "initopt" else word in asked, word


def makes(here: Here, command: str) -> None:
    """make says what it would do: the tests, the demo and the measurements are no test of the documentation."""
    subprocess.run(["make", "--dry-run", *shlex.split(command)[1:]], cwd=ROOT, check=True, capture_output=True)


def exists(here: Here, command: str) -> None:
    """Measurements take minutes to hours: the module is there, and has the options that are named."""
    words = shlex.split(command)
    target = words[words.index("-m") + 1]
    if target == "pytest":
        assert all((ROOT / word).exists() for word in words[3:] if not word.startswith("-"))
        return
    found = util.find_spec(target)
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text()
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


def runs(here: Here, command: str) -> None:
    """As it stands."""
    here.run(command)


def is_bash(here: Here, command: str) -> None:
    """A job of SLURM: its form only. tests/multirank/test_recipes.py runs them with programs that play SLURM."""
    subprocess.run(["bash", "-n"], input=command, text=True, check=True)


def is_known_to_torchx(here: Here, command: str) -> None:
    """tests/test_torchx.py gives the command of the component's docstring to TorchX."""
    assert command in (component.__doc__ or "")


VIEWS = "blame|cache|collectives|compile|critical-chain|defer|draw|ett|imports|plot|report|verify"
RUNNERS: dict[str, Callable[[Here, str], None]] = {
    r"#!/bin/bash\n.*": is_bash,
    r"torchrun .*": starts,
    r"python (-u )?(-m initopt\.run )?(train\.py|SCRIPT).*": starts,
    r"initopt launch .+": starts,
    rf"(INITOPT_ROOT=\S+ )?initopt( ({VIEWS})( .+)?)?": reads,
    r"initopt (launch|plan|bench)": only_named,
    r"initopt plan .+": plans,
    r"initopt bench --stock .+": measures,
    r"pip install .+": installs,
    r"make \w+": makes,
    r"python -m (benchmarks|tests|pytest).*": exists,
    r"openssl rand -hex 32|python -m initopt\.plugins\.torchx": runs,
    r"torchx run .+": is_known_to_torchx,
}


def runners_of(command: str) -> list[Callable[[Here, str], None]]:
    return [runner for pattern, runner in RUNNERS.items() if re.fullmatch(pattern, command, flags=re.DOTALL)]


@pytest.mark.parametrize("command", ["initopt nosuch", "python -m other", "sbatch job.sh", "initopt-other --x"])
def test_a_command_that_no_test_runs_is_not_known(command: str) -> None:
    assert runners_of(command) == []


@pytest.mark.parametrize(("command", "place"), [pytest.param(*one, id=one[1]) for one in commands().items()])
def test_the_command(command: str, place: str, here: Here) -> None:
    found = runners_of(command)
    assert len(found) == 1, f"{place}: {command!r} is known to {len(found)} patterns of {__name__}, not one"
    found[0](here, command)


def test_each_block_has_a_language_that_is_looked_at() -> None:
    known = {"bash", "console", "inline", "python", "text", "yaml"}
    assert [snippet for snippet in snippets() if snippet.language not in known] == []
    for snippet in snippets():
        if snippet.language == "yaml":  # tests/multirank/test_recipes.py runs its command
            assert all("kind" in part for part in yaml.safe_load_all(snippet.text)), snippet.place


def test_the_python_blocks(tmp_path: Path) -> None:
    blocks = [(one.place, one.text) for one in snippets() if one.language == "python" and "first-run" not in one.place]
    # The first looks at all of torch's import, the second is whole: they begin in a fresh interpreter.
    alone = {word: [block for block in blocks if word in block[1]] for word in ("record_imports()", "initopt.Startup(")}
    for [block] in alone.values():
        blocks.remove(block)
    (tmp_path / "blocks.json").write_text(json.dumps(blocks))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **ranks, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def output(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=80
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = output("-m", "tests.documented_pieces", "blocks.json").splitlines()
    assert [line for line in printed if line in dict(blocks)] == [place for place, _ in blocks]
    output("-c", alone["record_imports()"][0][1])
    example = output("-c", alone["initopt.Startup("][0][1])
    assert example.startswith("6\n")
    assert "example" in example


def test_the_site(tmp_path: Path) -> None:
    """Its links hold, and it asks for nothing that is not in it."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "first-run.html", "slurm.html"} <= {page.name for page in pages}
    for page in pages:
        assert re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="?(?:https?:)?//', page.read_text()) == []
