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
        @build
        class Model:
            pass
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
