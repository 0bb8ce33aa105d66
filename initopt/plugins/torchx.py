"""The TorchX component: `dist.ddp`, with each rank's start-up recorded.

    torchx run "$(python -m initopt.plugins.torchx)":ddp -j 2x8 --script train.py -- ARGS

TorchX finds a component of somebody else's by its file; that is what the command in the middle prints. torchrun remains
the engine: this is TorchX's own `dist.ddp` with `-m initopt.run` before the script. Tested with TorchX 0.7.0.

TorchX reads this file's text: it must keep the types and the docstring's form that TorchX knows.
"""

import warnings
from typing import Dict, List, Optional

import torchx
from torchx import specs
from torchx.components import dist

VERSIONS = ("0.7.",)


def ddp(
    *script_args: str,
    script: Optional[str] = None,
    m: Optional[str] = None,
    root: Optional[str] = None,
    until: Optional[str] = None,
    image: str = torchx.IMAGE,
    name: str = "/",
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    j: str = "1x2",
    env: Optional[Dict[str, str]] = None,
    max_retries: int = 0,
    rdzv_port: int = 29500,
    rdzv_backend: str = "c10d",
    mounts: Optional[List[str]] = None,
    debug: bool = False,
    tee: int = 3,
) -> specs.AppDef:
    """TorchX's dist.ddp, with the start-up of every rank recorded by initopt.run.

    Args:
        script_args: arguments to the main module
        script: script to run within the image
        m: the python module path to run
        root: where runs are kept: a folder that all hosts see. Default: $INITOPT_ROOT of the job, else .initopt
        until: the step that ends the start-up. Default: the first training step
        image: as in dist.ddp
        name: as in dist.ddp
        h: as in dist.ddp
        cpu: as in dist.ddp
        gpu: as in dist.ddp
        memMB: as in dist.ddp
        j: as in dist.ddp
        env: as in dist.ddp
        max_retries: as in dist.ddp
        rdzv_port: as in dist.ddp
        rdzv_backend: as in dist.ddp
        mounts: as in dist.ddp
        debug: as in dist.ddp
        tee: as in dist.ddp
    """
    same = {
        "image": image,
        "h": h,
        "cpu": cpu,
        "gpu": gpu,
        "memMB": memMB,
        "j": j,
        "env": env,
        "max_retries": max_retries,
        "rdzv_port": rdzv_port,
        "rdzv_backend": rdzv_backend,
        "mounts": mounts,
        "debug": debug,
        "tee": tee,
    }
    if not torchx.__version__.startswith(VERSIONS):
        warnings.warn(
            f"initopt: TorchX {torchx.__version__} is not known, so this is its dist.ddp and nothing is recorded: "
            "use 0.7.x, or dist.ddp with `-m initopt.run` and the script among its arguments",
            stacklevel=2,
        )
        return dist.ddp(*script_args, script=script, m=m, name=name, **same)
    if (script is None) == (m is None):
        raise ValueError("exactly one of --script and -m must be specified")
    job = dist.get_role_name(script, m)
    options = [word for option, value in (("--root", root), ("--until", until)) if value for word in (option, value)]
    program = [script] if script is not None else ["-m", m]
    # Else job and role would be named after initopt.run.
    app = dist.ddp(
        *options, *program, *script_args, m="initopt.run", name=name + job if name.endswith("/") else name, **same
    )
    app.roles[0].name = job
    return app


if __name__ == "__main__":
    print(__file__)
