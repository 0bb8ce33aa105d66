"""One rank's file: what is written, when, and that nothing that goes wrong reaches the job."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import initopt
from initopt import record
from initopt.process_tree import cpu_seconds
from initopt.record import FIRST_STEP, Recorder, Span


class DictStore:
    """A store of one process: what the ranks of a test share."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])


def lines(path: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / f"rank{rank:05}.jsonl").read_text().splitlines()]


def names(path: Path, rank: int = 0) -> list[str]:
    return [line["name"] for line in lines(path, rank) if line["kind"] in ("import", "step", "collective")]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="initopt")
    return lambda: [r.getMessage() for r in caplog.records]


def test_a_file_is_header_imports_steps_digest_usage_watched_trailer(tmp_path: Path) -> None:
    with Recorder("dlrm", mode="serial", root=tmp_path, labels=["emulated: reader"]) as recorder:
        recorder.agree(0, 1)
        with recorder.span("model", stage="train_module_creation"):
            pass
        recorder.digest("state", "ab", tensors=3)
    header, imports, model, digest, usage, watched, trailer = lines(tmp_path / "0001")
    assert (header["kind"], header["job"], header["mode"], header["labels"]) == (
        "header",
        "dlrm",
        "serial",
        ["emulated: reader"],
    )
    assert header["pid"] == os.getpid() and header["versions"]["python"]
    assert (imports["kind"], imports["name"], imports["start"]) == ("import", "imports", 0.0)
    assert (model["kind"], model["name"], model["stage"], model["lane"]) == (
        "step",
        "model",
        "train_module_creation",
        "main",
    )
    assert imports["end"] <= model["start"] <= model["end"] <= trailer["end"]
    assert digest == {"kind": "digest", "name": "state", "sha256": "ab", "rank": 0, "about": {"tensors": 3}}
    assert trailer["kind"] == "trailer"
    assert trailer["own_cost"] > 0 and trailer["peak_rss"] > 1_000_000
    assert usage["kind"] == "usage" and usage["cpu"] > 0 and usage["at"] <= trailer["end"]
    assert (watched["kind"], watched["objects"], watched["imports"]) == ("watched", False, "off")


def test_the_cpu_time_of_child_processes_counts_until_the_first_step_ends(tmp_path: Path) -> None:
    burn = "import sys, time\nwhile time.process_time() < 0.6: pass\nprint(flush=True)\nsys.stdin.read()"
    with Recorder("dlrm", mode="serial", root=tmp_path) as recorder:
        recorder.agree(0, 1)
        before = cpu_seconds()
        with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin is not None and child.stdout is not None
            with recorder.span(FIRST_STEP):
                child.stdout.readline()
            child.stdin.close()
        while cpu_seconds() < before + 1.0:
            pass
    (usage,) = (line for line in lines(tmp_path / "0001") if line["kind"] == "usage")
    # The kernel counts in ticks, per process.
    assert before + 0.55 <= usage["cpu"] < before + 1.0


def test_time_zero_is_the_start_of_the_process(tmp_path: Path) -> None:
    code = (
        "import time; first = time.time(); from initopt import Recorder; made = time.time()\n"
        f"Recorder('j', mode='stock', root={str(tmp_path)!r}).close(); print(first, made)"
    )
    before = time.time()
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    first, made = map(float, out.split())
    header, imports, *_ = lines(tmp_path / "0001")
    tick = 2 / os.sysconf("SC_CLK_TCK")
    assert header["zero"] == "kernel"
    assert before - tick <= header["process_start"] <= first
    assert header["process_start"] + imports["end"] >= made - tick


def test_steps_nest_and_know_their_outer_step_and_their_error(tmp_path: Path) -> None:
    @initopt.step("fill")
    def fill(value: int) -> int:
        return value + 1

    with Recorder("j", mode="stock", root=tmp_path) as recorder:
        recorder.agree(0, 1)
        with pytest.raises(ZeroDivisionError), initopt.step("shard"):
            assert fill(1) == 2
            assert fill(2) == 3
            raise ZeroDivisionError
    steps = [(s["name"], s["step"], s["error"]) for s in lines(tmp_path / "0001") if s["kind"] == "step"]
    assert steps == [("fill", "shard", ""), ("fill", "shard", ""), ("shard", "", "ZeroDivisionError")]


