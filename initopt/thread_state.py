"""What Python and torch keep per thread, so that a new lane would lose it: grad mode, autocast, default device, ..."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


class ThreadState:
    """The state of the thread that makes this object, to be used by other threads.

    Lost without it (measured on torch 2.13): grad mode, inference mode, autocast, the default device, and every setting
    that torch keeps in a context variable, such as the configuration of its compiler.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._torch = _TorchState(sys.modules["torch"]) if "torch" in sys.modules else None

    def call(self, function: Callable[[], Result]) -> Result:
        """Call `function` in the current thread as if it were the thread that made this object."""

        def inside() -> Result:
            if self._torch is None:
                return function()
            with self._torch.applied():
                return function()

        return self._context.copy().run(inside)


class _TorchState:
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.device = torch.get_default_device()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def applied(self) -> Iterator[None]:
        torch = self.torch
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=True, cache_enabled=self.autocast_cache)
                    )
            yield
