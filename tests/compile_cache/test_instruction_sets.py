"""What the compiler can build for this CPU, known from a record: the same answers, keys and code, without asking."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from initopt.compile_cache import instruction_sets
from initopt.compile_cache.instruction_sets import candidates, know, verdicts

pytestmark = pytest.mark.timeout(300)

# Prints the answers and what was picked, with each record or without one, how many children that took, and whether the
# code was a hit. In a process of its own both times: compiled within pytest the same function got another key.
FRESH = """
import json, subprocess, sys
import torch
from torch._inductor import cpu_vec_isa
from initopt.compile_cache.instruction_sets import know, verdicts

started = 0
begin = subprocess.Popen.__init__
def counted(*args, **kwargs):
    global started
    started += 1
    begin(*args, **kwargs)
subprocess.Popen.__init__ = counted

def forget():
    for isa in cpu_vec_isa.supported_vec_isa_list:
        for kind in type(isa).__mro__:
            for one in vars(kind).values():
                getattr(one, "cache_clear", lambda: None)()
        vars(isa).pop("_is_avx512_bf16_supported", None)
        vars(isa).pop("_is_amx_fp16_supported", None)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()

def picked():
    isa = cpu_vec_isa.pick_vec_isa()
    extra = getattr(isa, "is_avx512_bf16_supported", lambda: False)()
    return [str(isa), isa.build_arch_flags(), extra, len(cpu_vec_isa.valid_vec_isa_list())]

found = []
for recorded in json.loads(sys.argv[1]):
    forget()
    assert know(recorded)
    found.append(picked())
    assert verdicts() == recorded
asked = verdicts()
found = found or [picked()]
children = started
result = torch.compile(lambda x: (x.exp() * 2 + 1).sum(), dynamic=False)(torch.arange(64.0)).item()
from torch._dynamo.utils import counters
print(json.dumps([asked, found, children, started > children, dict(counters["inductor"]), result]))
"""


def fresh(*records: Mapping[str, bool]) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(records)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_what_is_known_gives_the_same_code_and_starts_no_process(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not candidates():
        pytest.skip("this CPU has no instruction set to ask for")
    # The folder of the other tests of compiling: what they built is found there.
    folder = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    asked, (stock,), children, _, _, result = fresh()
    keys = sorted(folder.rglob("fxgraph/*/*/*"))
    assert children and keys

    # Without the widest, without any, and last as it is, which the compile finds.
    widest = str(candidates()[0])
    without = {name: it and name != widest and not name.startswith(f"{widest} with") for name, it in asked.items()}
    _, (narrower, none, same), children, counts, counters, theirs = fresh(without, dict.fromkeys(asked, False), asked)
    assert same == stock and none[0] == "INVALID_VEC_ISA" and narrower[3] == same[3] - 1
    assert children == 0 and counts, "no process by knowing, though compiling starts some"
    assert counters == {"fxgraph_cache_hit": 1} and theirs == result
    assert keys == sorted(folder.rglob("fxgraph/*/*/*"))


class Isa:
    """An instruction set as inductor has them: its truth asks a compiler, and an extra is kept on the object."""

    _avx_code = "avx"
    _avx512_bf16_code = "bf16"
    _is_avx512_bf16_supported = False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __str__(self) -> str:
        return "wide"

    def check_build(self, code: str) -> bool:
        self.asked.append(code)
        return True

    def __bool__(self) -> bool:
        if self.check_build(self._avx_code):
            self._is_avx512_bf16_supported = self.check_build(self._avx512_bf16_code)
            return True
        return False


@pytest.fixture
def isa(monkeypatch: pytest.MonkeyPatch) -> Isa:
    one = Isa()
    monkeypatch.setattr(instruction_sets, "candidates", lambda: [one])
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    return one


RECORD = {"wide": True, "wide with avx512_bf16": True}


def test_the_record_answers_and_nothing_stays_replaced(isa: Isa) -> None:
    assert verdicts() == RECORD and isa.asked == ["avx", "bf16"]
    isa._is_avx512_bf16_supported = False
    assert know(RECORD) and isa._is_avx512_bf16_supported and isa.asked == ["avx", "bf16"]
    assert know({"wide": True, "wide with avx512_bf16": False}) and not isa._is_avx512_bf16_supported
    assert "check_build" not in vars(isa)
    assert bool(isa) and isa.asked == ["avx", "bf16"] * 2


def test_a_failure_leaves_nothing_replaced(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Isa) -> bool:
        raise OSError("no memory")

    monkeypatch.setattr(Isa, "__bool__", fails)
    with pytest.raises(OSError, match="no memory"):
        know(RECORD)
    assert "check_build" not in vars(isa)


def test_another_thread_gets_the_true_answer(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: list[bool] = []

    def asks(self: Isa) -> bool:
        thread = threading.Thread(target=lambda: theirs.append(self.check_build("avx")))
        thread.start()
        thread.join()
        return self.check_build("avx")

    monkeypatch.setattr(Isa, "__bool__", asks)
    monkeypatch.setattr(
        Isa, "check_build", lambda self, code: threading.current_thread() is not threading.main_thread()
    )
    assert know({"wide": False, "wide with avx512_bf16": False})
    assert theirs == [True]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"wide": True},
        {**RECORD, "wider": True},
        {"wide": True, "wide with amx_fp16": True},
        {**RECORD, "wide": 1},
        {**RECORD, "wide": "yes"},
    ],
)
def test_a_record_of_another_cpu_or_torch_is_refused(isa: Isa, record: Mapping[str, Any]) -> None:
    assert not know(record) and not isa.asked and not isa._is_avx512_bf16_supported


def test_a_record_with_what_this_cpu_lacks_is_refused(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert not know(RECORD)
    assert know({"wide": True})


def test_what_the_user_has_set_stands(isa: Isa) -> None:
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": True}):
        assert not know(RECORD)


def test_hands_off_a_torch_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    monkeypatch.delattr(cpu_vec_isa, "x86_isa_checker")
    assert candidates() == [] and verdicts() == {} and not know({}) and not know({"avx2": True})


def test_hands_off_an_object_that_is_not_known(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Isa, "check_build")
    assert not know(RECORD)
