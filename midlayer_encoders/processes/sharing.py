"""Start the processes that share some work."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from midlayer_encoders._isolation import quiet_loggers
from midlayer_encoders.errors import MidlayerError, OptionError, counted
from midlayer_encoders.processes.group import ALONE, Group, Placed
from midlayer_encoders.validation import check_count

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

_TIMEOUT = timedelta(days=2)  # for a busy process; one that has ended is noticed immediately
_LAUNCHER = "MIDLAYER_LAUNCHER"  # variable with the process that starts the others, which inherit it


def end_with_parent(parent: int) -> None:
    """End this process within a second of its parent, even if the parent is killed.

    Args:
        parent: process that started this one.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _slurm_tasks() -> int:
    """Return the number of tasks that srun started together with this process.

    A batch script, a shell of salloc and the terminal of ``srun --pty`` run alone. With torchrun, srun starts only its
    agents.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or ("SLURM_PTY_PORT" in os.environ and _has_terminal()):
        return 1
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def _has_terminal() -> bool:
    """Return True if a terminal controls this process; srun starts tasks without one, except with ``--pty``."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDWR))
    except OSError:
        return False
    return True


def check_launcher(devices: int, num_nodes: int) -> None:
    """Raise an error if torchrun or SLURM started a different number of processes."""
    if dist.is_initialized():  # a process that measures while others train
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        # Here, too, the first process may be the one that measures.
        if devices * num_nodes == 1 and int(os.environ.get("RANK", "0")) > 0:
            local = os.environ.get("LOCAL_WORLD_SIZE", str(world))
            raise OptionError(
                f"`devices` must be {local} and `num_nodes` {world // int(local)}, because torchrun started {world} "
                "processes, but got 1 and 1: each process would do the whole work."
            )
        return
    tasks = _slurm_tasks()
    if tasks == 1:
        if num_nodes > 1 and "SLURM_JOB_ID" in os.environ and "NODE_RANK" not in os.environ:
            raise OptionError(
                f"`num_nodes` must be 1 in a single task of SLURM, but got {num_nodes}: start the program with srun."
            )
        return
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    if "," in os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""):
        raise OptionError(
            f"Each of the {nodes} nodes must have the same number of tasks: start them with srun --ntasks-per-node."
        )
    if (devices, num_nodes) != (tasks // nodes, nodes):
        raise OptionError(
            f"`devices` must be {tasks // nodes} and `num_nodes` {nodes} (--devices {tasks // nodes} --num-nodes "
            f"{nodes}), because srun started {tasks} tasks on {counted(nodes, 'node')}, but got {devices} and "
            f"{num_nodes}. To do separate work in each task, unset SLURM_STEP_NUM_TASKS."
        )


def cpus_per_process(devices: int) -> int:
    """Return the number of CPUs that each of several processes on this machine may use.

    Args:
        devices: number of processes on this machine.
    """
    import joblib

    sharing = 1 if _slurm_tasks() > 1 else devices  # processes that share the CPUs of this one
    cpus = [int(joblib.cpu_count()) // sharing]  # respects affinity and cgroups
    if "SLURM_CPUS_ON_NODE" in os.environ:
        cpus.append(int(os.environ["SLURM_CPUS_ON_NODE"]) // devices)
    if "SLURM_CPUS_PER_TASK" in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        cpus.append(int(os.environ["SLURM_CPUS_PER_TASK"]) // sharing)
    return max(min(cpus), 1)


def _slurm_environment(devices: int) -> ClusterEnvironment | None:
    """Return Lightning's environment in a job of SLURM; ``None`` elsewhere, where Lightning detects it.

    Lightning goes by variables that are also set in a batch script, and ignores tasks in jobs named ``bash`` or
    ``interactive``.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_JOB_ID" not in os.environ:
        return None
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    if _slurm_tasks() == 1:
        return LightningEnvironment()
    os.environ["SLURM_NTASKS_PER_NODE"] = str(devices)  # not set by srun -n; check_launcher has compared the number
    return SLURMEnvironment()


def _check_address(address: str) -> None:
    """Raise an error if the address of the first process cannot be resolved; torch would try again forever."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise MidlayerError(
            f"The address of the first process, {address!r}, cannot be resolved on {socket.gethostname()}: {error}. "
            "Set MASTER_ADDR to an address of the first machine that all machines can reach."
        ) from error


def launch(devices: int, num_nodes: int, *, cpu: bool) -> Group:
    """Join the processes that Fabric, torchrun or SLURM starts, and return their group; only this one by default."""
    check_launcher(devices, num_nodes)
    if devices * num_nodes == 1:
        return Group()
    if os.environ.get(_LAUNCHER) == str(os.getppid()):
        end_with_parent(os.getppid())
    else:
        os.environ[_LAUNCHER] = str(os.getpid())
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    accelerator = "cpu" if cpu else "auto"
    try:
        with quiet_loggers("lightning.fabric", "lightning.pytorch", level=logging.WARNING):
            with warnings.catch_warnings(action="ignore", category=PossibleUserWarning):  # srun is installed, not used
                # Processes exchange small objects only, so gloo is sufficient for GPUs too.
                environment = _slurm_environment(devices)
                strategy = DDPStrategy(cluster_environment=environment, process_group_backend="gloo", timeout=_TIMEOUT)
                fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy)
            if strategy.cluster_environment is not None:
                _check_address(strategy.cluster_environment.main_address)
            fabric.launch()
    except ValueError as error:  # torchrun started a different number of processes
        raise OptionError(
            f"`devices` must be the number of processes per machine and `num_nodes` the number of machines that "
            f"torchrun or SLURM started, but got {devices} and {num_nodes}: {error}"
        ) from error
    return Group(fabric.global_rank, fabric.world_size, fabric.device)


def join(devices: int, num_nodes: int, *, cpu: bool) -> Group:
    """Return the processes that share the work of a call.

    Unlike :func:`launch`, one process does not look for others: calls in each of several processes that torchrun
    started, without ``devices``, are the caller's own.
    """
    check_count("devices", devices)
    check_count("num_nodes", num_nodes)
    return ALONE if devices * num_nodes == 1 else launch(devices, num_nodes, cpu=cpu)


def share_model(model: Placed, devices: int, num_nodes: int) -> Group:
    """Return the processes that share a loaded model's work, and move it to the device of this process."""
    group = join(devices, num_nodes, cpu=model.device.type == "cpu")
    group.place(model)
    return group