def test_a_function_gives_its_name_to_a_step_nested_on_threads_and_when_it_raises(tmp_path: Path) -> None:
    @initopt.step
    def inner(value: int) -> int:
        """Divide."""
        return 1 // value

    @initopt.step
    def outer(value: int) -> int:
        return inner(value)

    with Recorder("j", mode="stock", root=tmp_path) as recorder:
        recorder.agree(0, 1)
        assert outer(1) == 1
        thread = threading.Thread(target=inner, args=(1,), name="io:data")
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError):
            outer(0)
    assert inner(1) == 1
    assert (inner.__name__, inner.__doc__) == ("inner", "Divide.")
    steps = [(s["name"], s["step"], s["lane"], s["error"]) for s in lines(tmp_path / "0001") if s["kind"] == "step"]
    assert steps == [
        ("inner", "outer", "main", ""),
        ("outer", "", "main", ""),
        ("inner", "", "io:data", ""),
        ("inner", "outer", "main", "ZeroDivisionError"),
        ("outer", "", "main", "ZeroDivisionError"),
    ]


def test_a_function_whose_call_does_not_do_its_work_is_no_step() -> None:
    def rows() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"rows can't be the step 'rows': a call of it returns before its work"):
        initopt.step(rows)
    with pytest.raises(TypeError, match=r"rows can't be the step 'data'"):
        initopt.step("data")(rows)


def test_the_current_step_and_lane_are_set_without_a_span(tmp_path: Path) -> None:
    with Recorder("j", mode="stock", root=tmp_path) as recorder:
        recorder.agree(0, 1)
        with recorder.current_step("plan", lane="comms"), recorder.span("inner"):
            pass
        with recorder.span("after"):
            pass
    steps = [(s["name"], s["step"], s["lane"]) for s in lines(tmp_path / "0001") if s["kind"] == "step"]
    assert steps == [("inner", "plan", "comms"), ("after", "", "main")]


def test_a_collective_knows_its_step_and_lane_and_closing_takes_the_hooks_out(tmp_path: Path) -> None:
    import torch.distributed as dist

    own = dist.barrier
    with Recorder("j", mode="overlap", root=tmp_path) as recorder, recorder.collectives():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        recorder.agree(0, 1)

        def comms() -> None:
            with recorder.current_step("topology", lane="comms"):
                dist.barrier()

        thread = threading.Thread(target=comms)
        thread.start()
        thread.join(60)
        assert dist.barrier is not own
        recorder.close()
        assert dist.barrier is own
        dist.barrier()
    dist.destroy_process_group()
    found = [
        (s["op"], s["step"], s["lane"], s["group"], s["sequence"])
        for s in lines(tmp_path / "0001")
        if s["kind"] == "collective"
    ]
    assert found == [("init_process_group", "", "main", "world", 0), ("barrier", "topology", "comms", "world", 1)]


def test_own_cost_grows_with_what_is_recorded_and_fits_into_the_time_there_was(tmp_path: Path) -> None:
    costs = []
    for spans in (0, 2000):
        began = time.perf_counter()
        with Recorder("j", mode="stock", root=tmp_path) as recorder:
            recorder.agree(0, 1)
            for _ in range(spans):
                with initopt.step("model"):
                    pass
        costs.append(lines(tmp_path / f"{len(costs) + 1:04}")[-1]["own_cost"])
        assert 0 < costs[-1] <= time.perf_counter() - began
    assert costs[1] > costs[0]


def test_a_step_has_the_cpu_seconds_of_its_thread(tmp_path: Path) -> None:
    with Recorder("j", mode="stock", root=tmp_path) as recorder:
        recorder.agree(0, 1)
        before = time.thread_time()
        with initopt.step("fill"):
            sum(range(100_000))
        spent = time.thread_time() - before
    (fill,) = (s for s in lines(tmp_path / "0001") if s["kind"] == "step")
    assert 0 < fill["cpu"] <= spent


