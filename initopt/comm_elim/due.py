"""Whether TorchRec would meet anybody while it makes a model, so that there is something to leave out.

Where it would not, comparing what ranks assume would only add a meeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

_ALONE = ("table_wise", "column_wise", "row_wise")
"""How tables of an EmbeddingBagCollection are sharded without a meeting."""


def due(model: nn.Module, plan: Any, sharders: Sequence[Any]) -> str:
    """Return the first thing for which ranks meet when this is made with TorchRec's own wrapper; empty if none does."""
    from torchrec.distributed import collective_utils
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    # Not in every version.
    if not getattr(collective_utils, "_INITIALIZED", False):
        return "the validation flag"
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
    inside = tuple(f"{path}." for path in taken)
    return next((name for name, _ in model.named_parameters() if not name.startswith(inside)), "")
