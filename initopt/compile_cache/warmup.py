"""Compiling parts of a model before the first batch is there, from examples of their inputs, without leaving a trace.

The parts are traced and lowered in the thread that warms them up, forward and backward, and the compiled code is
installed; but where it would run for the first time it raises instead. So no kernel runs: no gradient, no buffer
update, no draw. The real first batch finds the code there, if its inputs match the examples in shape, stride, dtype
and `requires_grad`.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from initopt.compile_cache.autotune import pruned
from initopt.compile_cache.cache import PATIENCE, Cache, Ranks, Uncached
from initopt.compile_cache.calls import Call, Recorded, recording
from initopt.compile_cache.dynamic_shapes import applied, apply, watch
from initopt.compile_cache.fast_batch import Examples, Twin, batch_schema, examples_for, loader_schema
from initopt.compile_cache.instruction_sets import ask
from initopt.compile_cache.key import key_of, model_digest
from initopt.compile_cache.known import CALLS, SIZES, WINNERS
from initopt.failure import first_line
from initopt.record import step
from initopt.replaced import on_this_thread

if TYPE_CHECKING:
    from torch import nn

_here = threading.local()


@dataclass(frozen=True)
class Prepared:
    """What compiling ahead needs of a model before it is sharded: its `key.model_digest`, and a copy without data."""

    model: str | None
    twin: Twin


@dataclass(frozen=True)
class Compile:
    """Which parts of a model `torch.compile` takes, how, and on what example each is warmed up.

    `parts` returns the modules by name. `batch` gets the device and returns a batch, or a `Schema` of one: what the
    model passes its parts for it is what they are warmed up on. `examples` gets the device and returns a `Call` for
    parts that are to be warmed up on something else. Where neither is given they are warmed up on what an earlier
    start was seen to pass, or on what the loader says of its batches. `mode`, `options`, `dynamic` and `fullgraph` are
    those of `torch.compile`; the backend is inductor.

    `dynamic="recorded"` compiles once for all values of the sizes that varied in an earlier run. `tuning="recorded"`
    lets inductor's autotuning try only the kernels that were close to winning in an earlier start, for shapes of the
    same class. Both may give other last bits than without: the first adds up in another order, the second may take
    another kernel, as every tuning may.

    `ddp_bucket_mb` is the size of the buckets (in MiB) of the DistributedDataParallel that the parts will run in, None
    where they run in none. torch's compiler cuts the graphs in there at the buckets; the default is what TorchRec's
    DistributedModelParallel makes.

    `cache` is where compiled code is kept between starts: a folder, or an address of fsspec such as `s3://bucket/job`;
    default: `compile_cache` beside the runs. With `shared` (default: for an address) all hosts see the same there, and
    one rank of the job compiles for all; else one of each host does.
    """

    parts: Callable[[nn.Module], Mapping[str, nn.Module]]
    examples: Callable[[Any], Mapping[str, Call]] | None = None
    batch: Callable[[Any], Any] | None = None
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    dynamic: bool | Literal["recorded"] | None = None
    tuning: Literal["all", "recorded"] = "all"
    fullgraph: bool = False
    ddp_bucket_mb: float | None = 25.0
    cache: str | Path | None = None
    shared: bool | None = None

    def __post_init__(self) -> None:
        if self.dynamic not in (None, False, True, "recorded"):
            raise ValueError(f"dynamic is {self.dynamic!r}: it must be None, False, True or 'recorded'")
        if self.tuning not in ("all", "recorded"):
            raise ValueError(f"tuning is {self.tuning!r}: it must be 'all' or 'recorded'")

    def apply(self, model: nn.Module) -> None:
        """Let every part compile at its first call, as `part.compile()` does. Draws nothing."""
        dynamic = None if self.dynamic == "recorded" else self.dynamic
        backend = _Backend(self.mode, dict(self.options) if self.options is not None else None, dynamic)
        for part in self.parts(model).values():
            part.compile(backend=backend, dynamic=dynamic, fullgraph=self.fullgraph)

    def prepare(self, model: nn.Module, device: Any) -> Prepared:
        """Return what compiling ahead needs of the model as it was made: sharding changes it. Takes milliseconds."""
        import torch

        try:
            digest = model_digest(self.parts(model))
        except Exception as error:
            _uncached(error)
            digest = None
        return Prepared(digest, Twin.of(model, torch.device(device)))

    def open_cache(
        self,
        prepared: Prepared,
        device: Any,
        *,
        store: Any,
        rank: int,
        world_size: int,
        startup: str = "",
        patience: float = PATIENCE,
        between: Callable[[], None] = lambda: None,
    ) -> Uncached:
        """Return the cache of this start-up (see `cache.Cache`), with what an earlier start left about the model.

        `store` is a torch.distributed store that all ranks share, `startup` what they call this start-up and no other
        one in this attempt of the job. `patience` is how many seconds a rank waits for another one; `between` is called
        meanwhile.
        """
        import torch

        device = torch.device(device)
        ranks = Ranks(store, rank, world_size, startup)
        options = {name: getattr(self, name) for name in ("mode", "options", "dynamic", "fullgraph", "ddp_bucket_mb")}
        uncached = Uncached(ranks, patience=patience, between=between)
        if prepared.model is None:
            return uncached
        try:
            key = key_of(prepared.model, options=options, device=device)
        except Exception as error:
            _uncached(error)
            return uncached
        return Cache.open(key, device, ranks, place=self.cache, shared=self.shared, patience=patience, between=between)

    @contextmanager
    def first_step(self, model: nn.Module, batch: Any, cache: Uncached) -> Iterator[None]:
        """See how the parts are called in the first step, on `batch`, and keep that for the next start, with the code.

        From then on what is compiled later, and for which sizes, is kept as well.
        """
        with recording(self.parts(model)) as seen:
            yield
        if seen:
            cache.learn(CALLS, Recorded.of(batch, seen).to_data())
        # At a compile, on the thread that compiled.
        watch(lambda sizes: cache.learn(SIZES, sizes.to_data()), cache.known.sizes)
        cache.keep()

    def use_sizes(self, cache: Uncached) -> None:
        """Let what this thread compiles from now on be for all sizes that varied, if `dynamic` is `recorded`."""
        if self.dynamic == "recorded" and cache.known.sizes is not None:
            apply(cache.known.sizes)

    def advice(self, model: nn.Module, cache: Uncached) -> str:
        """Return in one sentence what is known of the sizes that vary; empty if nothing is."""
        sizes = cache.known.sizes
        if sizes is None or not sizes.varying:
            return ""
        named = ", ".join(sizes.named(self.parts(model)))
        many = f"{len(sizes.varying)} sizes ({named})" if len(sizes.varying) > 1 else f"one size ({named})"
        if self.dynamic == "recorded":
            left = f", but {len(sizes.remaining)} also had 0 or 1, which compiles anew" if sizes.remaining else ""
            return f"compiled for every value of {many} that varied in an earlier run{left}"
        return (
            f"{many} varied in an earlier run, which compiled again for each: dynamic='recorded' compiles once, and so "
            f'does TORCH_COMPILE_DYNAMIC_SOURCES="{sizes.value}"'
        )

    def calls(
        self,
        model: nn.Module,
        device: Any,
        *,
        recorded: Recorded | None = None,
        loader: Any = None,
        twin: Twin | None = None,
    ) -> Examples:
        """Return what the parts are warmed up on (see `fast_batch.examples_for`), which is nothing if that fails.

        The batch is that of `self.batch`, else what `loader` says of it (see `fast_batch.HasBatchSchema`). `twin` is a
        copy of the model from before it was sharded; without one nothing else may change the model meanwhile.
        """
        import torch

        device = torch.device(device)
        try:
            user = self.examples(device) if self.examples is not None else None
            batch = batch_schema(self.batch(device)) if self.batch is not None else loader_schema(loader)
            return examples_for(self.parts, model, device, user=user, recorded=recorded, batch=batch, twin=twin)
        except Exception as error:
            warnings.warn(
                f"initopt: nothing was compiled ahead, as there are no examples for it ({first_line(error)}); all "
                "compiles at the first batch. Compare `examples` and `batch` of `Compile` with what the model takes",
                stacklevel=2,
            )
            return Examples()

    def warm_up(
        self,
        model: nn.Module,
        device: Any,
        examples: Examples | None = None,
        cache: Uncached | None = None,
        *,
        between: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> int:
        """Compile the parts that have examples, on the calling thread; return how many graphs that made.

        `examples` are those of `calls`, by default made now. A part's later examples are warmed up where all shapes are
        static. Elsewhere they would make the code of the first one dynamic, and the first batch would run that. `cache`
        has what earlier starts learned, and learns from this one.

        It comes in pieces: on a CPU what the C++ compiler and this host can do, then each part. `between` is called
        before each piece, and `say` with a few words on it.

        What fails here is left to the first batch, with one warning: there it fails as it would without a warm-up, or
        not.
        """
        import torch

        # Where nothing is compiled the examples would run for real, and leave traces.
        if torch._dynamo.config.disable:
            return 0
        examples = self.calls(model, device) if examples is None else examples
        if not examples.calls:
            return 0

        before = self.graphs()
        if torch.device(device).type == "cpu":
            between()
            say("looks what this CPU can do")
            with step("instruction_sets"):
                ask()
        parts = self.parts(model)
        unknown = [name for name in examples.calls if name not in parts]
        if unknown:
            raise ValueError(
                f"there is an example for {unknown[0]!r}, which is no part; the parts are {', '.join(parts)}"
            )
        cache = Uncached(Ranks(None, 0, 1)) if cache is None else cache
        sizes = cache.known.sizes if self.dynamic == "recorded" else None
        winners = cache.known.winners if self.tuning == "recorded" else None
        with applied(sizes) if sizes is not None else nullcontext(), pruned(winners) as tuning:
            for name, calls in examples.calls.items():
                between()
                say(f"compiles {name!r}")
                try:
                    for call in calls if self.dynamic is False else calls[:1]:
                        _compile(parts[name], call, self.ddp_bucket_mb)
                except _LeftTrace:
                    raise RuntimeError(
                        f"part {name!r} has nothing that torch compiles, so it ran for real in the warm-up and changed "
                        "its own attributes: the training would not be stock's. Leave it out of the parts"
                    ) from None
                except Exception as error:
                    warnings.warn(
                        f"initopt: part {name!r} was not compiled ahead ({first_line(error)}); "
                        "it compiles at the first batch. Compare its example with what the model passes it",
                        stacklevel=2,
                    )
        cache.tuned = tuning.tuned
        if tuning.tuned:
            cache.learn(WINNERS, tuning.winners().to_data())
        return self.graphs() - before

    @staticmethod
    def graphs() -> int:
        """How many graphs torch's compiler has made in this process."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])


