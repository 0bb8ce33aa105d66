"""TorchEasyRec: which of its own functions are steps of a start-up.

    torchrun ... -m initopt.run -m tzrec.train_eval ARGS

Its planner, DistributedModelParallel, pipelines and loaders are called through torch's and TorchRec's own functions,
or inherit them, and are found by those. These are the steps around them that are TorchEasyRec's alone.

Written from the source of TorchEasyRec 1.3 (`tzrec/main.py` at 004e7f1, `datasets/dataset.py` at 03a4e56,
`utils/plan_util.py` at 0467638, `utils/dist_util.py` at 04b6421, `utils/checkpoint_util.py` at 03ef885) and tested
with a stand-in that has the same functions: it is in no package index. Of a version without one of them the others are
steps all the same.
"""

from __future__ import annotations

from initopt.plugins import NamedCall

VERSIONS = ("1.3.",)


def _call(module: str, function: str, step: str, stage: str) -> NamedCall:
    return NamedCall(f"tzrec.{module}", function, step, stage, version_of="tzrec.version", versions=VERSIONS)


CALLS = (
    _call("features.feature", "create_features", "features", "preproc_creation"),
    # The data set, its sampler's cluster, and the iterator, with its workers, of one loader.
    _call("datasets.dataset", "create_dataloader", "loader", "preproc_creation"),
    # With the constraints that a checkpoint's plan puts on a new one. The planning itself is `sharding_plan`.
    _call("utils.plan_util", "create_planner", "planner", "train_module_creation"),
    _call("utils.dist_util", "create_train_pipeline", "pipeline", "pre_train"),
    # The checkpoint's loads inside of it are steps of their own: they tell that the step before was thrown away.
    _call("utils.checkpoint_util", "restore_model", "restore", "pre_train"),
)
"""Read through the entry point `tzrec` of the group `initopt.calls`."""
