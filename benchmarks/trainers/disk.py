"""Runs a trainer with the compiler's caches in a folder, one for all ranks or one for each, as on a host each.

    torchrun --standalone --nproc-per-node 2 benchmarks/trainers/disk.py own FOLDER dlrm_stock.py [OPTION ...]

Inductor's cache and its precompiled headers (which stand under the folder for temporary files) go to FOLDER, or with
`own` to FOLDER/RANK. What is not emulated: the ranks still share the machine's cores, and one page cache.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    disk, folder, trainer, *options = sys.argv[1:]
    if disk not in ("own", "shared"):
        sys.exit(f"disk.py: the disk is 'own' or 'shared', not {disk!r}")
    place = Path(folder).resolve() / (os.environ["RANK"] if disk == "own" else ".")
    # Loader workers make sockets in there; where one can't be made a batch is lost without an error.
    if len(str(place / "pymp-abcdefgh" / "listener-abcdefgh")) > 107:
        sys.exit(f"disk.py: {place} is too long a name for a folder with sockets in it: take a shorter one")
    place.mkdir(parents=True, exist_ok=True)
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(place), "TMPDIR": str(place)}
    script = Path(__file__).resolve().parent / trainer
    sys.argv = [str(script), *options]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
