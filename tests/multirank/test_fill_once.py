"""Tables filled once have the bytes of TorchRec's two fills, and all generators stand where they stood."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from tests.multirank import forked

# The ranks fill with threads of their own, so they are forked from a process that nothing else was done in.
_fresh: list[ProcessPoolExecutor] = []


@pytest.fixture(scope="module", autouse=True)
def _a_fresh_process() -> Iterator[None]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        _fresh[:] = [pool]
        yield


def fork_ranks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    ranks: list[Any] = _fresh[0].submit(forked.fork_ranks, function, *args, **kwargs).result()
    return ranks


ROWS = (640, 333)
Watching = Callable[[], AbstractContextManager[Any]]


def initializers() -> dict[str, Any]:
    import torch
    from torch import nn

    def own(table: Any) -> None:
        with torch.no_grad():
            table.uniform_(-1, 1).mul_(torch.rand(()))

    def partly(table: Any) -> None:
        with torch.no_grad():
            table[::2] = 0.25

    def refused(table: Any) -> None:
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            table.uniform_(1, -1)

    def listed(table: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_([table.data], 0.5)

    def in_threads(table: Any) -> None:
        values = table.data
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda i: values[i::2].fill_(i), range(2)))

    @functools.wraps(nn.init.normal_)
    def seeded(table: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            nn.init.normal_(table)

    return {
        "default": None,
        "normal": functools.partial(nn.init.normal_, std=0.1),
        "kaiming": nn.init.kaiming_uniform_,
        "truncated": functools.partial(nn.init.trunc_normal_, std=0.02),
        "constant": functools.partial(nn.init.constant_, val=0.5),
        "own": own,
        "partly": partly,
        "refused": refused,
        "listed": listed,
        "in_threads": in_threads,
        "seeded": seeded,
        "nothing": lambda table: None,
    }


def made(kind: str, sharding: str, init_fn: Any, dtype: Any, watching: Watching) -> tuple[Any, Any]:
    """A model of two sharded modules and a dense layer, and what `watching` gave."""
    import torch
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.embedding_configs import DataType

    how = {
        "table_wise": lambda i, world: table_wise(rank=i % world, compute_kernel="fused"),
        "row_wise": lambda i, world: row_wise(compute_kernel="fused"),
        # Both halves of the first table lie on one rank.
        "column_wise": lambda i, world: column_wise([0, 0] if i == 0 else list(range(world)), compute_kernel="fused"),
        "dense kernel": lambda i, world: table_wise(rank=i % world, compute_kernel="dense"),
        "data_parallel": lambda i, world: data_parallel(),
    }[sharding]

    module, config = {
        "bags": (EmbeddingBagCollection, EmbeddingBagConfig),
        "sequences": (EmbeddingCollection, EmbeddingConfig),
    }[kind]

    def tables(name: str) -> list[Any]:
        kinds = {torch.float32: DataType.FP32, torch.float16: DataType.FP16, torch.bfloat16: DataType.BF16}
        return [
            config(
                name=f"{name}{i}",
                feature_names=[f"{name}{i}"],
                embedding_dim=32,
                num_embeddings=rows,
                init_fn=init_fn,
                data_type=kinds[dtype],
            )
            for i, rows in enumerate(ROWS)
        ]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = module(tables=tables("a"), device=torch.device("meta"))
            self.beta = module(tables=tables("b"), device=torch.device("meta"))
            self.over = nn.Linear(32, 8, device="meta")

    torch.manual_seed(3)
    model, world = Model(), torch.distributed.get_world_size()
    sharders = {"bags": EmbeddingBagCollectionSharder(), "sequences": EmbeddingCollectionSharder()}
    plans = {
        name: construct_module_sharding_plan(
            getattr(model, name),
            {f"{name[0]}{i}": how(i, world) for i in range(len(ROWS))},
            sharder=sharders[kind],
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        for name in ("alpha", "beta")
    }
    with watching() as filled:
        sharded = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=[sharders[kind]]
        )
    return sharded, filled


def digest(model: Any) -> str:
    """All that a model holds on this rank, where torch's generator stands, and what it gives next."""
    import torch

    content = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for name, value in sorted(model.state_dict().items()):
        shards = [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]
        for shard in shards:
            content.update(name.encode() + str(tuple(shard.shape)).encode())
            content.update(shard.detach().contiguous().view(torch.uint8).numpy().tobytes())
    content.update(torch.rand(100).numpy().tobytes())
    return content.hexdigest()


