"""What a saved measurement keeps: figures, kind of machine and its load; no host name, no list of single timings."""

from __future__ import annotations

import os
from typing import Any


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    kept = {
        "cpu": machine_info["cpu"].get("brand_raw", ""),
        "cores": os.cpu_count(),
        "system": machine_info["system"],
        "python_version": machine_info["python_version"],
    }
    machine_info.clear()
    machine_info.update(kept)


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    output_json["machine_info"]["load_over_15_minutes"] = round(os.getloadavg()[2], 1)
    for measured in output_json["benchmarks"]:
        measured["stats"].pop("data", None)
