"""A plugin that does not fit is refused where it is registered, in its author's terms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from initopt import Startup, plugins
from initopt.plugins import PluginError, hookimpl


@pytest.fixture
def manager() -> pluggy.PluginManager:
    made = pluggy.PluginManager("initopt")
    made.add_hookspecs(plugins.Hooks)
    return made


def refused(manager: pluggy.PluginManager, plugin: object) -> str:
    with pytest.raises(PluginError) as caught:
        plugins.register(manager, plugin, "mine")
    assert manager.get_plugins() == set()
    return str(caught.value)


class Unknown:
    @hookimpl
    def initopt_lane_contex(self, lane: str) -> None: ...


class FarOff:
    @hookimpl
    def initopt_zzz(self) -> None: ...


class Unmarked:
    def initopt_declare(self, startup: object) -> None: ...


class WrongArgument:
    @hookimpl
    def initopt_step_ended(self, step: object) -> None: ...


class Fits:
    initopt_note = "no function"

    @hookimpl
    def initopt_run_ended(self) -> None: ...


def test_an_unknown_hook_comes_with_its_place_and_a_hint(manager: pluggy.PluginManager) -> None:
    line = Unknown.initopt_lane_contex.__code__.co_firstlineno
    assert refused(manager, Unknown()) == (
        f"{Path(__file__)}:{line}: plugin 'mine' implements 'initopt_lane_contex', which is not a hook "
        "(did you mean 'initopt_lane_context'?)"
    )


def test_a_hook_like_none_comes_with_all_of_them(manager: pluggy.PluginManager) -> None:
    assert refused(manager, FarOff()).endswith(
        "(the hooks are initopt_declare, initopt_lane_context, initopt_step_ended, initopt_run_ended)"
    )


def test_an_unmarked_hook_is_not_left_out_in_silence(manager: pluggy.PluginManager) -> None:
    text = refused(manager, Unmarked())
    assert "'initopt_declare' of plugin 'mine' is not marked; write @initopt.plugins.hookimpl above it" in text
    assert text.startswith(f"{Path(__file__)}:")


def test_an_argument_that_the_hook_does_not_give(manager: pluggy.PluginManager) -> None:
    assert refused(manager, WrongArgument()).endswith(
        "'initopt_step_ended' of plugin 'mine' takes 'step', but the hook gives span"
    )


def test_a_plugin_may_take_fewer_arguments(manager: pluggy.PluginManager) -> None:
    plugins.register(manager, Fits(), "mine")
    assert manager.get_plugin("mine") is not None


@contextmanager
def entry_points(monkeypatch: pytest.MonkeyPatch, *points: metadata.EntryPoint) -> Iterator[None]:
    def found(*, group: str) -> list[metadata.EntryPoint]:
        assert group == plugins.GROUP == "initopt.plugins"
        return list(points)

    plugins.installed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "entry_points", found)
        yield
    plugins.installed.cache_clear()


def point(name: str, value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name, value, plugins.GROUP)


def test_an_entry_point_that_can_not_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        entry_points(monkeypatch, point("mine", "no_such_module")),
        pytest.raises(
            PluginError, match=r"plugin 'mine' of an unknown package can't be loaded from 'no_such_module': Mod"
        ),
    ):
        plugins.installed()


def test_an_entry_point_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(initopt_declare=lambda startup: None)
    monkeypatch.setitem(sys.modules, "my_plugin", module)  # type: ignore[arg-type]
    with (
        entry_points(monkeypatch, point("mine", "my_plugin")),
        pytest.raises(PluginError, match="'initopt_declare' of plugin 'mine' is not marked"),
    ):
        plugins.installed()


def test_entry_points_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_plugin", Fits())  # type: ignore[arg-type]
    with entry_points(monkeypatch, point("mine", "my_plugin")):
        manager = plugins.installed()
        assert plugins.installed() is manager
        assert [name for name, _ in manager.list_name_plugin()] == ["mine"]


def test_the_plugins_of_this_package_are_found() -> None:
    plugins.installed.cache_clear()
    assert {"cuda", "otel", "torchrec"} <= {name for name, _ in plugins.installed().list_name_plugin()}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_plugin_runs_the_steps_of_its_lanes(overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lane:
        def __init__(self) -> None:
            self.events: list[str] = []

        @hookimpl(tryfirst=True)
        def initopt_lane_context(self, lane: str) -> AbstractContextManager[object] | None:
            return self._inside() if lane == "io:mine" else None

        @contextmanager
        def _inside(self) -> Iterator[None]:
            self.events.append("in")
            yield
            self.events.append("out")

        @hookimpl
        def initopt_step_ended(self, span: Any) -> None:
            self.events.append(f"{span.name} ended")

    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))
    lane = Lane()
    plugins.register(plugins.installed(), lane, "lane")
    try:
        start = Startup("job")
        start.step(lambda: lane.events.append("step"), name="mine", lane="io:mine")
        start.step(lambda mine: lane.events.append("step"), name="other", lane="io:other")
        start.run(overlap=overlap)
    finally:
        plugins.installed().unregister(lane)
    assert lane.events == ["in", "step", "out", "mine ended", "step", "other ended"]
