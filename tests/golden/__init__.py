"""What the views printed when they were last looked at, at 80 columns. INITOPT_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from pathlib import Path


def check_golden(name: str, text: str) -> None:
    """Compare `text` with the file `name` of this directory."""
    path = Path(__file__).with_name(name)
    if os.environ.get("INITOPT_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; look at it, then INITOPT_UPDATE_GOLDEN=1 pytest"
