"""The stock trainer in profile `cluster` with short waits, which also says how many collectives were delayed.

Its last line is that of the trainer with `delayed` (delays that the emulation made) and `executed` (collectives that
gloo itself has in its flight recorder, from Python and from C++) added.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch.distributed as dist

from benchmarks.trainers import dlrm_model, dlrm_stock, emulation, emulation_values

delays: list[float] = []
executed: list[str] = []


def main() -> None:
    parser = argparse.ArgumentParser()
    dlrm_model.add_arguments(parser)
    config = dlrm_model.config_from(parser.parse_args())

    emulation_values.RENDEZVOUS_SECONDS = 0.02
    emulation_values.FIRST_BATCH_SECONDS = 0.02
    count_delays()
    read_flight_recorder_before_it_goes()
    result = dlrm_stock.train(config)
    print(json.dumps({**result, "delayed": len(delays), "executed": len(executed)}))


def count_delays() -> None:
    delay = emulation.collective_seconds

    def counted(payload: int) -> float:
        delays.append(delay(payload))
        return delays[-1]

    emulation.collective_seconds = counted


def read_flight_recorder_before_it_goes() -> None:
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    destroy = dist.destroy_process_group

    def read(*args: Any) -> None:
        entries = json.loads(_dump_fr_trace_json()).get("entries", [])
        executed.extend(entry["profiling_name"] for entry in entries)
        destroy(*args)

    dist.destroy_process_group = read  # type: ignore[assignment]


if __name__ == "__main__":
    main()
