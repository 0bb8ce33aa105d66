"""What every test starts from: no run root, no launcher's variables from the shell, a signing key of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# An example that takes long on a busy machine is no failure.
settings.register_profile("initopt", deadline=None)
settings.load_profile("initopt")


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A shell that starts pytest in the background lets it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INITOPT_ROOT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    # Else the first compile would make a key file in the home of who runs the tests.
    monkeypatch.setenv("INITOPT_CACHE_KEY", "the secret of initopt's own tests, which is none")
