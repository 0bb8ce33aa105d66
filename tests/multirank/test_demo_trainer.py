"""The benchmark's trainer: the same training every time, on the same data, and the same under the emulated cluster."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

from benchmarks.trainers import criteo, dlrm_model, emulation, emulation_values
from benchmarks.trainers.trained_state import trained_state
from tests.multirank.launch import REPOSITORY, JobOutput, launch

# Fresh ranks import torch and torchrec: 10 s on two free cores, a minute on two busy ones.
pytestmark = pytest.mark.timeout(200)

STOCK = str(REPOSITORY / "benchmarks/trainers/dlrm_stock.py")
EMULATED = str(REPOSITORY / "tests/multirank/emulated_trainer.py")
SMALL = ["--rows=500", "--batch-size=32", "--steps=3", "--samples=2048", "--no-compile"]


def results(job: JobOutput) -> list[dict[str, Any]]:
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in job.check().ranks]


def environment(folder: Path) -> dict[str, str]:
    return {"INITOPT_ROOT": str(folder / "runs"), "INITOPT_DATA": str(folder / "data")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results(launch([STOCK, *SMALL], env=environment(tmp_path_factory.mktemp("plain")), timeout=150))


def test_a_day_is_a_function_of_its_seed(tmp_path: Path) -> None:
    one = criteo.generate(200, 3, tmp_path / "a")
    two = criteo.generate(200, 3, tmp_path / "b")
    other = criteo.generate(200, 4, tmp_path / "b")
    names = sorted(file.name for file in one.iterdir())
    assert names == ["day_0_dense.npy", "day_0_labels.npy", "day_0_sparse.npy"]
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()
        assert (one / name).read_bytes() != (other / name).read_bytes()
    assert (np.load(one / names[0]).dtype, np.load(one / names[2]).dtype) == (np.float32, np.int32)


def test_many_writers_leave_one_whole_day(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        days = set(pool.map(lambda _: criteo.generate(5_000, 0, tmp_path), range(16)))
    assert [path.name for path in tmp_path.iterdir()] == ["criteo-5000-seed0"]
    assert len(criteo.CriteoDay(days.pop())) == 5_000


def test_a_batch_holds_the_rows_of_the_day(tmp_path: Path) -> None:
    day = criteo.CriteoDay(criteo.generate(50, 0, tmp_path))
    rows = tuple(range(2, 2 + criteo.SPARSE))
    dense, sparse, labels = day.__getitems__([7, 3])
    batch = criteo.Collate(rows)((dense, sparse, labels))
    assert torch.equal(batch.dense_features, torch.from_numpy(dense))
    assert batch.labels.tolist() == labels[:, 0].tolist()
    for column, name in enumerate(criteo.FEATURES):
        assert batch.sparse_features[name].values().tolist() == [int(i) % rows[column] for i in sparse[:, column]]


def test_ranks_read_different_samples_and_together_all(tmp_path: Path) -> None:
    day = criteo.generate(64, 0, tmp_path)
    seen = []
    for rank in range(2):
        loader = criteo.loader(day, [7] * criteo.SPARSE, rank=rank, world_size=2, batch_size=8)
        seen.append({tuple(row.tolist()) for batch in loader for row in batch.dense_features})
    assert seen[0].isdisjoint(seen[1])
    assert seen[0] | seen[1] == {tuple(row.tolist()) for row in torch.from_numpy(np.load(day / "day_0_dense.npy"))}


def test_a_loader_without_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers=0"):
        criteo.loader(tmp_path, [1] * criteo.SPARSE, rank=0, world_size=1, batch_size=1, workers=0)


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="'rowwise' is none of default, table_wise"):
        dlrm_model.Config(sharding="rowwise")
    with pytest.raises(ValueError, match="dim=12"):
        dlrm_model.Config(dim=12)
    with pytest.raises(ValueError, match="'clutser' is none of local, cluster"):
        emulation.install("clutser")


def test_the_delay_of_a_collective_is_alpha_plus_bytes_times_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation_values, "COLLECTIVE_ALPHA_SECONDS", 1.0)
    monkeypatch.setattr(emulation_values, "COLLECTIVE_BETA_SECONDS_PER_BYTE", 0.5)
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.trainers.emulation.time.sleep", slept.append)
    emulation._delay([torch.zeros(3, dtype=torch.float64), [torch.zeros(2, dtype=torch.int32)]])
    emulation._delay(())
    assert slept == [1.0 + 0.5 * (24 + 8), 1.0]


def test_a_reader_waits_in_the_cluster_only() -> None:
    assert emulation.reader("local") is None
    assert emulation.reader("cluster") is not None
    assert emulation.install("local") == ()


def test_stock_trains_the_same_every_time(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    again = results(launch([STOCK, *SMALL], env=environment(tmp_path), timeout=150))
    assert again == plain
    assert plain[0]["trained_state"] != plain[1]["trained_state"]


def test_one_bit_or_one_loss_changes_the_digest() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: torch.optim.Adagrad(p, lr=0.1))
    loss = torch.tensor(0.5)
    before = trained_state(model, optimizer, [loss])
    assert before == trained_state(model, optimizer, [loss.clone()])
    assert before != trained_state(model, optimizer, [loss, loss])

    optimizer.state_dict()["state"]["bias"]["sum"].view(torch.int32)[1] ^= 1
    changed = trained_state(model, optimizer, [loss])
    assert before != changed
    model.weight.data.view(torch.int32)[1, 2] ^= 1
    assert changed != trained_state(model, optimizer, [loss])


def test_the_emulated_cluster_delays_every_collective_and_changes_no_bit(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    env = {**environment(tmp_path), "TORCH_FR_BUFFER_SIZE": "10000"}
    emulated = results(launch([EMULATED, *SMALL, "--profile=cluster"], env=env, timeout=150))
    for rank, reference in zip(emulated, plain, strict=True):
        assert rank.pop("delayed") == rank.pop("executed") > 20
        assert rank == reference
