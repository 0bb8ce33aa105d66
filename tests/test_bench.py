"""Measurements with commands that write a record of known times: what is taken, warned of, saved, compared, refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from initopt import bench, contain
from initopt.bench import Bench, BenchError, CommandFailed, Gate, Growth, Sample, Side

TRAINER = """
import json, os, pathlib, sys, time
told = json.loads(sys.argv[1])
root = pathlib.Path(os.environ["INITOPT_ROOT"])
root.mkdir(parents=True, exist_ok=True)
turn = len(list(root.glob("[0-9]*")))
times = told["times"][min(turn, len(told["times"]) - 1)]
folder = root / f"{turn + 1:04d}"
folder.mkdir()
print("turn", turn, "of", told["job"])
for rank, end in enumerate(times):
    header = {
        "kind": "header", "rank": rank, "world_size": told.get("ranks", len(times)), "job": told["job"],
        "mode": "stock", "host": "node-1", "pid": 1, "process_start": 1000.0, "cores": 2,
        "labels": told.get("labels", []), "commit": "3f9c2e1aa", "versions": {"torch": "2.13.0"},
    }
    last = told.get("last", "first_step")
    steps = [("imports", 0.0, 1.0, "import"), ("model", 1.0, end - 0.5, "step"), (last, end - 0.5, end, "step")]
    lines = [header]
    lines += [{"name": n, "start": a, "end": b, "rank": rank, "lane": "main", "kind": k} for n, a, b, k in steps]
    if told.get("digest"):
        lines.append({"kind": "digest", "name": "trained", "sha256": told["digest"], "rank": rank})
    lines.append({"kind": "trailer", "rank": rank, "end": end, "own_cost": 0.0, "peak_rss": 0})
    (folder / f"rank{rank:05d}.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""
"""Writes the record of one start-up. `times` has a list per run, with the time to first batch of each rank."""


def trainer(*times: Sequence[float], job: str = "fake", **told: Any) -> list[str]:
    return [sys.executable, "-c", TRAINER, json.dumps({"job": job, "times": times, **told})]


def sample(first_batch: float, slowest: float = 0.0, digest: str = "", **steps: float) -> Sample:
    digests = {"trained, rank 0": digest} if digest else {}
    return Sample(first_batch, slowest or first_batch, 0, first_batch - 1, 0.75, 0.25, steps, digests, "run", "log")


def a_bench(stock: Sequence[float], mine: Sequence[float], **changes: Any) -> Bench:
    made = Bench(
        number=6,
        taken=0.0,
        stock=Side("stock", ("stock.sh",), (), tuple(sample(value) for value in stock)),
        initopt=Side("initopt", ("mine.sh",), (), tuple(sample(value) for value in mine)),
        warmup=1,
        prepare=None,
        ranks=2,
        hosts=("node-1",),
        cores=2,
        commit="3f9c2e1aa",
        versions={"torch": "2.13.0"},
    )
    return replace(made, **changes)


class TestRunBench:
    def test_both_sides_in_turn_and_the_warm_up_left_out(self, tmp_path: Path) -> None:
        said: list[str] = []
        stock = trainer([99.0, 99.0], [4.0, 5.0], [6.0, 6.5], [5.0, 5.5])
        mine = trainer([99.0, 99.0], [2.0, 2.5], [3.0, 3.5], [2.0, 2.5])
        result = bench.run_bench(stock, mine, runs=3, warmup=1, root=tmp_path, progress=said.append)
        assert said == [
            "stock, warm-up 1 of 1",
            "initopt, warm-up 1 of 1",
            "stock, run 1 of 3",
            "initopt, run 1 of 3",
            "stock, run 2 of 3",
            "initopt, run 2 of 3",
            "stock, run 3 of 3",
            "initopt, run 3 of 3",
        ]
        assert [s.first_batch for s in result.stock.samples] == pytest.approx([4.0, 6.0, 5.0])
        assert [s.slowest for s in result.stock.samples] == pytest.approx([5.0, 6.5, 5.5])
        assert {s.slowest_rank for s in result.stock.samples} == {1}
        assert astuple(result.initopt.first_batch) == pytest.approx((2.0, 2.0, 3.0))
        assert astuple(result.ratio) == pytest.approx((2.0, 2.0, 2.5))
        assert result.stock.samples[0].steps == pytest.approx({"imports": 1.0, "model": 2.5, "first_step": 0.5})

    def test_where_it_was_measured(self, tmp_path: Path) -> None:
        labels = ["emulated: reader latency 4 s"]
        result = bench.run_bench(
            trainer([4.0], labels=labels), trainer([2.0], labels=labels), runs=1, warmup=0, root=tmp_path
        )
        assert (result.hosts, result.cores, result.ranks) == (("node-1",), 2, 1)
        assert result.versions["torch"] == "2.13.0"
        assert "python" in result.versions
        assert result.labels == ("emulated: reader latency 4 s",)
        assert result.name == "0001_3f9c2e1"
        assert result.warnings == ()

    def test_logs_and_records_are_kept_beside_the_result(self, tmp_path: Path) -> None:
        result = bench.run_bench(trainer([4.0], job="dlrm"), trainer([2.0]), runs=1, warmup=1, root=tmp_path)
        folder = tmp_path / "bench"
        (taken,) = result.stock.samples
        assert (folder / taken.log).read_text() == "turn 1 of dlrm\n"
        assert (folder / taken.run / "rank00000.jsonl").exists()
        assert (folder / "0001" / "stock-warmup-01.log").exists()
        assert sorted(p.name for p in folder.iterdir()) == ["0001", "0001.json"]

    def test_numbers_go_up(self, tmp_path: Path) -> None:
        (tmp_path / "bench" / "0007").mkdir(parents=True)
        result = bench.run_bench(trainer([4.0]), trainer([2.0]), runs=1, warmup=0, root=tmp_path)
        assert result.number == 8

    def test_prepare_comes_before_each_run(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        bench.run_bench(
            trainer([4.0]), trainer([2.0]), runs=2, warmup=1, root=tmp_path, prepare=f"echo prepared >> {trace}"
        )
        assert trace.read_text().split() == ["prepared"] * 6

    @pytest.mark.parametrize(("runs", "warmup"), [(0, 1), (1, -1)])
    def test_impossible_counts(self, tmp_path: Path, runs: int, warmup: int) -> None:
        with pytest.raises(ValueError, match=f"runs is {runs} and warmup is {warmup}"):
            bench.run_bench(["a"], ["b"], runs=runs, warmup=warmup, root=tmp_path)

    def test_an_empty_command(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="the initopt command is empty"):
            bench.run_bench(["a"], [], root=tmp_path)
        assert list(tmp_path.iterdir()) == []


class TestFailures:
    def test_a_failing_command_stops_the_bench(self, tmp_path: Path) -> None:
        script = "import sys; print('loading'); sys.exit('no such table')"
        with pytest.raises(CommandFailed) as failure:
            bench.run_bench(trainer([4.0]), [sys.executable, "-c", script], runs=2, warmup=0, root=tmp_path)
        assert failure.value.code == 1
        assert failure.value.log == tmp_path / "bench" / "0001" / "initopt-01.log"
        text = str(failure.value)
        assert text.startswith(f"initopt, run 1 of 2 failed with exit code 1: {sys.executable} -c ")
        assert f"log: {failure.value.log}" in text
        assert "  no such table" in text.splitlines()
        assert not (tmp_path / "bench" / "0001.json").exists()

    def test_a_long_log_is_shown_from_its_end(self, tmp_path: Path) -> None:
        script = "import sys; print(*range(100), sep='\\n'); sys.exit(3)"
        with pytest.raises(CommandFailed, match="exit code 3") as failure:
            bench.run_bench([sys.executable, "-c", script], trainer([2.0]), runs=1, warmup=0, root=tmp_path)
        lines = str(failure.value).splitlines()
        assert lines[-1] == "  99"
        assert "  79" not in lines

    def test_a_command_ended_by_a_signal(self, tmp_path: Path) -> None:
        script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        with pytest.raises(CommandFailed, match=r"was ended by SIGKILL.*\n.*\nit printed nothing"):
            bench.run_bench([sys.executable, "-c", script], trainer([2.0]), runs=1, warmup=0, root=tmp_path)

    def test_a_command_that_never_ends(self, tmp_path: Path) -> None:
        script = "import time; time.sleep(600)"
        with pytest.raises(CommandFailed, match=r"did not end within 0.1s and was killed \(--timeout\)") as failure:
            bench.run_bench(
                [sys.executable, "-c", script], trainer([2.0]), runs=1, warmup=0, root=tmp_path, timeout=0.1
            )
        assert failure.value.code is None

    def test_a_failing_prepare(self, tmp_path: Path) -> None:
        with pytest.raises(CommandFailed, match="stock, run 1 of 1: --prepare failed with exit code 2"):
            bench.run_bench(trainer([4.0]), trainer([2.0]), runs=1, warmup=0, root=tmp_path, prepare="exit 2")

    def test_an_unknown_command(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match=r"stock, run 1 of 1 can't be run: .*no-such-trainer"):
            bench.run_bench(["no-such-trainer"], trainer([2.0]), runs=1, warmup=0, root=tmp_path)

    def test_a_command_without_a_record(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match=r"(?s)left no record of a first batch.*log: .*-m initopt\.run"):
            bench.run_bench([sys.executable, "-c", ""], trainer([2.0]), runs=1, warmup=0, root=tmp_path)

    def test_the_record_of_an_earlier_run_does_not_count(self, tmp_path: Path) -> None:
        once = f"if not os.path.exists(os.environ['INITOPT_ROOT']): exec({TRAINER!r})"
        command = [sys.executable, "-c", f"import os\n{once}", json.dumps({"job": "fake", "times": [[4.0]]})]
        with pytest.raises(BenchError, match=r"stock, run 2 of 2 left no record of a first batch: .*no new run"):
            bench.run_bench(command, trainer([2.0]), runs=2, warmup=0, root=tmp_path)

    def test_a_record_that_ends_before_the_first_batch(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match=r"left no record of a first batch: .*first_step"):
            bench.run_bench(trainer([4.0, 4.0], last="loss"), trainer([2.0]), runs=1, warmup=0, root=tmp_path)

    def test_a_rank_without_a_record(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="the record lacks rank 2, 3, 4 and 1 more"):
            bench.run_bench(trainer([4.0, 4.0], ranks=6), trainer([2.0]), runs=1, warmup=0, root=tmp_path)

    def test_processes_left_behind_are_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(contain, "GRACE", 0.2)
        command = trainer([4.0])
        command[2] += "\nimport subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
        result = bench.run_bench(command, trainer([2.0]), runs=1, warmup=0, root=tmp_path)
        (warning,) = result.warnings
        assert warning.startswith("stock, run 1 of 1 left processes behind, which were killed: sleep 600. Let")


class TestSaved:
    def test_a_round_trip(self, tmp_path: Path) -> None:
        made = bench.run_bench(trainer([4.0], digest="a"), trainer([2.0], digest="a"), runs=2, warmup=0, root=tmp_path)
        assert bench.load(tmp_path, 1) == made
        assert bench.load(tmp_path) == made

    def test_json_has_a_version_and_a_summary(self) -> None:
        data = msgspec.json.decode(a_bench([4.0, 5.0, 6.0], [2.0, 2.5, 4.0]).to_json())
        assert data["version"] == 1
        assert data["summary"]["first_batch"]["stock"] == {
            "median": 5.0,
            "min": 4.0,
            "max": 6.0,
            "slowest": 5.0,
            "work": 4.0,
            "wait": 0.75,
            "queue": 0.25,
            "runs": 3,
        }
        assert data["summary"]["ratio"] == {"median": 2.0, "min": 1.5, "max": 2.0}
        assert data["summary"]["labels"] == []
        assert data["warnings"] == []

    def test_the_newest_is_the_default(self, tmp_path: Path) -> None:
        for _ in range(2):
            bench.run_bench(trainer([4.0]), trainer([2.0]), runs=1, warmup=0, root=tmp_path)
        assert bench.load(tmp_path).number == 2
        assert bench.load(tmp_path, 1).number == 1

    def test_nothing_saved(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match=r"no measurement is saved under .*make one with `initopt bench`"):
            bench.load(tmp_path)

    def test_an_unknown_number(self, tmp_path: Path) -> None:
        bench.run_bench(trainer([4.0]), trainer([2.0]), runs=1, warmup=0, root=tmp_path)
        with pytest.raises(BenchError, match="has no measurement 0003; it has 0001"):
            bench.load(tmp_path, 3)

    @pytest.mark.parametrize(
        ("content", "problem"), [(b'{"number":', "can't be read"), (b'{"number": 1}', "missing required field `taken`")]
    )
    def test_a_torn_or_foreign_file(self, tmp_path: Path, content: bytes, problem: str) -> None:
        (tmp_path / "bench").mkdir()
        (tmp_path / "bench" / "0001.json").write_bytes(content)
        with pytest.raises(BenchError, match=rf"0001\.json.*{problem}"):
            bench.load(tmp_path)

    def test_another_format(self, tmp_path: Path) -> None:
        (tmp_path / "bench").mkdir()
        (tmp_path / "bench" / "0006.json").write_bytes(a_bench([4.0], [2.0], version=2).to_json())
        with pytest.raises(BenchError, match="has format 2, this initopt reads 1"):
            bench.load(tmp_path, 6)


class TestParts:
    @pytest.mark.parametrize("values", [[4.0], [4.0, 9.0], [9.0, 4.0, 5.0], [4.0, 8.0, 5.0, 9.0]])
    def test_they_add_up_to_the_median(self, values: list[float]) -> None:
        side = a_bench(values, values).stock
        assert sum(side.parts.values()) == side.first_batch.median

    def test_they_are_those_of_the_median_run(self) -> None:
        odd = Sample(5.0, 5.0, 0, 1.0, 1.0, 3.0, {}, {}, "", "")
        side = Side("stock", (), (), (sample(4.0), odd, sample(6.0)))
        assert side.parts == {"work": 1.0, "wait": 1.0, "queue": 3.0}


class TestState:
    def both(self, stock: list[str], mine: list[str]) -> Bench:
        made = a_bench([4.0] * len(stock), [2.0] * len(mine))
        return replace(
            made,
            stock=replace(made.stock, samples=tuple(sample(4.0, digest=d) for d in stock)),
            initopt=replace(made.initopt, samples=tuple(sample(2.0, digest=d) for d in mine)),
        )

    def test_identical(self) -> None:
        made = self.both(["a", "a"], ["a", "a"])
        assert made.state == bench.State("identical", 1)
        assert made.warnings == ()

    def test_one_run_that_differs_is_enough(self) -> None:
        made = self.both(["a", "a"], ["a", "b"])
        assert made.state == bench.State("different", 1, ("trained, rank 0",))
        (warning,) = made.warnings
        assert warning.startswith("the trained state differs from stock: trained, rank 0.")

    def test_stock_that_differs_from_itself_proves_nothing(self) -> None:
        made = self.both(["a", "b"], ["a", "a"])
        assert made.state.verdict == "unsteady"
        assert "does not train to the same state twice" in made.warnings[0]

    def test_a_run_without_a_digest_proves_nothing(self) -> None:
        assert self.both(["a", "a"], ["a", ""]).state == bench.State("unknown")

    def test_a_digest_that_only_one_side_has_is_a_difference(self) -> None:
        made = self.both(["a"], ["a"])
        more = replace(made.initopt.samples[0], digests={"trained, rank 0": "a", "trained, rank 1": "a"})
        made = replace(made, initopt=replace(made.initopt, samples=(more,)))
        assert made.state.differs == ("trained, rank 1",)

    def test_read_from_the_records_of_all_ranks(self, tmp_path: Path) -> None:
        made = bench.run_bench(
            trainer([4.0, 4.0], digest="a"), trainer([2.0, 2.0], digest="a"), runs=1, warmup=0, root=tmp_path
        )
        assert made.state == bench.State("identical", 2)


class TestWarnings:
    @pytest.mark.parametrize(
        ("values", "warmup", "prepare", "said"),
        [
            ([5.8, 5.0, 5.01, 4.99], 1, None, "stock run 1 was 16% slower than the median: .*--warmup 2, or --prepare"),
            ([5.8, 5.0, 5.01, 4.99], 0, None, "--warmup 1, or --prepare"),
            ([5.8, 5.0, 5.01, 4.99], 1, "sync", "stock run 1 was .* Leave the machine alone, or use more --runs"),
            ([5.0, 5.01, 5.8, 4.99], 1, None, "stock run 3 was .* Leave the machine alone, or use --prepare 'CMD'"),
            ([5.0, 5.01, 4.2, 4.99], 1, None, "stock run 3 was 16% faster than the median"),
        ],
    )
    def test_an_outlier(self, values: list[float], warmup: int, prepare: str | None, said: str) -> None:
        (warning,) = a_bench(values, [2.0, 2.0, 2.0, 2.0], warmup=warmup, prepare=prepare).warnings
        assert re.search(said, warning)

    @pytest.mark.parametrize(
        "values",
        [
            [5.0, 5.2, 5.0, 5.0],  # not by enough to matter
            [5.0, 6.0, 7.0, 8.0, 9.0],  # they all differ
            [5.0, 9.0],  # which of two is the odd one?
        ],
    )
    def test_no_outlier(self, values: list[float]) -> None:
        assert a_bench(values, [2.0] * len(values)).warnings == ()

    def test_sides_under_different_conditions(self) -> None:
        made = a_bench([5.0], [2.0])
        made = replace(made, stock=replace(made.stock, labels=("emulated: cluster",)))
        (warning,) = made.warnings
        assert "stock emulated: cluster, initopt none" in warning
        assert made.labels == ("emulated: cluster",)


class TestCompare:
    def test_the_change_of_the_initopt_side(self) -> None:
        comparison = bench.compare(a_bench([5.0], [2.0]), a_bench([5.0], [2.5], number=7))
        assert comparison.change() == 0.25
        assert comparison.before_name == "initopt, 0006_3f9c2e1"
        assert comparison.after_name == "initopt, 0007_3f9c2e1"
        assert comparison.warnings == ()
        assert not comparison.overlaps

    def test_ranges_that_overlap(self) -> None:
        assert bench.compare(a_bench([5.0, 5.0], [2.0, 3.0]), a_bench([5.0, 5.0], [2.9, 4.0])).overlaps

    def test_from_nothing_to_something(self) -> None:
        before, after = a_bench([5.0], [2.0]), a_bench([5.0], [2.0])
        idle = replace(before.initopt.samples[0], work=2.0, wait=0.0, queue=0.0)
        before = replace(before, initopt=replace(before.initopt, samples=(idle,)))
        assert bench.compare(before, after).change("wait") == float("inf")
        assert bench.compare(before, before).change("wait") == 0.0

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"hosts": ("node-2",)}, "hosts differ from 0006_3f9c2e1: node-1 -> node-2."),
            ({"cores": 8}, "cores differ from 0006_3f9c2e1: 2 -> 8."),
            ({"ranks": 4}, "ranks differ from 0006_3f9c2e1: 2 -> 4."),
            (
                {"versions": {"torch": "2.14.0", "python": "3.12"}},
                "versions differ from 0006_3f9c2e1: python none, torch 2.13.0 -> python 3.12, torch 2.14.0.",
            ),
        ],
    )
    def test_another_machine(self, changes: dict[str, Any], said: str) -> None:
        (warning,) = bench.compare(a_bench([5.0], [2.0]), a_bench([5.0], [2.0], **changes)).warnings
        assert warning.startswith(said)

    def test_other_labels_and_another_command(self) -> None:
        before = a_bench([5.0], [2.0])
        side = replace(before.initopt, labels=("emulated: cluster",), command=("other.sh",))
        warnings = bench.compare(before, replace(before, initopt=side)).warnings
        assert [warning.split(" from")[0] for warning in warnings] == ["labels differ", "the command differs"]

    def test_a_slower_machine_shows_in_stock(self) -> None:
        (warning,) = bench.compare(a_bench([5.0], [2.0]), a_bench([6.0], [2.4])).warnings
        assert warning.startswith("stock itself changed by +20% since 0006_3f9c2e1")

    def test_the_steps_that_grew_most_first(self) -> None:
        before = Side("initopt", (), (), (sample(4.0, a=1.0, b=2.0, c=1.0),))
        after = Side("initopt", (), (), (sample(9.0, a=1.5, b=1.0, c=4.0, d=0.1),))
        comparison = bench.Comparison("before", "after", before, after)
        assert comparison.grown == (Growth("c", 1.0, 4.0), Growth("a", 1.0, 1.5), Growth("d", 0.0, 0.1))

    def test_against_stock(self) -> None:
        comparison = bench.against_stock(a_bench([5.0, 5.0], [4.0, 4.0]))
        assert comparison.change() == pytest.approx(-0.2)
        assert comparison.before_name == "stock, 0006_3f9c2e1"


