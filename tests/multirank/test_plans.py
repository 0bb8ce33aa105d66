"""Plans on real ranks: those that the check accepts look up the right rows; those that it refuses here look up others.

That is the worse half of what it refuses: TorchRec raises no error for them.
"""

from __future__ import annotations

import json

import pytest

from tests.multirank.launch import launch
from tests.plans import KINDS

WRONG_AND_SILENT = {"row_wise in another order", "uneven row_wise of TorchRec", "grid_shard of larger hosts"}


@pytest.mark.timeout(300)
def test_what_is_accepted_is_looked_up_right() -> None:
    job = launch(["-m", "tests.multirank.planned"], ranks=4, env={"LOCAL_WORLD_SIZE": "2"}, timeout=150).check()
    for rank in job.ranks:
        results = json.loads(rank.stdout.splitlines()[-1])
        assert {name for name, (accepted, right) in results.items() if not accepted} == WRONG_AND_SILENT
        assert {name for name, (accepted, right) in results.items() if not right} == WRONG_AND_SILENT
        assert {f"{kind} of bags" for kind in KINDS} < results.keys()
