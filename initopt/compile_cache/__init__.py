"""Compiled once: kept, shared between ranks and starts, and made before the first batch is there.

`warmup` compiles ahead, on what `calls` or `fast_batch` say (described by `schema`). `cache` finds, shares and keeps
the code: by its `key`, in a `store` of signed (`authenticity`) files (`bundle`), made by a `leader`, with a `meeting`
afterwards. `known` is what else is kept: calls, sizes (`dynamic_shapes`), kernels (`autotune`).
"""