def small() -> None:
    """Let small tables go the way of large ones."""
    from initopt.table_init import fill_once

    vars(fill_once).update(_WORTH_A_JUMP=1, _WORTH_A_THREAD=1, _LARGE=1)


def ready() -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo")
    small()


def compared(sharding: str) -> list[tuple[str, bool, int, int]]:
    import torch

    from initopt import fill_once

    ready()
    found = []
    for kind in ("bags", "sequences"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for name, init_fn in initializers().items():
                expected, _ = made(kind, sharding, init_fn, dtype, nullcontext)
                wanted = digest(expected)
                got, filled = made(kind, sharding, init_fn, dtype, lambda: fill_once(threads=3))
                found.append((f"{kind} {dtype} {name}", digest(got) == wanted, filled.left_out, filled.made))
    return found


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise", "dense kernel", "data_parallel"])
def test_the_bytes_are_those_of_two_fills(sharding: str) -> None:
    for rank in fork_ranks(compared, sharding, timeout=120):
        assert [name for name, equal, _, _ in rank if not equal] == []
        for name, _, left_out, made in rank:
            # The dense kernel is that of data-parallel tables, which are sent to other ranks between their fills.
            fused = sharding not in ("dense kernel", "data_parallel")
            # What a function of the user's own does can't be known.
            of_torch = name.split()[-1] in ("default", "normal", "kaiming", "truncated", "constant")
            overwritten = fused and of_torch
            assert bool(left_out) == overwritten, name
            assert made or name.endswith("constant") or not overwritten


def other_modules(how: str) -> bool:
    """A sharded module that does not end with TorchRec's `reset_parameters`, but in its own way."""
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection

    from initopt import fill_once

    ready()

    calls = []

    def own(self: Any) -> None:
        calls.append(self)
        if how == "torchrec's, too":
            super(Other, self).reset_parameters()
        for config in self._embedding_bag_configs if how != "nothing" else ():
            self.embedding_bags[config.name].weight.data.add_(0.5)

    class Other(ShardedEmbeddingBagCollection):
        reset_parameters = own

    def shard(self: Any, module: Any, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
        return Other(module, params, env, self.fused_params, device, module_fqn=module_fqn)

    EmbeddingBagCollectionSharder.shard = shard
    expected, _ = made("bags", "table_wise", None, torch.float32, nullcontext)
    wanted = digest(expected)
    got, filled = made("bags", "table_wise", None, torch.float32, lambda: fill_once(threads=2))
    assert type(got.module.alpha) is Other
    assert len(calls) == 4  # two modules, twice
    return digest(got) == wanted and filled.left_out == 0


@pytest.mark.parametrize("how", ["nothing", "own values", "torchrec's, too"])
def test_a_module_that_ends_in_its_own_way_is_filled_as_ever(how: str) -> None:
    assert all(fork_ranks(other_modules, how))


def in_the_block() -> list[bool]:
    """What is done with a model inside of the block."""
    import torch

    from initopt import fill_once

    ready()
    results = []
    for init_fn in (None, initializers()["nothing"]):
        expected, _ = made("bags", "table_wise", init_fn, torch.float32, nullcontext)
        wanted = digest(expected)
        with fill_once(threads=2):
            got, _ = made("bags", "table_wise", init_fn, torch.float32, nullcontext)
            results.append(digest(got) == wanted)
            for shard in shards(got, ("alpha.",)):
                shard.fill_(0.25)
        results += [bool((shard == 0.25).all()) for shard in shards(got, ("alpha.",))]
    return results


def test_a_table_is_ready_when_its_module_is() -> None:
    for rank in fork_ranks(in_the_block):
        assert rank and all(rank)


def restored(sharding: str) -> list[Any]:
    import torch

    from initopt import fill_once

    ready()
    results = []
    for names in ((), ("alpha.",), ("alpha.", "beta.")):
        for init_fn in (None, initializers()["own"]):
            expected, _ = made("bags", sharding, init_fn, torch.float32, nullcontext)
            for shard in shards(expected, names):
                shard.fill_(0.75)
            wanted = digest(expected)
            got, filled = made("bags", sharding, init_fn, torch.float32, lambda: fill_once(threads=2, restored=True))
            marked = filled.marked
            for shard in shards(got, names):
                shard.fill_(0.75)
            missing = filled.complete()
            again = filled.complete()
            results.append((digest(got) == wanted, marked, missing, again, init_fn is None, len(names)))
    return results


def shards(model: Any, names: tuple[str, ...]) -> Iterator[Any]:
    for name, value in model.state_dict().items():
        if name.startswith(names or ("none",)):
            for shard in value.local_shards() if hasattr(value, "local_shards") else ():
                yield shard.tensor


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_a_restore_covers_tables_and_the_others_are_filled(sharding: str) -> None:
    for rank in fork_ranks(restored, sharding):
        for equal, marked, missing, again, known, covered in rank:
            assert equal
            assert again == 0
            # An initializer that reads its table needs it.
            assert bool(marked) == known
            assert missing == marked * (2 - covered) // 2


def unknown_version() -> list[str]:
    import torch

    from initopt import fill_once
    from initopt.table_init import fill_once as module

    ready()
    vars(module)["TESTED"] = "0."
    expected, _ = made("bags", "table_wise", None, torch.float32, nullcontext)
    wanted = digest(expected)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, filled = made("bags", "table_wise", None, torch.float32, lambda: fill_once(threads=2))
    assert digest(got) == wanted
    assert (filled.left_out, filled.made) == (0, 0)
    return [str(one.message) for one in caught if "initopt" in str(one.message)]


def test_another_torchrec_is_left_alone() -> None:
    for [warning] in fork_ranks(unknown_version):
        assert "tables are filled as ever: torchrec 1.9" in warning


def trained(restores: bool, **options: Any) -> tuple[str, list[str]]:
    """The state after five steps, and the notes of the record; a restore leaves every third table out."""
    import torch

    from benchmarks.trainers.trained_state import trained_state
    from initopt import Recorder, Run
    from tests.multirank.test_torchrec_plugin import config
    from tests.multirank.test_torchrec_plugin import small as small_trainer

    warnings.simplefilter("ignore")
    small()

    def checkpoint(dmp: Any) -> None:
        for number, (_, value) in enumerate(sorted(dmp.state_dict().items())):
            for shard in value.local_shards() if hasattr(value, "local_shards") and number % 3 else ():
                generator = torch.Generator().manual_seed(number)
                shard.tensor.copy_(torch.rand(shard.tensor.shape, generator=generator))

    if restores:
        options["checkpoint"] = checkpoint
    torch.manual_seed(1)
    recorder = Recorder("small", mode="overlap")
    ready = small_trainer(config(), **options).run(recorder=recorder)
    losses = [ready.pipeline.progress(ready.batches)[0] for _ in range(5)]
    recorder.close()
    assert recorder.path is not None
    notes = [note.text for note in Run.load(recorder.path).notes if note.step in ("dmp", "checkpoint")]
    return trained_state(ready.model, ready.optimizer, losses), notes


def test_the_training_is_the_same(tmp_path: Any) -> None:
    env = {"INITOPT_ROOT": str(tmp_path / "runs"), "INITOPT_DATA": str(tmp_path / "criteo")}
    stock = fork_ranks(trained, False, env=env, fill_once=False)
    once = fork_ranks(trained, False, env=env)
    assert [state for state, _ in once] == [state for state, _ in stock]
    assert all(any("were not filled twice" in note for note in notes) for _, notes in once)
    assert not any("filled" in note for _, notes in stock for note in notes)


def test_the_training_is_the_same_after_a_restore(tmp_path: Any) -> None:
    env = {"INITOPT_ROOT": str(tmp_path / "runs"), "INITOPT_DATA": str(tmp_path / "criteo")}
    stock = fork_ranks(trained, True, env=env, fill_once=False)
    mine = fork_ranks(trained, True, env=env, checkpoint_has_tables=True)
    assert [state for state, _ in mine] == [state for state, _ in stock]
    for _, notes in mine:
        assert any("were left to the checkpoint" in note for note in notes)
        assert any("were not in the checkpoint" in note for note in notes)


@pytest.mark.parametrize("options", [{}, {"checkpoint": lambda dmp: None, "fill_once": False}])
def test_a_restore_of_tables_needs_a_checkpoint_and_the_one_fill(options: Any) -> None:
    from initopt.plugins.torchrec import trainer

    with pytest.raises(ValueError, match="checkpoint_has_tables needs"):
        trainer(model=print, loader=print, dense_optimizer=print, checkpoint_has_tables=True, **options)
