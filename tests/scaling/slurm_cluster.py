"""A SLURM cluster of one machine under a temporary folder: munged, slurmctld, and a slurmd for each node."""

import contextlib
import getpass
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "setpriv")
INSTALL = "apt-get install --no-install-recommends slurm-wlm munge"

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
SlurmdTimeout=10
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """A running cluster.

    Attributes:
        folder: configuration, state and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a SLURM command, such as ``srun -n 2 program``."""
        return subprocess.run(
            command, env={**self.env, **(env or {})}, capture_output=True, text=True, check=False, timeout=timeout
        )

    def logs(self) -> str:
        """Return the end of every daemon's log."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def slurm_cluster(cpus: Sequence[int]) -> Iterator[Cluster]:
    """Start a cluster with one node for each number of CPUs, and stop its daemons and jobs at the end.

    Nodes are virtual: each is this machine on a port of its own. The names of several nodes do not resolve.
    """
    # A socket's path has at most 107 characters; pytest's folders may be longer.
    temporary = tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)
    with temporary as name, contextlib.ExitStack() as stack:
        cluster = Cluster(folder := Path(name))
        host = socket.gethostname()
        names = [host] if len(cpus) == 1 else [f"virtual{index}" for index in range(1, len(cpus) + 1)]
        ports = _free_ports(len(cpus) + 1)
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={count} State=UNKNOWN"
            for node, port, count in zip(names, ports[1:], cpus, strict=True)
        )
        config = _CONFIG.format(host=host, port=ports[0], user=getpass.getuser(), folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(config)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        paths = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "seed")]
        # --force allows root and a folder that others may write.
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *paths]
        stack.enter_context(_daemon(cluster, "munged", munge))
        _wait_until(cluster, (folder / "munge.socket").exists)
        stack.enter_context(_daemon(cluster, "slurmctld", ["slurmctld", "-D"]))
        for node in names:
            stack.enter_context(_daemon(cluster, f"slurmd-{node}", ["slurmd", "-D", "-N", node]))
        stack.callback(_cancel_jobs, cluster)
        _wait_until(cluster, lambda: _states(cluster) == ["idle"] * len(names))
        yield cluster


@contextlib.contextmanager
def _daemon(cluster: Cluster, name: str, command: Sequence[str]) -> Iterator[None]:
    """Run a daemon in the foreground; it ends with this process, even if that is killed."""
    with (
        (cluster.folder / f"{name}.log").open("w") as log,
        subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *command], env=cluster.env, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()


def _states(cluster: Cluster) -> list[str]:
    return cluster.run("sinfo", "--noheader", "--Node", "--format=%t").stdout.split()


def _cancel_jobs(cluster: Cluster) -> None:
    """Cancel all jobs, and wait until their processes have ended."""
    cluster.run("scancel", f"--user={getpass.getuser()}")
    _wait_until(cluster, lambda: not cluster.run("squeue", "--noheader").stdout)


def _wait_until(cluster: Cluster, condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"The cluster did not start or end:\n{cluster.logs()}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
