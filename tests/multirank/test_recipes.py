"""The recipes for clusters, as they are documented: their own lines, with the counts and addresses of this machine.

Processes play the nodes, and the trainers are those of Lightning and torchtnt with their callbacks: one run has all
ranks, and each step once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from initopt.chain import finished_ranks
from initopt.runs import Run
from tests.multirank.launch import MARK, REPOSITORY, free_port, marked
from tests.programs import program

RECIPES = REPOSITORY / "docs" / "recipes"

LIGHTNING = """
import json, os, sys
import torch
import pytorch_lightning as pl
from initopt.plugins.lightning import StartUp

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, number):
        self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

loader = torch.utils.data.DataLoader(torch.arange(24.0).reshape(8, 3), batch_size=2)
quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
module = Module()
assert sys.argv[1:] == ["--lr", "1"]
nodes = {"accelerator": "cpu", "devices": 1, "num_nodes": int(os.environ["WORLD_SIZE"]), "strategy": "ddp"}
pl.Trainer(max_epochs=2, callbacks=[StartUp()], **nodes, **quiet).fit(module, loader, loader)
found = {"local": os.environ["LOCAL_WORLD_SIZE"], "weights": module.layer.weight.tolist()}
sys.stdout.write(json.dumps(found) + "\\n")
"""

TORCHTNT = """
import json, os, sys
import torch
from torch import distributed
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.train import train
from initopt.plugins.torchtnt import StartUp

class Unit(AutoUnit):
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.01), None

    def compute_loss(self, state, data):
        return self.module(data).square().mean(), None

distributed.init_process_group("gloo")
loader = torch.utils.data.DataLoader(torch.arange(24.0).reshape(8, 3), batch_size=2)
unit = Unit(module=torch.nn.Linear(3, 1), device=torch.device("cpu"))
train(unit, loader, max_epochs=2, callbacks=[StartUp()])
sys.stdout.write(json.dumps({"local": os.environ["LOCAL_WORLD_SIZE"]}) + "\\n")
distributed.destroy_process_group()
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (RECIPES / page).read_text(), flags=re.DOTALL)