def _compile(part: Callable[..., Any], call: Call, ddp_bucket_mb: float | None) -> None:
    import torch
    from torch._functorch import config

    # What torch doesn't compile runs for real: modules of torch itself as a part, and what stands before a graph break.
    # There is no public way to ask for the first.
    if torch._dynamo.trace_rules.check(getattr(part, "forward", part)):
        raise ValueError(f"torch compiles nothing of a part that is a {type(part).__name__}")
    with ExitStack() as stack:
        stack.enter_context(_warming())
        if ddp_bucket_mb is not None:
            stack.enter_context(_in_ddp(int(ddp_bucket_mb * 2**20)))
        stack.enter_context(torch._dynamo.error_on_graph_break(True))
        if call.modes is not None:
            stack.enter_context(call.modes.entered())
        stack.enter_context(config.patch(force_non_lazy_backward_lowering=torch.is_grad_enabled()))
        before = _attributes(part)
        try:
            part(*call.args, **call.kwargs)
        except _Compiled:
            return
    # There was no graph in it, so it has run for real.
    if _attributes(part) != before:
        raise _LeftTrace


def _uncached(error: Exception) -> None:
    warnings.warn(
        f"initopt: compiled code is neither looked up nor kept, as what it depends on could not be found out "
        f"({first_line(error)}); the start-up compiles as without a cache",
        stacklevel=3,
    )


