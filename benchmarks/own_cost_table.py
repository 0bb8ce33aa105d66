"""The saved figures of what initopt itself costs, as the table in README.md: `python -m benchmarks.own_cost_table`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SAVED = Path(__file__).parent / "results" / "own_cost.json"


def table(saved: dict[str, Any]) -> str:
    """A Markdown table of the median and least time of every measurement, and per step or call where there are many."""
    machine = saved["machine_info"]
    lines = [
        f"Measured {saved['datetime'][:10]} at {saved['commit_info']['id'][:7]} on {machine['cores']} cores "
        f"({machine['cpu']}, {machine['system']}, Python {machine['python_version']}), nothing emulated, "
        f"load over 15 minutes {machine['load_over_15_minutes']}.",
        "",
        "| what | who | median | least | median per step or call |",
        "|---|---|---:|---:|---:|",
    ]
    for measured in sorted(saved["benchmarks"], key=lambda one: str(one["group"])):
        stats, extra = measured["stats"], measured["extra_info"]
        each = next((f"{value:,.1f} us" for name, value in extra.items() if name.startswith("us_per_")), "")
        who = measured["name"].removeprefix("test_")
        lines.append(f"| {measured['group']} | {who} | {_time(stats['median'])} | {_time(stats['min'])} | {each} |")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.2f} ms"


if __name__ == "__main__":
    print(table(json.loads(SAVED.read_text())))
