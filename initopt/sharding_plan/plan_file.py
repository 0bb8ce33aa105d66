"""A sharding plan in a file, with what it was planned for, the planner's estimates, and a digest of it all.

A file that is torn, edited or something else is refused when it is read. Whether its plan fits a job is not known here
(see `pinning`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrec.distributed.types import ShardingPlan

from initopt.sharding_plan.plan_json import digest, plan_digest, plan_from_data, plan_to_data
from initopt.sharding_plan.tables import Table, path_of

FORMAT = 1
"""Version of the file. It changes when a key is renamed or changes its meaning."""

_KIND = "sharding plan"


class PlanFileError(ValueError):
    """A plan file that can't be read or written. `path` is the file."""

    def __init__(self, path: str | Path, problem: str) -> None:
        self.path = Path(path)
        self.problem = problem
        super().__init__(f"{path}: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.problem)


@dataclass(frozen=True)
class PlannedFor:
    """The job that a plan was made for. `hbm`, `ddr` and `ssd` are bytes a rank, in order of ranks."""

    world_size: int
    local_world_size: int
    pod_size: int | None
    device: str
    batch_size: int
    hbm: tuple[int, ...]
    ddr: tuple[int, ...]
    ssd: tuple[int, ...]


@dataclass(frozen=True)
class RankEstimate:
    """What the planner expects of the tables of one rank: memory in bytes, times of one step in milliseconds."""

    rank: int
    shards: int
    hbm: int
    ddr: int
    ssd: int
    forward_compute: float
    forward_comms: float
    backward_compute: float
    backward_comms: float
    prefetch: float

    @property
    def time(self) -> float:
        """All parts together, by which the planner compares ranks."""
        return self.forward_compute + self.forward_comms + self.backward_compute + self.backward_comms + self.prefetch


@dataclass(frozen=True)
class Share:
    """What one table (its path) adds to the time of a rank, in milliseconds."""

    table: str
    time: float


@dataclass(frozen=True)
class PlanFile:
    """A plan and what is known of it.

    `ranks` are the planner's estimates, `slowest` the tables of the rank with the longest time, longest first.
    `versions` are those of the libraries that made the plan.
    """

    plan: ShardingPlan
    planned_for: PlannedFor
    tables: tuple[Table, ...]
    ranks: tuple[RankEstimate, ...]
    slowest: tuple[Share, ...]
    versions: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The digest of the plan alone (see `plan_json.plan_digest`)."""
        return plan_digest(self.plan)

    def shardings(self) -> dict[str, dict[str, Any]]:
        """How each table is sharded, as JSON data (see `plan_json.plan_to_data`), by the path of the table."""
        modules = plan_to_data(self.plan).items()
        return {path_of(path, name): one for path, tables in modules for name, one in tables.items()}

    def to_data(self) -> dict[str, Any]:
        """Everything as JSON data. Raises TypeError for a plan that JSON can't hold."""
        about = asdict(self.planned_for)
        data = {
            "initopt": _KIND,
            "format": FORMAT,
            "versions": dict(self.versions),
            "planned_for": {name: _short(value) for name, value in about.items()},
            "tables": [{**asdict(table), "features": list(table.features)} for table in self.tables],
            "estimates": {
                "ranks": [asdict(rank) for rank in self.ranks],
                "slowest": [asdict(share) for share in self.slowest],
            },
            "plan": plan_to_data(self.plan),
        }
        return {**data, "digest": digest(data)}

    def write(self, path: str | Path) -> None:
        """Write the file, aside and then renamed. Raises PlanFileError if that can't be done."""
        path = Path(path)
        if path.is_dir():
            raise PlanFileError(path, "is a directory: name a file")
        if path.exists() and _KIND.encode() not in path.read_bytes():
            raise PlanFileError(path, "is there already and is no plan file: name another one")
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            aside.write_text(_text(self.to_data()))
            os.replace(aside, path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise PlanFileError(path, f"can't be written: {error.strerror}") from error
        except TypeError as error:
            raise PlanFileError(path, f"can't be written: {error}") from error

    @classmethod
    def read(cls, path: str | Path) -> PlanFile:
        """Read a file. Raises PlanFileError if it can't be read, is no plan file, or is not what was written."""
        try:
            data = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise PlanFileError(path, f"can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise PlanFileError(path, f"is torn or no plan file: {error}") from error
        if not isinstance(data, dict) or data.get("initopt") != _KIND:
            raise PlanFileError(path, "is no plan file: `initopt plan ... -o FILE` writes one")
        if data.get("format") != FORMAT:
            raise PlanFileError(
                path, f"has format {data.get('format')!r}, this initopt reads format {FORMAT}: make the plan anew"
            )
        if data.pop("digest", None) != digest(data):
            raise PlanFileError(path, "was edited or torn: its content does not have the digest in it; make it anew")
        try:
            return cls._from_data(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            made = data.get("versions")
            raise PlanFileError(
                path, f"is not understood ({type(error).__name__}: {error}); it was made by {made}"
            ) from error

    @classmethod
    def _from_data(cls, data: Mapping[str, Any]) -> PlanFile:
        about = data["planned_for"]
        memory = {name: _long(about[name], about["world_size"]) for name in ("hbm", "ddr", "ssd")}
        return cls(
            plan_from_data(data["plan"]),
            PlannedFor(**{**about, **memory}),
            tuple(Table(**{**table, "features": tuple(table["features"])}) for table in data["tables"]),
            tuple(RankEstimate(**rank) for rank in data["estimates"]["ranks"]),
            tuple(Share(**share) for share in data["estimates"]["slowest"]),
            data["versions"],
        )


def versions() -> dict[str, str]:
    """The versions of the libraries that make a plan, as installed."""
    return {name: importlib.metadata.version(name) for name in ("initopt", "torchrec", "torch")}


def _short(value: Any) -> Any:
    """A value per rank as one value where all ranks have the same."""
    if not isinstance(value, tuple):
        return value
    return value[0] if len(set(value)) == 1 else list(value)


def _long(value: int | Sequence[int], world_size: int) -> tuple[int, ...]:
    return (value,) * world_size if isinstance(value, int) else tuple(value)


def _text(data: Mapping[str, Any]) -> str:
    """JSON with a line for each table and each rank: to be read and compared by line, without a line per number."""
    lines = ["{"]
    for name, value in data.items():
        if name == "plan":
            modules = [
                f"  {json.dumps(path)}: {{\n"
                + ",\n".join(f"   {json.dumps(table)}: {json.dumps(one)}" for table, one in tables.items())
                + "\n  }"
                for path, tables in value.items()
            ]
            lines.append(f' "{name}": {{\n' + ",\n".join(modules) + "\n },")
        elif name == "tables":
            lines.append(f' "{name}": [\n' + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ],")
        elif name == "estimates":
            parts = [
                f'  "{part}": [\n' + ",\n".join(f"   {json.dumps(one)}" for one in rows) + "\n  ]"
                for part, rows in value.items()
            ]
            lines.append(f' "{name}": {{\n' + ",\n".join(parts) + "\n },")
        else:
            lines.append(f' "{name}": {json.dumps(value)}' + ("" if name == "digest" else ","))
    return "\n".join([*lines, "}", ""])
