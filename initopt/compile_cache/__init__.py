"""Compiled once: kept, shared between ranks and starts, and made before the first batch is there.

`warmup` compiles ahead, on what `calls` or `fast_batch` say (described by `schema`); `cache` finds, shares and keeps the
code: its `key`, the `store` with `bundle` and `authenticity`, the `leader` and the `meeting` of the ranks on a `board`.
"""
