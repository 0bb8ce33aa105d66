"""Programs that stand before the machine's own, for command lines that are run as they are documented."""

from __future__ import annotations

from pathlib import Path


def program(folder: Path, name: str, text: str) -> None:
    """Put a bash script of this name there."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
