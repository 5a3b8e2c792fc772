"""A real SLURM cluster on this machine: one controller, two nodes under two names, all as the current user.

Everything it has (configuration, key, sockets, state, logs) lies in one folder; the system's own munge and SLURM, if
any, are left alone. Commands find it by SLURM_CONF.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"
NODES = ("n1", "n2")
GPUS = 4
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
MinJobAge=600
SlurmdTimeout=60
NodeName=DEFAULT CPUs=64 RealMemory=400000 Gres=gpu:{gpus} State=UNKNOWN
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_ports}]
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """What a cluster needs and this machine has not."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


class Cluster:
    """Use `environment` for every command that shall see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Raises RuntimeError, with the end of the logs, when the nodes are not idle within a minute."""
        (self.folder / "state").mkdir()
        controller, first = _free_ports(1)[0], _adjacent_ports()
        text = CONFIGURATION.format(
            host=socket.gethostname(), user=getpass.getuser(), folder=self.folder,
            controller_port=controller, node_ports=f"{first}-{first + 1}", gpus=GPUS,
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        for i in range(GPUS):  # in name only, to see that requests for them are understood
            (self.folder / f"gpu{i}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        files = [f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in names]
        self._daemon("munged", "--foreground", "--force", "--num-threads=2", *files)
        wait_until(lambda: (self.folder / "munge.socket").exists(), 20, self._failure)
        self._daemon("slurmctld", "-D")
        wait_until(lambda: self.run("scontrol", "ping").returncode == 0, 30, self._failure)
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()
            self._daemon("slurmd", "-D", "-N", node)
        wait_until(lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.strip() == "idle 2", 60, self._failure)

    def stop(self) -> None:
        """End every job, then every daemon."""
        self.run("scancel", f"--user={getpass.getuser()}")
        try:
            wait_until(lambda: not self.run("squeue", "-h").stdout.strip(), 40, self._failure)
        finally:
            for daemon in reversed(self._daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in reversed(self._daemons):
                try:
                    daemon.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    daemon.kill()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)

    def job(self, number: int | str) -> dict[str, str]:
        """`scontrol show job` as a mapping."""
        text = self.run("scontrol", "show", "job", "-o", str(number)).stdout
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait_for(self, number: int | str, states: tuple[str, ...], seconds: float) -> dict[str, str]:
        """The job, as soon as it is in one of the states."""
        wait_until(lambda: self.job(number).get("JobState") in states, seconds, lambda: str(self.job(number)))
        return self.job(number)

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "ab") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )

    def _failure(self) -> str:
        logs = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)


def wait_until(condition: Callable[[], object], seconds: float = 120.0, failure: Callable[[], str] = str) -> None:
    """Raises RuntimeError, with what `failure` says, when the condition has not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:.0f} s\n{failure()}")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _adjacent_ports() -> int:
    """The first of two free ports in a row, as one configuration line for two nodes wants them."""
    for first in range(17001, 30000, 2):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", first))
                other.bind(("127.0.0.1", first + 1))
            except OSError:
                continue
            return first
    raise RuntimeError("no two free ports in a row")
