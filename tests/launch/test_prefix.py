"""Which statements of a script run before the ranks are there, and which imports are left to them."""

from __future__ import annotations

import ast
import textwrap

import pytest

from initopt.launch.prefix import Prefix, prefix_of


def prefix(text: str) -> Prefix:
    return prefix_of(textwrap.dedent(text), "train.py")


def words(found: Prefix) -> list[str]:
    return [ast.unparse(statement) for statement in found.statements]


def test_imports_and_what_they_depend_on() -> None:
    found = prefix('''
        """A trainer."""
        from __future__ import annotations
        import os, sys
        from dataclasses import dataclass, field
        from pathlib import Path
        HERE = Path(__file__).resolve().parent
        sys.path.insert(0, str(HERE / "lib"))
        os.environ["MKL_NUM_THREADS"] = "1"
        os.environ.setdefault("TORCH_LOGS", "")
        warnings.filterwarnings("ignore", category=UserWarning)
        if TYPE_CHECKING:
            import only_for_types
        def build():
            import later
        @dataclass(frozen=True)
        class Model:
            parts: list[str] = field(default_factory=list)
        logger = logging.getLogger(__name__)
        import torch
        try:
            import fast
        except ImportError:
            fast = None
    ''')
    assert words(found)[-1].startswith("try:")
    assert "import torch" in words(found)
    assert "import only_for_types" not in str(words(found))
    assert "later" not in str(words(found))
    assert found.rest == ()


@pytest.mark.parametrize(
    "statement",
    [
        "setup()",
        "os.environ['PLACE'] = find()",
        "matplotlib.use('Agg')",
        "torch.backends.cudnn.benchmark = True",
        "if fast:\n    import other",
        "for name in names:\n    __import__(name)",
        "with quiet():\n    import other",
        "try:\n    import other\nexcept ImportError:\n    setup()",
        "numbers = [draw() for _ in range(3)]",
        "sys.path.insert(0, find())",
        "del os.environ['PLACE']",
        "assert setup()",
    ],
)
def test_it_ends_where_something_else_runs(statement: str) -> None:
    found = prefix_of(f"import torch\n{statement}\nimport numpy\nfrom a.b import c\n", "train.py")
    assert words(found) == ["import torch"]
    assert found.stopped == 2
    assert found.rest[-2:] == ("numpy", "a.b")


DEFINITIONS = """
from __future__ import annotations
import enum, functools, torch
from typing import Generic, NamedTuple
from torch.distributed.elastic.multiprocessing.errors import record
class Kind(enum.Enum):
    A = enum.auto()
class Pair(NamedTuple):
    first: int = 1
class Net(torch.nn.Module, Generic[int]):
    name = Kind.A
    @property
    def size(self): return setup()
    @size.setter
    def size(self, value): setup()
    make = lambda self: setup()
class Deep(Net):
    '''Deeper.'''
@functools.lru_cache(maxsize=None)
def cached(x: Undefined = 1, *more: setup(), key=lambda: setup()): setup()
@record
def main(): os.environ["PLACE"] = find()
"""


def test_definitions_that_do_nothing_else_are_walked_past() -> None:
    found = prefix_of(f"{DEFINITIONS}import numpy\n", "train.py")
    assert not found.stopped
    assert words(found)[-2:] == [
        "from torch.distributed.elastic.multiprocessing.errors import record",
        "import numpy",
    ]


