"""What every test starts from: no run root, no launcher's variables from the shell, a signing key of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# An example that takes long on a busy machine is no failure.
settings.register_profile("initopt", deadline=None)
settings.load_profile("initopt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fork ranks come first: once this process has compiled it has threads, and a fork waits for them."""
    items.sort(key=lambda item: not hasattr(getattr(item, "module", None), "fork_ranks"))


@pytest.fixture(autouse=True)
def _signals_are_heard() -> Iterator[None]:
    """A shell that starts pytest in the background, or nohup, lets it ignore Ctrl-C and other signals."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INITOPT_ROOT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    # Else the first compile would make a key file in the home of who runs the tests.
    monkeypatch.setenv("INITOPT_CACHE_KEY", "the secret of initopt's own tests, which is none")
