"""torchrun as it is, but for how a rank comes to life: its own parser, agent, rendezvous, logs, restarts and reports.

torchelastic makes each rank through a handler, whose `_popen` starts a process. Here it asks for a fork. Environment,
redirects, signals, exit codes, error files and the report of a failure stay torchelastic's.

Where a rank can't be forked, it is started as torchrun starts it. So each host of a job decides for itself, and its
imports run beside the rendezvous.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from initopt.launch.warm_workers import LaunchError, WarmWorkers, say
from initopt.run import UsageError, behind

TESTED_TORCH = "2.13."

_AS_TORCHRUN = "ranks are started as by torchrun here, and each imports for itself"

_WITHOUT_VALUE = ("--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank", "-h", "--help")
"""Options of torchrun that take no value. Only for a guess, see `_guess`."""


def launch(words: Sequence[str]) -> None:
    """Run torchrun's command line `words`, which may hold `--preload`, with forked ranks.

    Returns when all ranks have ended well. Raises LaunchError where the command line means nothing here, what torchrun
    raises for ranks that failed, and SystemExit for `--help` and mistakes in the command line.
    """
    with ExitStack() as stack:
        # torch takes a second to import, which parses the command line: the ranks' imports run beside it.
        workers = _guess(words)
        if workers is not None:
            stack.callback(workers.end)
        run, api, handler = _torch()
        parser = run.get_args_parser()
        parser.prog = "initopt launch"
        parser.usage = "initopt launch [OPTION]... [--preload MODULES] (SCRIPT | -m MODULE) [ARG]..."
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description = f"torchrun with imports shared: ranks are forked from one process.\n\n{parser.description}"
        parser.add_argument(
            "--preload",
            metavar="MODULES",
            help="initopt: import these once, before the ranks are forked, with commas between; '' for none. "
            "Default: the imports that the script begins with. The paths, environment and filters that it sets first "
            "hold in either case.",
        )
        chosen = parser.parse_args(list(words))
        command = _command(chosen)
        try:
            _check(api, handler)
            if workers is None or (workers.words, workers.preload) != (command, chosen.preload):
                if workers is not None:
                    workers.end()
                workers = WarmWorkers(command, chosen.preload)
                stack.callback(workers.end)
                workers.begin(_at_import(chosen.nproc_per_node))
        except LaunchError as error:
            say(f"{error}; {_AS_TORCHRUN}")
            if workers is not None:
                workers.end()
        else:
            stack.callback(setattr, api, "get_subprocess_handler", api.get_subprocess_handler)
            api.get_subprocess_handler = _handlers(handler, workers)
        run.record(run.run)(chosen)


def _torch() -> tuple[Any, Any, Any]:
    """torchrun's module, torchelastic's, and the handler of a rank's process. Raises LaunchError without torchrun."""
    try:
        import torch.distributed.elastic.multiprocessing.api as api
        import torch.distributed.run as run
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    except ImportError as error:
        raise LaunchError(f"torch does not load here ({error})") from error
    return run, api, SubprocessHandler


def _check(api: Any, handler: Any) -> None:
    """Raise LaunchError where this host can't fork ranks."""
    import torch

    wanted = ((api, "get_subprocess_handler"), (handler, "_popen"))
    missing = [name for place, name in wanted if not hasattr(place, name)]
    if not torch.__version__.startswith(TESTED_TORCH) or missing:
        what = f"has no {missing[0]}" if missing else f"was not tested, only {TESTED_TORCH}*"
        raise LaunchError(f"torch {torch.__version__} {what}")
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.listdir("/proc/self/task")
    except (AttributeError, OSError) as error:
        raise LaunchError(f"forked ranks need Linux 5.3 or newer, with /proc ({error})") from error


def _command(chosen: argparse.Namespace) -> tuple[str, ...]:
    """A rank's command line. Raises LaunchError for options that mean nothing here."""
    if chosen.no_python:
        raise LaunchError("--no-python: a program that isn't Python has no imports to share: use torchrun")
    if chosen.run_path:
        raise LaunchError("--run-path: a forked rank runs the script in its own process anyway: leave it out")
    if chosen.numa_binding:
        raise LaunchError("--numa-binding: torchrun binds a rank by starting it through numactl: use torchrun")
    if not chosen.module and not os.path.exists(chosen.training_script):
        raise LaunchError(f"no such file: {chosen.training_script} (from {os.getcwd()})")
    script = ("-m", chosen.training_script) if chosen.module else (chosen.training_script,)
    command = (os.environ.get("PYTHON_EXEC", sys.executable), "-u", *script, *chosen.training_script_args)
    try:
        behind(command)
    except UsageError as error:
        raise LaunchError(str(error)) from error
    return command


def _handlers(handler: Any, workers: WarmWorkers) -> Any:
    said: set[str] = set()

    class Handler(handler):  # type: ignore[misc]
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            outputs = (
                stream.fileno() if stream else number for stream, number in ((self._stdout, 1), (self._stderr, 2))
            )
            try:
                if args != workers.words:
                    raise LaunchError(f"torch starts ranks by another command here ({' '.join(args[:3])} ...)")
                return workers.fork(env, *outputs)
            except LaunchError as error:
                if str(error) not in said:
                    say(f"{error}; {_AS_TORCHRUN}")
                said.add(str(error))
            return super()._popen(args, env)

    return Handler


def _at_import(ranks: str) -> dict[str, str]:
    """The environment of the imports: with the threads that torchrun sets for more than one rank."""
    return {**({"OMP_NUM_THREADS": "1"} if ranks != "1" else {}), **os.environ}


def _guess(words: Sequence[str]) -> WarmWorkers | None:
    """What the command line means, as it seems without torch's parser, and begin to import; None if unclear.

    It is compared with what the parser says. A wrong guess costs the time that it gained.
    """
    module, preload, ranks = False, None, "1"
    rest = iter(enumerate(words))
    for at, word in rest:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if not word.startswith("-"):
            executable = os.environ.get("PYTHON_EXEC", sys.executable)
            workers = WarmWorkers((executable, "-u", *(["-m"] if module else []), *words[at:]), preload)
            with suppress(LaunchError):  # said when torch is there
                workers.begin(_at_import(ranks))
                return workers
            return None
        if name in ("-h", "--help", "--no-python", "--run-path", "--"):
            return None
        module |= name in ("-m", "--module")
        if name not in _WITHOUT_VALUE and not equals:
            value = next(rest, (0, ""))[1]
        if name.startswith("--nproc"):
            ranks = value
        elif name == "--preload":
            preload = value
    return None