@pytest.mark.parametrize(
    "definition",
    [
        "@build\ndef main(): pass",
        "class Place:\n    os.environ['PLACE'] = '1'",
        "class Place:\n    name = setup()",
        "class Place(mine.Base): pass",
        "from mine import *\nclass Place(Base): pass",
        "class Place(metaclass=mine.Meta): pass",
        "@mine.setter\ndef main(): pass",
        "class Place(torch.nn.Module, name=setup()): pass",
        "def main(place=setup()): pass",
        "def main(place: setup()): pass",
        "def main() -> setup(): pass",
        "class Place:\n    @mine.build\n    def name(self): pass",
        "import mine as dataclasses\n@dataclasses.dataclass\nclass Place: pass",
        "def property(function): setup()\n@property\ndef main(): pass",
        "class Kind(enum.Enum):\n    A = 1\n    def __init__(self, value): setup()",
        "class Kind(enum.Enum):\n    A = enum.auto()\n    def _generate_next_value_(*_): setup()",
        "class Kind(enum.Enum):\n    def __init__(self, value): setup()\nclass Own(Kind):\n    A = 1",
        "class Kind(enum.Enum): pass\nclass Own(Kind):\n    A = 1\n    def __new__(cls, v): setup()",
        "class Mixed:\n    def __init__(self, value): setup()\nclass Kind(Mixed, enum.Enum):\n    A = 1",
        "class Path:\n    def __set_name__(self, *_): setup()\nclass Place:\n    path = Path()",
        "class Place:\n    path = mine.path",
        "path = mine.path\nclass Place:\n    path = path",
        "class Base:\n    def __class_getitem__(cls, item): setup()\nclass Place(Base[int]): pass",
        "class Base:\n    def __class_getitem__(cls, item): setup()\nclass Place:\n    one: Base[int] = 1",
        "class Base:\n    def __init_subclass__(cls): setup()\nclass Place(Base): pass",
        "@functools.lru_cache(setup())\ndef main(): pass",
        "try:\n    import fast\n    sys.path.append('lib')\nexcept ImportError: pass",
    ],
)
def test_definitions_that_may_do_more_end_it(definition: str) -> None:
    found = prefix_of(f"import enum, functools, mine, torch\n{definition}\nimport numpy\n", "train.py")
    assert "import numpy" not in words(found)
    assert found.rest[-1] == "numpy"


@pytest.mark.parametrize(
    "text",
    [
        "import initopt\ninitopt.record_imports()",
        "import initopt as start\nstart.record_imports()",
        "from initopt import record_imports\nrecord_imports()",
    ],
)
def test_recording_imports_is_left_to_the_ranks(text: str) -> None:
    found = prefix_of(f"{text}\nimport torch\n", "train.py")
    assert words(found) == [text.splitlines()[0], "import torch"]
    assert not found.stopped


@pytest.mark.parametrize("text", ["record_imports()", "import initopt\ninitopt.Recorder('x')"])
def test_what_only_looks_like_it_is_not(text: str) -> None:
    found = prefix_of(f"{text}\nimport torch\n", "train.py")
    assert found.rest == ("torch",)


def test_what_torchrun_sets_is_left_to_the_ranks() -> None:
    found = prefix_of(
        "import os\nos.environ.setdefault('RANK', '0')\nos.environ['MASTER_PORT'] = '1'\n"
        "os.environ['PLACE'] = '2'\nimport torch\n",
        "train.py",
    )
    assert words(found) == ["import os", "os.environ['PLACE'] = '2'", "import torch"]


@pytest.mark.parametrize(
    "setting",
    [
        "sys.path.insert(0, 'lib')",
        "os.environ['PLACE'] = find()",
        "if deep:\n    sys.path[0:0] = ['lib']",
        "sys.path += ['lib']",
        "del os.environ['PLACE']",
        "with quiet():\n    warnings.simplefilter('ignore')",
    ],
)
def test_imports_after_a_later_setting_depend_on_it(setting: str) -> None:
    found = prefix_of(f"print(os.environ.get('A'))\nimport numpy\n{setting}\nimport mine\n", "train.py")
    assert (found.rest, found.early, found.sets) == (("numpy", "mine"), ("numpy",), 3)


def test_imports_of_the_main_program_are_not_missed() -> None:
    found = prefix("""
        import torch
        if __name__ == "__main__":
            import wandb
            main()
    """)
    assert (words(found), found.rest) == (["import torch"], ())