def run(folder: Path, command: Sequence[str], env: Mapping[str, str]) -> str:
    """What the command printed. Nothing that it has started is left."""
    job = uuid.uuid4().hex
    shared = {**os.environ, **env, MARK: job, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    shared["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        command, cwd=folder, env=shared, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=120)
    finally:
        for pid in (process.pid, *marked(job)):
            if process.returncode is None or pid != process.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def machine(folder: Path, trainer: str, *, nodes: int = 1, tasks: int = 1) -> None:
    """A folder with the script and, in front of the machine's own, the programs of a cluster of so many nodes."""
    folder.mkdir()
    (folder / "train.py").write_text(trainer)
    program(folder, "python", f'exec {sys.executable} "$@"')
    program(folder, "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    program(folder, "scontrol", "echo 127.0.0.1; echo 127.0.0.2")
    program(
        folder,
        "srun",
        f"""while [[ $1 == -* ]]; do shift; done
for ((i = 0; i < {nodes * tasks}; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$((i % {tasks})) "$@" &
    started+=($!)
done
for one in "${{started[@]}}"; do wait "$one" || failed=1; done
exit "${{failed:-0}}\"""",
    )


def slurm(folder: Path, *, tasks: int) -> dict[str, str]:
    return {
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": str(2 * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_CPUS_PER_TASK": "1",
    }


def slurm_job(folder: Path) -> str:
    """Two nodes of one rank each."""
    machine(folder, LIGHTNING, nodes=2)
    text = blocks("slurm.md", "bash")[0]
    assert text.count("--nproc-per-node=8") == text.count(":29500") == 1
    text = text.replace("--nproc-per-node=8", "--nproc-per-node=1").replace(":29500", f":{free_port()}")
    (folder / "job.sh").write_text(text)
    return run(folder, ["bash", "job.sh"], slurm(folder, tasks=1))


def kubernetes_job(folder: Path) -> str:
    """One pod of one rank."""
    machine(folder, TORCHTNT)
    [container] = pods()["containers"]
    words = [*container["command"], *container["args"]]
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=train-0.train:29500"} <= set(words)
    here = {
        "--nnodes=2": "--nnodes=1",
        "--nproc-per-node=8": "--nproc-per-node=1",
        "--rdzv-endpoint=train-0.train:29500": f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    }
    env = {each["name"]: each["value"].replace("/runs", str(folder), 1) for each in container["env"]}
    return run(folder, [str(folder / words[0]), *(here.get(word, word) for word in words[1:])], env)


def pods() -> dict[str, Any]:
    _, job = yaml.safe_load_all(blocks("kubernetes.md", "yaml")[0])
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, list[dict[str, Any]]]]:
    """Both jobs at once: most of their time is imports."""
    folder = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor() as pool:
        started = {job: pool.submit(job, folder / job.__name__) for job in (slurm_job, kubernetes_job)}
        printed = {job.__name__: future.result() for job, future in started.items()}
    return {
        name: (
            Run.latest(folder / name / ".initopt"),
            # Two ranks may print into one line.
            [json.loads(found) for found in re.findall(r"\{.*?\}", text)],
        )
        for name, text in printed.items()
    }


def steps(run: Run, rank: int) -> list[str]:
    spans = sorted((span for span in run.of_rank(rank) if span.kind == "step"), key=lambda span: span.start)
    return [span.name for span in spans if "train.py:" not in span.name and span.name != "model"]


def test_several_nodes_write_into_one_run(jobs: dict[str, tuple[Run, list[dict[str, Any]]]]) -> None:
    run, printed = jobs["slurm_job"]
    assert [path.name for path in run.path.parent.iterdir() if path.name.isdigit()] == ["0001"]
    assert sorted(path.name for path in run.path.glob("rank*")) == ["rank00000.jsonl", "rank00001.jsonl"]
    assert finished_ranks(run) == [0, 1]
    assert [line["local"] for line in printed] == ["1", "1"]
    assert printed[0]["weights"] == printed[1]["weights"]


def test_lightning_on_two_ranks_under_the_recorder(jobs: dict[str, tuple[Run, list[dict[str, Any]]]]) -> None:
    run, _ = jobs["slurm_job"]
    for rank in (0, 1):
        # The check's loader and batch are in it; what is trained comes after it.
        assert steps(run, rank) == [
            "process_group",
            "rendezvous",
            "setup",
            "sanity_check",
            "loader",
            "first_batch",
            "train_loader",
            "loader",
            "first_batch",
            "first_step",
        ]
        inside = {span.name: span.step for span in run.of_rank(rank) if span.start > 0}
        assert inside["_sync_module_states"] == "setup"
        assert {span.step for span in run.of_rank(rank) if span.name == "loader"} == {"sanity_check", "train_loader"}


def test_torchtnt_under_the_recorder(jobs: dict[str, tuple[Run, list[dict[str, Any]]]]) -> None:
    run, printed = jobs["kubernetes_job"]
    assert finished_ranks(run) == [0]
    assert [line["local"] for line in printed] == ["1"]
    assert steps(run, 0) == ["process_group", "rendezvous", "first_batch", "loader", "first_step"]


def test_the_pods_find_each_other_and_share_the_folder() -> None:
    service, job = yaml.safe_load_all(blocks("kubernetes.md", "yaml")[0])
    name = job["metadata"]["name"]
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"job-name": name}
    assert pods()["subdomain"] == service["metadata"]["name"]
    [container] = pods()["containers"]
    assert f"--nnodes={job['spec']['completions']}" in container["args"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert f"--rdzv-endpoint={name}-0.{pods()['subdomain']}:29500" in container["args"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in container["args"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pods()["volumes"]}
    [root] = [each["value"] for each in container["env"] if each["name"] == "INITOPT_ROOT"]
    assert Path(root).parent == Path(mounts["runs"])


def test_one_task_a_rank_has_what_torchrun_would_set(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    machine(folder, "", nodes=2, tasks=2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "INITOPT_ROOT")
    shown = " ".join(f"${name}" for name in names)
    program(folder, "python", f'echo "$@ {shown}"')
    (folder / "job.sh").write_text(blocks("slurm.md", "bash")[1])
    printed = run(folder, ["bash", "job.sh"], slurm(folder, tasks=2))
    assert sorted(printed.splitlines()) == [
        f"-m initopt.run train.py --lr 1 {rank} {rank % 2} 4 2 127.0.0.1 29500 {folder}/.initopt" for rank in range(4)
    ]


def test_the_shell_parts_are_bash() -> None:
    for page in RECIPES.glob("*.md"):
        for text in blocks(page.name, "bash"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
