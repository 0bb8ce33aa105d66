"""Ranks under `initopt launch` against the same ranks under torchrun: what they print, their end, the report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from initopt import Run
from initopt.chain import finished_ranks, outer_steps
from tests.multirank.forked import fork_ranks
from tests.multirank.launch import MARK, REPOSITORY, free_port, marked, remaining
from tests.multirank.trainer_ranks import TRAINERS, rank_of

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LAUNCH = (sys.executable, "-c", "from initopt.cli import main; main()", "launch")
LIMIT = 120.0


@dataclass(frozen=True)
class Left:
    """What a job left: exit code, sorted lines of its output, errors, error file, log files and processes."""

    code: int
    out: list[str]
    err: str
    error_file: object
    logs: list[str]
    orphans: tuple[int, ...]


def run(
    folder: Path,
    launchers: Sequence[tuple[str, ...]],
    *words: str,
    act: Callable[[int], None] | None = None,
    meeting: Sequence[str] = ("--standalone",),
) -> list[Left]:
    """The job under each launcher, side by side. `act` is called with the process id of each launcher."""
    jobs = []
    for launcher in launchers:
        mark = uuid.uuid4().hex
        place = folder / mark
        place.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_ERROR_FILE": str(place / "error.json"),
            "PLACE": str(place),
            MARK: mark,
        }
        command = [*launcher, *meeting, "--nproc-per-node=2", f"--log-dir={place}/logs", *words]
        with open(place / "out", "wb") as out, open(place / "err", "wb") as err:
            jobs.append((mark, place, subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=err)))
    try:
        for _, place, process in jobs:
            if act is not None:
                while len(list(place.glob("up.*"))) < 2 and process.poll() is None:
                    time.sleep(0.002)
                act(process.pid)
        return [_left(mark, place, process.wait(LIMIT)) for mark, place, process in jobs]
    finally:
        for mark, _, process in jobs:
            while left := marked(mark):
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.wait()


def _left(mark: str, place: Path, code: int) -> Left:
    error = place / "error.json"
    logs = [path for path in (place / "logs").rglob("*") if path.is_file()]
    return Left(
        code,
        sorted((place / "out").read_text().splitlines()),
        (place / "err").read_text(),
        json.loads(error.read_text())["message"]["message"] if error.exists() else None,
        sorted("/".join(path.relative_to(place / "logs").parts[1:]) for path in logs),
        remaining(mark, 2.0),
    )


def _reported(left: Left) -> list[str]:
    """The report of failed ranks, without times and process ids."""
    lines = left.err.splitlines()
    wanted = ("rank      :", "exitcode  :", "traceback :", "Root Cause", "Signal ")
    found = [re.sub(r"pid: \d+|PID \d+", "pid", line.strip()) for line in lines if any(word in line for word in wanted)]
    return sorted(set(found))


def test_exit_codes_logs_and_the_report_are_torchrun_s(tmp_path: Path) -> None:
    _script(
        tmp_path,
        """
        import os, signal, sys
        sys.stdout.write(f"rank {os.environ['RANK']} {sys.argv}\\n")
        print("error", file=sys.stderr)
        if os.environ["RANK"] == "1":
            sys.exit(3)
        signal.pause()
        """,
    )
    torchrun, launch = run(tmp_path, (TORCHRUN, LAUNCH), "--redirects=1:3", "--tee=0:3", "script.py", "--other", "--")

    assert torchrun.code == 1
    assert "exitcode  : 3 (pid)" in _reported(torchrun)
    assert (launch.code, launch.out, launch.logs) == (torchrun.code, torchrun.out, torchrun.logs)
    assert _reported(launch) == _reported(torchrun)
    assert not launch.orphans


def test_a_killed_rank_is_restarted_from_the_same_imports_and_error_files_are_torchrun_s(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import os\nPID = os.getpid()")
    _script(
        tmp_path,
        """
        import beside
        import json, os, sys
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        if attempt == "1":
            sys.stdout.write(f"rank {rank} imported once: {beside.PID == os.getppid()}\\n")
            if rank == "1":
                message = {"message": "no such table", "extraInfo": {"py_callstack": "", "timestamp": "7"}}
                with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                    json.dump({"message": message}, file)
                sys.exit(1)
        elif rank == "1":
            os.kill(os.getpid(), 9)
        """,
    )
    torchrun, launch = run(tmp_path, (TORCHRUN, LAUNCH), "--max-restarts=1", "script.py")

    assert torchrun.error_file is not None
    assert (launch.code, launch.error_file, launch.logs) == (torchrun.code, torchrun.error_file, torchrun.logs)
    assert launch.out == [line.replace("False", "True") for line in torchrun.out]
    assert not launch.orphans


def test_a_signal_to_the_agent_ends_all_ranks_as_under_torchrun(tmp_path: Path) -> None:
    _script(
        tmp_path,
        """
        import os, signal, sys, time
        def ended(number, frame):
            sys.stdout.write(f"rank {os.environ['RANK']} got {number}\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, ended)
        open(f"{os.environ['PLACE']}/up.{os.environ['RANK']}", "w").close()
        while True:
            time.sleep(0.1)  # a signal that comes just before `signal.pause` would be waited for once more
        """,
    )
    torchrun, launch = run(tmp_path, (TORCHRUN, LAUNCH), "script.py", act=lambda pid: os.kill(pid, signal.SIGTERM))

    assert launch.code == torchrun.code != 0
    assert launch.out == torchrun.out == [f"rank {rank} got 15" for rank in (0, 1)]
    assert not launch.orphans


def test_a_host_that_can_t_fork_ranks_keeps_no_other_from_starting(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("import os, signal\nif os.environ['ODD'] == '1':\n    signal.alarm(1000)")
    _script(
        tmp_path,
        """
        import odd
        import os, sys
        with open(f"/proc/{os.getppid()}/cmdline") as command:
            forked = "warm_parent" in command.read()
        sys.stdout.write(f"{os.environ['ODD']} of {os.environ['WORLD_SIZE']} {forked}\\n")
        """,
    )
    hosts = [("env", f"ODD={number}", *LAUNCH) for number in (0, 1)]
    meeting = ("--nnodes=2", "--rdzv-id=7", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")

    forks, other = run(tmp_path, hosts, "--preload=odd", "script.py", meeting=meeting)

    assert (forks.code, forks.out) == (0, ["0 of 4 True"] * 2), forks.err
    assert (other.code, other.out) == (0, ["1 of 4 False"] * 2), other.err
    reason = "initopt launch: --preload: `import odd` set a timer, which .*; ranks are started as by torchrun here"
    assert re.search(reason, other.err)
    assert "Traceback" not in other.err
    assert not forks.orphans + other.orphans


def test_ranks_of_the_real_libraries(tmp_path: Path) -> None:
    _script(
        tmp_path,
        """
        import json
        import os
        import sys
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, Dataset
        from torchmetrics.utilities.prints import rank_zero_only
        import initopt

        class Rows(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, row):
                return torch.tensor([row])

        if __name__ == "__main__":
            with initopt.Recorder("launched", mode="stock", root=os.environ["PLACE"] + "/runs") as recorder:
                with recorder.collectives(), initopt.step("process_group"):
                    dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            loader = DataLoader(Rows(), batch_size=2, num_workers=1, timeout=30)
            batches = [batch.flatten().tolist() for batch in loader]
            loaders = [type(part).__name__ for part in (torch.__loader__, torch.__spec__.loader)]
            sys.stdout.write(json.dumps({
                "rank": [dist.get_rank(), rank_zero_only.rank], "sum": total.item(), "batches": batches,
                "drawn": torch.rand(1).item(), "loaders": loaders,
            }) + "\\n")
            dist.destroy_process_group()
        """,
    )
    (launch,) = run(tmp_path, (LAUNCH,), "script.py")

    assert launch.code == 0, launch.err
    first, second = map(json.loads, launch.out)
    (recorded,) = tmp_path.glob("*/runs/0001")
    header = Run.load(recorded).headers[1]
    assert header.zero == "kernel"
    assert re.fullmatch(r"imported once for all ranks: \d+\.\d s", *header.labels)
    # Nobody has seeded torch, and then ranks draw other numbers.
    assert first.pop("drawn") != second.pop("drawn")
    same = {"sum": 2.0, "batches": [[0, 1], [2, 3]], "loaders": ["SourceFileLoader"] * 2}
    assert sorted((first, second), key=lambda rank: rank["rank"]) == [
        {"rank": [0, 0], **same},
        {"rank": [1, 1], **same},
    ]
    assert not launch.orphans


def test_launched_ranks_are_recorded_and_optimized_and_train_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("golden.py", "--steps", "3", "--rows", "500", "--batch-size", "64")
    stock = fork_ranks(rank_of, str(tmp_path), None, *words, timeout=LIMIT)
    monkeypatch.setenv("INITOPT_DISABLE", "fill-once")
    runs = str(tmp_path / "runs")
    recorded = ("-m", "initopt.run", "--root", runs, "--optimize", "--no-compile")
    (launch,) = run(tmp_path, (LAUNCH,), *recorded, str(TRAINERS / words[0]), *words[1:])

    assert launch.code == 0, launch.err
    assert launch.out == sorted("".join(stock).splitlines())
    assert "initopt launch: imported once, for all ranks: torch, " in launch.err
    assert re.search(r"initopt: first batch after .*; \S+ after its launcher began\)", launch.err)
    found = Run.load(tmp_path / "runs" / "0001")
    assert (found.warnings, finished_ranks(found)) == ((), [0, 1])
    for rank in (0, 1):
        assert re.fullmatch(r"imported once for all ranks: \d+\.\d s", *found.headers[rank].labels)
        assert found.headers[rank].zero == "kernel"
        assert 0 < found.headers[rank].after_launcher < LIMIT
        names = [span.name for span in outer_steps(found.of_rank(rank))]
        steps = [name for name in names if ":" not in name and not name.startswith("import ")]
        assert steps == ["imports", "process_group", "model", "dmp", "first_step"]
        told = {one.name: (one.applied, one.text) for one in found.optimized if one.rank == rank}
        assert {name for name, (applied, _) in told.items() if applied} == {"gc", "rendezvous", "plan", "eliminate"}
        assert told["fill-once"][1] == "INITOPT_DISABLE names it"
        assert told["compile"][1] == "--no-compile"
    assert not launch.orphans


def test_words_that_initopt_run_does_not_know_are_refused_by_it(tmp_path: Path) -> None:
    (launch,) = run(tmp_path, (LAUNCH,), "-m", "initopt.run", "--optimise", "script.py")

    assert launch.code == 2
    assert "initopt.run: there is no option --optimise" in launch.err
    assert "RuntimeWarning" not in launch.err
    assert not launch.orphans


def _script(folder: Path, text: str) -> None:
    (folder / "script.py").write_text(textwrap.dedent(text))
