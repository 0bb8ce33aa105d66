"""`python -m initopt.run SCRIPT ARGS`: any script, as it is, with its start-up recorded.

It does not run the script. It leaves word in the environment and lets the interpreter begin anew, in the same process,
with the script's own command line: so `__main__`, `sys.argv`, tracebacks, signals, exit handlers and the end of the
interpreter are those of `python SCRIPT ARGS`. The word reaches every interpreter that is started from there, whoever
starts it: the folder `every_process`, first on PYTHONPATH, has the `sitecustomize` that picks it up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from initopt.optimizations import NAMES, TABLE, unknown_disabled

VARIABLE = "INITOPT_RUN"
"""Set where a start-up is recorded: the interpreter that is meant, the script's process id, a `Wanted` as JSON."""

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "every_process")

_USAGE = f"""usage: python -m initopt.run [OPTION]... SCRIPT [ARG]...
       python -m initopt.run [OPTION]... -m MODULE [ARG]...
       torchrun [OPTION]... -m initopt.run [OPTION]... SCRIPT [ARG]...

Runs the script or module as Python would, and records its start-up on every rank, up to the first training step.

  --optimize    also make it shorter, where the training is proven to stay the same. Without one of these:
{chr(10).join(f"    {'--no-' + one.name:<17}{one.does}" for one in TABLE)}
  --until NAME  the start-up ends with the step NAME: one of the script's (`with initopt.step("NAME")`) or one that was
                found, such as first_batch. Default: the first optimizer step on real data
  --root DIR    where runs are kept; default: $INITOPT_ROOT, else .initopt
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be recorded, and what the environment was before.

    `program` is the process id of the script itself, `name` its name, `before` the value of PYTHONPATH, None where it
    was not set. `until` and `root` are the options, empty where they were not given. `spent` are the CPU seconds
    until the interpreter began anew.
    """

    program: int
    name: str
    until: str
    root: str
    before: str | None
    spent: float = 0.0
    optimize: Sequence[str] = ()


class UsageError(Exception):
    """The command line can't be understood. The message says what is wrong with it."""


def main() -> NoReturn:
    """Become the program of the command line, recorded. Ends with exit code 2 where there is none."""
    words = sys.argv[1:]
    try:
        options, program = _parsed(words)
    except UsageError as error:
        print(f"{error}\n{_USAGE}" if str(error) else _USAGE, file=sys.stderr, end="")
        sys.exit(2)
    if options is None:
        print(_USAGE, end="")
        sys.exit(0)
    command = [*interpreter_words(sys.orig_argv[: len(sys.orig_argv) - len(words)]), *program]
    if sys.flags.ignore_environment or sys.flags.no_site:
        flag = "-S" if sys.flags.no_site else "-E or -I"
        print(f"initopt: nothing is recorded: python {flag} leaves out what watches the script", file=sys.stderr)
        os.execv(sys.executable, command)
    leave_word(options, program, time.thread_time())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, command)


def behind(words: Sequence[str]) -> tuple[Options, list[str]] | None:
    """What the command line `INTERPRETER -u -m initopt.run WORDS` becomes: the options, and the command line of that.

    None for any other one, and where it asks for help. Raises UsageError where its words can't be understood.
    """
    if list(words[2:4]) != ["-m", "initopt.run"]:
        return None
    options, program = _parsed(words[4:])
    return None if options is None else (options, [*words[:2], *program])


def leave_word(options: Options, program: Sequence[str], spent: float) -> None:
    """Say in the environment that this process becomes `program`, and what is to be recorded of it.

    `spent` are the CPU seconds that it has cost until now.
    """
    before = os.environ.get("PYTHONPATH")
    name = program[1] if program[0] == "-m" else os.path.basename(program[0].rstrip(os.sep))
    wanted = Wanted(os.getpid(), name, options.until, options.root, before, spent, optimize=options.optimize)
    os.environ["PYTHONPATH"] = _with_folder(before)
    os.environ[VARIABLE] = f"{_interpreter()}:{wanted.program}:{json.dumps(asdict(wanted))}"


def _interpreter() -> str:
    """Names this installation of Python. Another one may inherit the environment, and lack what stands in it."""
    return f"{sys.version_info[0]}.{sys.version_info[1]} {sys.prefix}"


def interpreter_words(words: Sequence[str]) -> list[str]:
    """The interpreter and its own options, from a command line that ends in `-m initopt.run`.

    >>> interpreter_words(["python", "-u", "-W", "error", "-m", "initopt.run"])
    ['python', '-u', '-W', 'error']
    >>> interpreter_words(["python", "-um", "initopt.run"])
    ['python', '-u']
    """
    *kept, last = words
    joined = last.startswith("-")  # -minitopt.run
    option = last[: last.index("m")] if joined else kept.pop().removesuffix("m")
    return [*kept, *([option] if option != "-" else [])]


@dataclass(slots=True)
class Options:
    """Those of the command line, each empty where it was not given."""

    until: str = ""
    root: str = ""
    optimize: tuple[str, ...] = ()


def _parsed(words: Sequence[str]) -> tuple[Options | None, list[str]]:
    """The options (None: help is asked for) and the program with its arguments."""
    options = Options()
    left_out: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        word, given, value = rest.pop(0).partition("=")
        if word in ("-h", "--help"):
            return None, []
        name = word.removeprefix("--")
        if name == "optimize" or (name.startswith("no-") and name[3:] in NAMES):
            if given:
                raise UsageError(f"initopt.run: {word} takes no value")
            if name == "optimize":
                options.optimize = NAMES
            else:
                left_out.append(name[3:])
            continue
        if name not in ("until", "root") or not word.startswith("--"):
            raise UsageError(f"initopt.run: there is no option {word}; the script's own come after its name")
        if not given:
            value = rest.pop(0) if rest else ""
        if not value:
            raise UsageError(f"initopt.run: {word} needs a value")
        setattr(options, name, value)
    if left_out and not options.optimize:
        raise UsageError(f"initopt.run: --no-{left_out[0]} takes something away from --optimize, which is not there")
    if options.optimize and (wrong := unknown_disabled()):
        raise UsageError(f"initopt.run: {wrong}")
    options.optimize = tuple(name for name in options.optimize if name not in left_out)
    if not rest or rest == ["-m"]:
        raise UsageError("initopt.run: no script is named")
    return options, rest


def wanted() -> Wanted:
    """What the environment says is to be recorded. Raises KeyError where it says nothing."""
    found: dict[str, Any] = json.loads(os.environ[VARIABLE].removeprefix(_interpreter()).split(":", 2)[2])
    return Wanted(**found)


def forget(wanted: Wanted) -> None:
    """Give the environment back: what is started from here on is no rank, and sees it as it would have been."""
    os.environ.pop(VARIABLE, None)
    path = os.environ.get("PYTHONPATH", "")
    if path == _with_folder(wanted.before):
        if wanted.before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = wanted.before
    elif FOLDER in (parts := path.split(os.pathsep)):  # the script has set it since
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in parts if part != FOLDER)


def _with_folder(path: str | None) -> str:
    return os.pathsep.join(filter(None, (FOLDER, path)))


if __name__ == "__main__":
    main()