def test_a_step_without_a_recorder_does_nothing() -> None:
    with initopt.step("alone"):
        pass


def test_the_recorder_before_is_current_again(tmp_path: Path) -> None:
    with Recorder("outer", mode="stock", root=tmp_path):
        with Recorder("inner", mode="stock", root=tmp_path), initopt.step("in"):
            pass
        with initopt.step("out"):
            pass
    assert names(tmp_path / "0001") == ["imports", "in"]
    assert names(tmp_path / "0002") == ["imports", "out"]


def test_many_threads_write_whole_lines_under_their_own_lane_and_step(tmp_path: Path) -> None:
    threads, each = 8, 100
    together = threading.Barrier(threads)

    def work() -> None:
        own = threading.current_thread().name
        together.wait(20)
        for number in range(each):
            with initopt.step(own), initopt.step(f"{own}/{number}"):
                pass

    with Recorder("j", mode="overlap", root=tmp_path) as recorder:
        recorder.agree(0, 1)
        started = [threading.Thread(target=work, name=f"io:{i}") for i in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join(60)
    spans = [s for s in lines(tmp_path / "0001") if s["kind"] == "step"]
    assert len(spans) == 2 * threads * each
    inner = [s for s in spans if "/" in s["name"]]
    assert all(s["lane"] == s["step"] == s["name"].partition("/")[0] for s in inner)
    assert len({s["name"] for s in inner}) == threads * each


def test_spans_wait_for_the_number_and_then_are_written_at_once(tmp_path: Path) -> None:
    recorder = Recorder("j", mode="stock", root=tmp_path)
    recorder.add(Span("early", 0.0, 1.0))
    assert list(tmp_path.iterdir()) == []
    recorder.agree(0, 1)
    assert recorder.path == tmp_path / "0001"
    assert names(recorder.path) == ["imports", "early"]
    recorder.add(Span("late", 1.0, 2.0))
    assert names(recorder.path) == ["imports", "early", "late"]
    recorder.close()


def test_the_ranks_share_a_number_and_each_has_its_file(tmp_path: Path) -> None:
    store = DictStore()
    ranks = [Recorder("j", mode="stock", root=tmp_path) for _ in range(3)]
    for rank, recorder in enumerate(ranks):
        recorder.agree(rank, 3, store)
    for recorder in ranks:
        recorder.add(Span("model", 1.0, 2.0))
        recorder.close()
    assert [p.name for p in (tmp_path / "latest").glob("rank*")] and os.readlink(tmp_path / "latest") == "0001"
    for rank in range(3):
        assert {line["rank"] for line in lines(tmp_path / "0001", rank)} == {rank}
        assert names(tmp_path / "0001", rank) == ["imports", "model"]


def test_a_second_recorder_of_the_same_job_gets_a_number_of_its_own(tmp_path: Path) -> None:
    store = DictStore()
    for _ in range(2):
        ranks = [Recorder("j", mode="stock", root=tmp_path) for _ in range(2)]
        for rank, recorder in enumerate(ranks):
            recorder.agree(rank, 2, store)
        for recorder in ranks:
            recorder.close()
    assert [sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("0001", "0002")] == [
        ["rank00000.jsonl", "rank00001.jsonl"]
    ] * 2


def test_a_rank_that_gets_no_number_in_time_writes_when_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(record, "_PATIENCE", 0.0)
    store = DictStore()
    zero, one = (Recorder("j", mode="stock", root=tmp_path) for _ in range(2))
    one.agree(1, 2, store)
    one.add(Span("model", 1.0, 2.0))
    zero.agree(0, 2, store)
    one.close()
    zero.close()
    assert names(tmp_path / "0001", 1) == ["imports", "model"]
    assert warned() == []


def test_without_a_number_the_lost_records_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    recorder = Recorder("j", mode="stock", root=tmp_path)
    with recorder.span("model"):
        pass
    recorder.close()
    assert warned() == [
        f"recording into {tmp_path} stopped, the job goes on: "
        "RuntimeError: the ranks have no process group yet, 2 records are lost"
    ]


def test_a_job_that_ends_before_its_first_step_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    Recorder("j", mode="stock", root=tmp_path).close()
    assert warned() == []


def test_the_oldest_runs_go_and_other_directories_stay(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    for _ in range(4):
        Recorder("j", mode="stock", root=tmp_path, keep=2).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0003", "0004", "bench", "latest"]
    assert os.readlink(tmp_path / "latest") == "0004"
    assert record.run_numbers(tmp_path) == [3, 4]


def test_the_root_is_the_argument_then_the_environment_then_dot_initopt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert record.run_root() == Path(".initopt")
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path / "there"))
    Recorder("j", mode="stock").close()
    assert names(tmp_path / "there" / "0001") == ["imports"]
    assert record.run_root("here") == Path("here")


