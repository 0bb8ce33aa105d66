"""Recompiles in the first 100 batches of a variable-length data set: stock against initopt with recorded sizes.

    python -m benchmarks.bench_dynamic_shapes --save       # five minutes on two cores
    python -m benchmarks.bench_dynamic_shapes --only stock --only initopt

Compiled, each by itself: the three dense parts of the DLRM (`trainers/dlrm_model.py`), and a part that takes a
KeyedJaggedTensor and weights each value by its position. An epoch has 25 batches of 128 rows, the last one 72; the
number of values differs in every batch. Every side is a fresh process with an empty compile cache:

    stock          torch.compile as it is: one size, then symbols for what varied
    static         `dynamic=False`, as the demo's trainers have it
    dynamic=True   symbols for all sizes of all inputs
    mark_dynamic   symbols for what the record names, marked on the inputs of the first batch
    initopt        symbols for what the record names (`dynamic_shapes.applied`)

The record is that of the stock side's start. Seconds lost are those of the batches after the first, each less the
median batch. The digest is that of all weights and losses. With `--constant` all batches have the same sizes, so that
digests compare code for one size with code for symbols.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "dynamic_shapes.md"
SIDES = ("stock", "static", "dynamic=True", "mark_dynamic", "initopt")
ROWS, LAST, EPOCH, BATCHES, FEATURES, DIM = 128, 72, 25, 100, 26, 16
PYTHON = [sys.executable]


@dataclass(frozen=True)
class Side:
    """One process. Seconds are wall times, except `cpu` (of the process and its compilers)."""

    name: str
    compiles: int
    recompiles: int
    remaining: int
    first: float
    lost: float
    median: float
    cpu: float
    digest: str


def batches(count: int, constant: bool) -> Iterator[tuple[Any, Any, Any]]:
    """Dense features, embeddings (as leaves) and the KeyedJaggedTensor of each batch, always the same."""
    import torch
    from torchrec import KeyedJaggedTensor

    draw = torch.Generator().manual_seed(1)
    keys = ("a", "b", "c")
    for i in range(count):
        rows = LAST if i % EPOCH == EPOCH - 1 and not constant else ROWS
        lengths = torch.full((3 * rows,), 4) if constant else torch.randint(0, 9, (3 * rows,), generator=draw)
        values = torch.rand(int(lengths.sum()), generator=draw)
        yield (
            torch.rand(rows, 13, generator=draw),
            torch.rand(rows, FEATURES, DIM, generator=draw),
            KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths),
        )


def parts() -> dict[str, Any]:
    """The compiled modules, with weights that are always the same."""
    import torch
    from torch import nn
    from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

    class PositionWeights(nn.Module):
        """A weight for the place of a value among those of its row and key."""

        def __init__(self, places: int) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.linspace(1, 2, places))

        def forward(self, features: Any) -> torch.Tensor:
            lengths, values = features.lengths(), features.values()
            starts = torch.cumsum(lengths, 0) - lengths
            rows = torch.repeat_interleave(lengths, output_size=values.numel())
            places = torch.arange(values.numel(), device=values.device) - starts[rows]
            return self.weights[places.clamp(max=self.weights.numel() - 1)] * values

    torch.manual_seed(0)
    crossed = DIM + (FEATURES + 1) * FEATURES // 2
    return {
        "dense": DenseArch(13, [512, 256, DIM]),
        "interaction": InteractionArch(FEATURES),
        "over": OverArch(crossed, [512, 512, 256, 1]),
        "position": PositionWeights(16),
    }


def train(side: str, count: int, constant: bool, record: Path) -> Side:
    """Train `count` batches in this process. The stock side writes the record, other sides may read it."""
    import contextlib

    import torch
    from torch._dynamo.utils import get_compilation_metrics

    from initopt.compile_cache import dynamic_shapes

    modules = parts()
    dynamic = {"static": False, "dynamic=True": True}.get(side)
    for module in modules.values():
        module.compile(dynamic=dynamic)
    known = dynamic_shapes.DynamicSources()
    if side in ("initopt", "mark_dynamic"):
        known = dynamic_shapes.DynamicSources.from_data(json.loads(record.read_text()))
    told = known

    def tell(sources: dynamic_shapes.DynamicSources) -> None:
        nonlocal told
        told = sources

    end = dynamic_shapes.watch(tell, known)
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    optimizer = torch.optim.Adagrad(parameters, lr=0.005)
    digest, seconds, compiled = hashlib.sha256(), [], {}
    marked = known if side == "mark_dynamic" else dynamic_shapes.DynamicSources()
    with dynamic_shapes.applied(known) if side == "initopt" else contextlib.nullcontext():
        for i, (dense, embeddings, features) in enumerate(batches(count, constant)):
            embeddings.requires_grad_(True)

            def call(name: str, marks: bool = i == 0, **inputs: Any) -> Any:
                if marks:
                    _mark(marked, modules[name], inputs)
                return modules[name](**inputs)

            start = time.perf_counter()
            out = call("dense", features=dense)
            out = call("interaction", dense_features=out, sparse_features=embeddings)
            out = call("over", features=out)
            loss = out.sigmoid().mean() + call("position", features=features).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            digest.update(loss.detach().numpy().tobytes())
            # torch keeps the last 64 only. Those of a backward pass have no name.
            compiled.update({one.compile_id: one for one in get_compilation_metrics() if one.co_name is not None})
    recompiles = sum(one.recompile_reason is not None for one in compiled.values())
    end()
    if side == "stock" and not constant:
        record.write_text(json.dumps(told.to_data()))
        print(told.advice(modules), file=sys.stderr)
    for parameter in parameters:
        digest.update(parameter.detach().numpy().tobytes())
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    median = statistics.median(seconds[1:])
    return Side(
        side,
        len(compiled),
        recompiles,
        len(told.remaining),
        seconds[0],
        sum(one - median for one in seconds[1:]),
        median,
        sum(one.ru_utime + one.ru_stime for one in used),
        digest.hexdigest()[:16],
    )


def _mark(known: Any, module: Any, inputs: dict[str, Any]) -> None:
    import torch

    code = type(module).forward.__code__
    for one in known.varying:
        if (one.file, one.line) == (code.co_filename, code.co_firstlineno) and one.dim is not None:
            first, _, attribute = one.argument.partition(".")
            tensor = getattr(inputs[first], attribute) if attribute else inputs[first]
            torch._dynamo.maybe_mark_dynamic(tensor, one.dim)


def in_fresh_process(side: str, count: int, constant: bool, record: Path, cache: Path) -> Side:
    cache.mkdir(parents=True, exist_ok=True)
    # Inductor keeps its precompiled headers under the folder for temporary files, whatever its own folder is.
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [*PYTHON, "-m", "benchmarks.bench_dynamic_shapes", "--batches", str(count), "--record", str(record)]
    command += ["--one", side, *(["--constant"] if constant else [])]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
    return Side(**json.loads(done.stdout.splitlines()[-1]))


def table(sides: list[Side]) -> str:
    lines = [
        "| side | compiles | recompiles | first batch, s | lost later, s | median batch, ms | CPU, s | weights |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    digests = [side.digest for side in sides]
    for side in sides:
        same = "as the first row" if side.digest == digests[0] else f"other ({side.digest[:6]})"
        lines.append(
            f"| {side.name} | {side.compiles} | {side.recompiles} | {side.first:.1f} | {side.lost:.1f} | "
            f"{1000 * side.median:.2f} | {side.cpu:.1f} | {same} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Print a table of all batches and one of batches of the same sizes. Exit code 1 if initopt recompiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SIDES, help="this side, may be repeated (stock always runs)")
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--constant", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=f"keep the tables in {RESULTS.name}")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(asdict(train(chosen.one, chosen.batches, chosen.constant, chosen.record))))
        return 0
    sides = [side for side in SIDES if side == "stock" or not chosen.only or side in chosen.only]
    varied, same = [], []
    with tempfile.TemporaryDirectory(prefix="initopt-bench-") as folder:
        record = Path(folder, "record.json")
        for number, side in enumerate(sides):
            cache = Path(folder, str(number))
            varied.append(in_fresh_process(side, chosen.batches, False, record, cache))
            print(f"{side}: {varied[-1]}", file=sys.stderr, flush=True)
            if side in ("stock", "dynamic=True", "mark_dynamic", "initopt"):
                same.append(in_fresh_process(side, min(chosen.batches, 20), True, record, cache))
    heading = "All batches of the same sizes (20 of them; the disk cache is that of the side above):"
    text = f"{table(varied)}\n\n{heading}\n\n{table(same)}"
    print(text)
    if chosen.save:
        RESULTS.write_text(f"# Recompiles of a variable-length data set\n\n{about('bench_dynamic_shapes')}\n\n{text}\n")
    return any(side.recompiles for side in varied if side.name == "initopt")


def about(name: str, how: str = "one thread, one run a row") -> str:
    """How and where a table was measured, as a sentence."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchrec"))
    return (
        f"`python -m benchmarks.{name} --save` on {os.cpu_count()} cores, {libraries}, Python "
        f"{platform.python_version()}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, load "
        f"{os.getloadavg()[2]:.1f} over 15 minutes, {how}, nothing emulated."
    )


if __name__ == "__main__":
    sys.exit(main())
