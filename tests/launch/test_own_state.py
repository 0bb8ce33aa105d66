"""Whatever way a module goes to the environment, it is noticed what it asks for."""

from __future__ import annotations

import os

import pytest

from initopt.launch.own_state import OF_A_RANK, EnvironmentUse

ONE = {
    "get": "os.environ.get('RANK', '0')",
    "function": "os.getenv('LOCAL_RANK')",
    "bytes of one": "os.getenvb(b'RANK')",
    "among bytes": "os.environb.get(b'LOCAL_RANK')",
    "path": "os.path.expandvars('$MASTER_ADDR')",
    "whether": "'WORLD_SIZE' in os.environ",
    "default": "os.environ.setdefault('RANK', '0')",
    "setting": "os.environ.update(RANK='0')",
    "deletion": "os.environ.pop('MASTER_PORT', None)",
}

ALL = {
    "comprehension": "{k.lower(): v for k, v in os.environ.items()}",
    "dict": "dict(os.environ)",
    "method": "os.environ.copy()",
    "union": "os.environ | {}",
    "names": "sorted(os.environ)",
    "values": "list(os.environ.values())",
    "text": "str(os.environ)",
    "deep copy": "__import__('copy').deepcopy(os.environ)",
    "print": "__import__('pprint').pformat(dict(os.environ))",
    "bytes": "dict(os.environb)",
    "another program": "__import__('subprocess').run(['true'], env=os.environ)",
}


@pytest.mark.parametrize("text", [*ONE.values(), *ALL.values()], ids=[*ONE, *ALL])
def test_who_asks_for_what_only_a_rank_has(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OF_A_RANK:
        monkeypatch.setenv(name, "0")
    with EnvironmentUse() as use:
        exec(f"import os\n{text}\nos.environ.get('HOME')", {"__name__": "asks"})
    (reason,) = use.reasons(OF_A_RANK)
    assert reason.startswith("asks uses ")
    assert ("all variables (" in reason) == (text in ALL.values())
    assert type(os.environ).__name__ == "_Environ"


def test_what_a_rank_shares_may_be_asked_for() -> None:
    with EnvironmentUse() as use:
        exec("import os\nos.environ.get('HOME'), os.getenv('PATH')", {"__name__": "asks"})
    assert not list(use.reasons(OF_A_RANK))