def _attributes(part: Any) -> list[tuple[str, Any]]:
    """The plain attributes of the modules of a part, and how often its tensors were changed."""
    import torch

    found: list[tuple[str, Any]] = []
    for path, module in part.named_modules() if isinstance(part, torch.nn.Module) else ():
        values = {**vars(module), **module._parameters, **module._buffers}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                found.append((f"{path}.{name}", value._version))
            elif value is None or isinstance(value, bool | int | float | str):
                found.append((f"{path}.{name}", value))
    return found


class _LeftTrace(Exception):
    """A part that torch compiles nothing of has changed itself in the warm-up."""


class _Compiled(Exception):
    """Raised in place of running compiled code in a warm-up."""


class _Backend:
    """Inductor, with code that raises `_Compiled` where it would run in a thread that warms up."""

    def __init__(self, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> None:
        import torch

        # The object that torch.compile makes of its arguments; there is no public way to pass `mode` to a backend.
        self._inductor = torch._TorchCompileInductorWrapper(mode, options, dynamic)  # type: ignore[no-untyped-call]

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        from torch._subclasses import FakeTensor

        compiled = self._inductor(graph, inputs)

        def run(*arguments: Any) -> Any:
            # A piece of a graph that was cut for DDP is called while the next one is compiled, without data.
            if getattr(_here, "warming", False) and not any(isinstance(one, FakeTensor) for one in arguments):
                raise _Compiled
            return compiled(*arguments)

        return run


@contextmanager
def _in_ddp(bucket_bytes: int) -> Iterator[None]:
    """Let this thread compile as inside of the forward pass of a DistributedDataParallel, which is not there yet.

    The order in which gradients come, and so how they are added up, depends on where a graph is cut.
    """
    from torch.nn.parallel import DistributedDataParallel

    # All that the compiler asks it for.
    stand_in = SimpleNamespace(bucket_bytes_cap=bucket_bytes)
    with on_this_thread(DistributedDataParallel, "_get_active_ddp_module", lambda: stand_in):
        yield


@contextmanager
def _warming() -> Iterator[None]:
    # Tracing saves the default generators and puts them back, which would undo what other threads draw meanwhile. It
    # draws nothing itself, so this thread's putting back can be left out.
    import torch

    restores: list[tuple[ModuleType, str]] = [(random, "setstate"), (torch.random, "set_rng_state")]
    restores += [(torch, "set_rng_state"), (torch.cuda, "set_rng_state")]
    with ExitStack() as stack:
        for module, name in restores:
            stack.enter_context(on_this_thread(module, name, _left_out))
        _here.warming = True
        try:
            yield
        finally:
            _here.warming = False


def _left_out(*_: Any, **__: Any) -> None:
    pass
