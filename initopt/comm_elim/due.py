"""Whether TorchRec would meet other ranks more than once while it makes a model, so that there is something to win.

Where it would not, comparing what ranks assume would only be another meeting. The flag is one (see `validation_flag`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

_ALONE = ("table_wise", "column_wise", "row_wise")
"""How tables of an EmbeddingBagCollection are sharded without a meeting."""


def due(model: nn.Module, plan: Any, sharders: Sequence[Any]) -> str:
    """Return the first thing, but for the flag, for which ranks meet when this is made; empty if they do for none.

    It is made with TorchRec's own wrapper. All ranks find the same if they hold the same model and plan.
    """
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    if plan is None:
        return "the sharding plan"
    kinds = {sharder.module_type for sharder in sharders}
    taken = {path: module for path, module in model.named_modules() if type(module) in kinds and path in plan.plan}
    for path, module in taken.items():
        if type(module) is not EmbeddingBagCollection:
            return f"{path}, which is of {type(module).__name__}"
        for config in module.embedding_bag_configs():
            planned = plan.plan[path].get(config.name)
            if planned is None or planned.sharding_type not in _ALONE or getattr(config, "use_virtual_table", False):
                return f"table {config.name!r}"
    inside = tuple(f"{path}." if path else "" for path in taken)
    return next((name for name, _ in model.named_parameters() if not name.startswith(inside)), "")