def test_a_root_that_cannot_be_made_costs_the_record_only(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    (tmp_path / "file").write_text("")
    store = DictStore()
    ranks = [Recorder("j", mode="stock", root=tmp_path / "file") for _ in range(2)]
    for rank, recorder in enumerate(ranks):
        recorder.agree(rank, 2, store)
    for recorder in ranks:
        with recorder, initopt.step("model"):
            pass
        recorder.digest("state", "ab")
        assert recorder.path is None
    assert len(warned()) == 1
    assert "file" in warned()[0] and "the job goes on" in warned()[0]


def test_a_full_disk_costs_the_record_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    recorder = Recorder("j", mode="stock", root=tmp_path)
    open_path = Path.open

    def open_full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.suffix == ".jsonl":
            return open_path(Path("/dev/full"), "wb", buffering=0)
        return open_path(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_full)
    recorder.agree(0, 1)
    with recorder, initopt.step("model"):
        pass
    recorder.close()
    assert len(warned()) == 1
    assert "No space left on device" in warned()[0]


def test_an_unknown_mode_and_keeping_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode is 'fast': it must be one of stock, serial, overlap"):
        Recorder("j", mode="fast", root=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep is 0"):
        Recorder("j", mode="stock", root=tmp_path, keep=0)


def test_after_closing_nothing_is_written(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    recorder = Recorder("j", mode="stock", root=tmp_path)
    recorder.close()
    before = lines(tmp_path / "0001")
    recorder.add(Span("late", 1.0, 2.0))
    recorder.digest("state", "ab")
    recorder.agree(0, 1)
    recorder.close()
    assert lines(tmp_path / "0001") == before
    assert warned() == []


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    with Recorder("j", mode="stock", root=tmp_path) as recorder:
        recorder.agree(0, 1)
        child = os.fork()
        if child == 0:
            try:
                with initopt.step("in the child"):
                    pass
                recorder.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with initopt.step("in the parent"):
            pass
    assert names(tmp_path / "0001") == ["imports", "in the parent"]
    assert [line["kind"] for line in lines(tmp_path / "0001")].count("trailer") == 1


def test_a_worktree_has_a_commit_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "main" / ".git" / "worktrees" / "other"
    (own.parents[1] / "refs" / "heads").mkdir(parents=True)
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/other\n")
    (own / "commondir").write_text("../..\n")
    (own.parents[1] / "refs" / "heads" / "other").write_text("dd44\n")
    (tmp_path / "other" / "deep").mkdir(parents=True)
    (tmp_path / "other" / ".git").write_text(f"gitdir: {own}\n")
    assert record._commit(tmp_path / "other" / "deep") == "dd44"


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({"HEAD": "ref: refs/heads/main\n", "refs/heads/main": "aa11\n"}, "aa11"),
        ({"HEAD": "ref: refs/heads/main\n", "packed-refs": "# pack\nbb22 refs/heads/main\n"}, "bb22"),
        ({"HEAD": "cc33\n"}, "cc33"),
        ({"HEAD": "ref: refs/heads/unborn\n"}, ""),
        ({}, ""),
    ],
)
def test_the_commit_is_read_from_the_files_of_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], commit: str
) -> None:
    for name, text in files.items():
        path = tmp_path / ".git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "trainer").mkdir()
    monkeypatch.chdir(tmp_path / "trainer")
    Recorder("j", mode="stock", root=tmp_path / "runs").close()
    assert lines(tmp_path / "runs" / "0001")[0]["commit"] == commit
