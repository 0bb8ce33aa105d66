"""Autotuning on a CPU with the winners of an earlier start: seconds saved, and speed lost by the choice.

    python -m benchmarks.bench_autotune --save       # three minutes on two cores

What is tuned (`max_autotune`, templates in C++ against ATen): the products of DLRM's interaction and of an attention,
forward and backward, and the linear layers of a frozen model, for inference. (Linear layers that are trained have one
choice on a CPU.) Each row of the first table is a fresh process with an empty cache. *record* tries all choices and
keeps the winners; *other shapes* has sizes of the same class, with all choices and with the recorded ones; *empty disk*
has the sizes of the record again.

The second table is of the start with other shapes and all choices: by how much the recorded choices are slower than
the winner, timed by inductor; and by how much those of a record would be that names the slowest choice as the winner.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.bench_dynamic_shapes import about
from initopt.compile_cache.autotune import AGAIN, Kernel, Tuned, Winners, pruned

RESULTS = Path(__file__).parent / "results" / "autotune.md"
PYTHON = [sys.executable]
OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
STARTS = ("record", "other shapes, all", "other shapes, recorded", "empty disk, recorded", "other shapes, stale")


@dataclass(frozen=True)
class Start:
    """One process: what was tuned, seconds of all compiling, CPU seconds of the process and its compilers."""

    name: str
    seconds: float
    cpu: float
    tuned: tuple[Tuned, ...]

    @property
    def tuning(self) -> float:
        return sum(one.seconds for one in self.tuned)


def compile_all(other: bool) -> None:
    """Compile and run what is tuned, with the sizes of the record or other ones of the same classes."""
    import torch
    from torch import nn
    from torch._inductor import config

    torch.manual_seed(0)
    rows = 96 if other else 128

    def interaction(x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, x.transpose(1, 2))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)

    for function, inputs, size in ((interaction, 1, (rows, 27, 16)), (attention, 3, (16, rows, 32))):
        tensors = [torch.rand(size, requires_grad=True) for _ in range(inputs)]
        torch.compile(function, options=OPTIONS, dynamic=False)(*tensors).sum().backward()
    frozen = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 16)).eval()
    with torch.no_grad(), config.patch(freezing=True):
        torch.compile(frozen, options=OPTIONS, dynamic=False)(torch.rand(rows, 13))


def start(name: str, record: Path) -> Start:
    """One start in this process; *record* writes the record, the others read it."""
    known = None if name == "record" else Winners.from_data(json.loads(record.read_text()))
    if known is not None and not name.endswith("recorded"):
        stale = name.endswith("stale")
        # As if it were time to tune in full again.
        kernels = {key: replace(_stale(one) if stale else one, starts=AGAIN) for key, one in known.kernels.items()}
        known = replace(known, kernels=kernels)
    began = time.perf_counter()
    with pruned(known) as tuning:
        compile_all(other=name.startswith("other"))
    seconds = time.perf_counter() - began
    if name == "record":
        record.write_text(json.dumps(tuning.winners().to_data()))
    return Start(name, seconds, _cpu(), tuning.tuned)


def _stale(kernel: Kernel) -> Kernel:
    slowest = max(kernel.ratios, key=kernel.ratios.__getitem__)
    return replace(kernel, ratios={slowest: 1.0}, winner=slowest)


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def in_fresh_process(name: str, record: Path, cache: Path) -> Start:
    cache.mkdir(parents=True)
    # Inductor keeps its precompiled headers under the folder for temporary files, whatever its own folder is.
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [*PYTHON, "-m", "benchmarks.bench_autotune", "--record", str(record), "--one", name]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    data: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Start(**{**data, "tuned": tuple(Tuned(**one) for one in data["tuned"])})


def tables(starts: list[Start]) -> str:
    lines = [
        "| start | kernels | choices tried | tuning, s | compiling in all, s | CPU, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in starts:
        if not one.name.endswith("stale"):
            tried, offered = sum(row.tried for row in one.tuned), sum(row.choices for row in one.tuned)
            cells = f"{len(one.tuned)} | {tried} of {offered} | {one.tuning:.1f} | {one.seconds:.1f} | {one.cpu:.1f}"
            lines.append(f"| {one.name} | {cells} |")
    by_name = {one.name: one for one in starts}
    full, stale = by_name["other shapes, all"], by_name["other shapes, stale"]
    lines += ["", "| kernel | tuning, s | recorded choice slower by | stale choice slower by |", "|---|---:|---:|---:|"]
    for fresh, old in zip(full.tuned, stale.tuned, strict=True):
        cells = f"{fresh.seconds:.1f} | {_percent(fresh.loss)} | {_percent(old.loss)}"
        lines.append(f"| {fresh.kernel.replace('|', ' or ')} | {cells} |")
    return "\n".join(lines)


def _percent(loss: float | None) -> str:
    return "not in the record" if loss is None else f"{loss:.1%}"


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=f"keep the tables in {RESULTS.name}")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(asdict(start(chosen.one, chosen.record))))
        return 0
    starts = []
    with tempfile.TemporaryDirectory(prefix="initopt-bench-") as folder:
        for number, name in enumerate(STARTS):
            starts.append(in_fresh_process(name, Path(folder, "record.json"), Path(folder, str(number))))
            print(*(f"{name}: {one.line}" for one in starts[-1].tuned), sep="\n", file=sys.stderr, flush=True)
    text = tables(starts)
    print(text)
    if chosen.save:
        RESULTS.write_text(f"# Autotuning with recorded winners\n\n{about('bench_autotune')}\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
