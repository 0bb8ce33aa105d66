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


def test_imports_of_the_main_program_are_not_missed() -> None:
    found = prefix("""
        import torch
        if __name__ == "__main__":
            import wandb
            main()
    """)
    assert (words(found), found.rest) == (["import torch"], ())
