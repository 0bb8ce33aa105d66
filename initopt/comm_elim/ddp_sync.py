"""DistributedDataParallel without the sync of its construction, where all ranks are known to hold the same parameters.

TorchRec wraps the whole model (`torchrec/distributed/model_parallel.py:183`); that checks the shapes of the dense
parameters and sends rank 0's values (`torch/nn/parallel/distributed.py:1064`, `:1066`). Where shapes and values are
equal on all ranks, both change nothing: the ranks compare digests of them, and it is an error if a value is written to
after that. The broadcast stays where values differ, and the check, too, where parameters were on the meta device or are
not all known; so an error of the check comes as ever. Buffers stay as each rank has them: TorchRec has them not sent
(`broadcast_buffers=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as home

from initopt.comm_elim.assumed import Dense
from initopt.replaced import on_this_thread, passes_on

MEETINGS = 2
"""The shape check and the broadcast."""


@contextmanager
def rewritten(
    dense: Dense, left_out: Callable[[int], None], kept: Callable[[str], None], *, equal: bool
) -> Iterator[None]:
    """Leave the sync out of the wrap of the whole model in the block. `kept` is told why it was not.

    Where only the forms of the parameters are known to be `equal`, not the values, these are sent, but not checked.
    """
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

    def wrap(wrapper: Any, dmp: Any, env: Any, device: Any, ignored: set[str]) -> None:
        module = dmp._dmp_wrapped_module
        mine = {name: one for name, one in module.named_parameters() if name not in ignored}
        why = _stays(wrapper) if mine else "there is no dense parameter"
        if not why and not dense.covers(mine):
            why = "there are dense parameters whose values are not known before the model is sharded"
        if why:
            kept(why)
            DefaultDataParallelWrapper._ddp_wrap(wrapper, dmp, env, device, ignored)
            return
        if not equal:
            with on_this_thread(home, "_verify_param_shape_across_processes", lambda *args, **kwargs: None):
                DefaultDataParallelWrapper._ddp_wrap(wrapper, dmp, env, device, ignored)
            left_out(MEETINGS - 1)
            return
        changed = next(dense.changed(mine), None)
        if changed is not None:
            raise RuntimeError(
                f"parameter {changed!r} was written to on this rank after all ranks had agreed on its value: write "
                "to it before DistributedModelParallel begins, or leave the rewrite 'ddp_sync' out"
            )
        with without_sync(lambda given: given is dmp._dmp_wrapped_module or given is module):
            DefaultDataParallelWrapper._ddp_wrap(wrapper, dmp, env, device, ignored)
        left_out(MEETINGS)

    with on_this_thread(DefaultDataParallelWrapper, "_ddp_wrap", wrap):
        yield


@contextmanager
def without_sync(of: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Let each DistributedDataParallel made in the block, of a module for which `of` holds, trust its values."""

    @passes_on
    def init(ddp: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Positional arguments are not TorchRec's.
        if not args and of(module):
            kwargs.setdefault("init_sync", False)
        DistributedDataParallel.__init__(ddp, module, *args, **kwargs)

    with on_this_thread(DistributedDataParallel, "__init__", init):
        yield


def _stays(wrapper: Any) -> str:
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

    if type(wrapper) is not DefaultDataParallelWrapper:
        return f"{type(wrapper).__name__} wraps the model in its own way"
    if wrapper._ddp_kwargs:
        return f"the wrapper sets {', '.join(sorted(wrapper._ddp_kwargs))}"
    return ""
