"""Compiled once: kept, shared between ranks and starts, and made before the first batch is there."""

from initopt.compile_cache.calls import Call
from initopt.compile_cache.warmup import Compile

__all__ = ["Call", "Compile"]