class TestGate:
    @pytest.mark.parametrize(
        ("text", "gate"),
        [
            ("median > +5%", Gate("median", 5.0, "%")),
            ("slowest>+2.5s", Gate("slowest", 2.5, "s")),
            (" queue > 0 s ", Gate("queue", 0.0, "s")),
            ("max > -10 %", Gate("max", -10.0, "%")),
        ],
    )
    def test_parse(self, text: str, gate: Gate) -> None:
        assert Gate.parse(text) == gate
        assert Gate.parse(str(gate)) == gate

    @pytest.mark.parametrize("text", ["", "median", "median < 5%", "mean > 5%", "median > 5", "median > five%"])
    def test_what_is_not_understood_is_explained(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"--fail-if .* write METRIC > LIMIT, as 'median > \+5%'.*slowest, work"):
            Gate.parse(text)

    @pytest.mark.parametrize(
        ("text", "passed", "change"),
        [
            ("median > +25%", True, 25.0),
            ("median > +24.9%", False, 25.0),
            ("median > +0.5s", True, 0.5),
            ("median > +0.4s", False, 0.5),
            ("work > +49%", False, 50.0),
        ],
    )
    def test_check(self, text: str, passed: bool, change: float) -> None:
        comparison = bench.compare(a_bench([5.0], [2.0]), a_bench([5.0], [2.5]))
        verdict = Gate.parse(text).check(comparison)
        assert verdict.passed is passed
        assert verdict.change == pytest.approx(change)

    def test_a_verdict_names_the_steps_that_grew(self) -> None:
        before = Side("initopt", (), (), (sample(4.0, model=1.0),))
        after = Side("initopt", (), (), (sample(5.0, model=2.0),))
        verdict = Gate.parse("median > +5%").check(bench.Comparison("before", "after", before, after))
        assert not verdict.passed
        assert verdict.grown == (Growth("model", 1.0, 2.0),)
