"""Ranks on two hosts: bootstrap, clocks apart, a host that is lost, a network that is cut.

A host is an entry of mpirun's -hosts. Where the test may make them (root, on Linux), each is in separate namespaces:
network, host name, processes, shared memory, clock; a bridge joins their networks. Only MPICH's mpirun is tested.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time

import pytest
from checks import only_slow
from test_ddp import HERE, MODULE, MPICH, MPIRUN, command, environment, finish  # noqa: F401

from xtrain.nn.model import Transformer

pytestmark = [
    pytest.mark.mpi,
    # Open MPI starts its daemons otherwise
    pytest.mark.skipif(not MPICH, reason="needs the mpirun of MPICH"),
]
# one write for a line: those of two ranks may not mix
WHERE = """
import os
from xtrain.parallel.ranks import connect
ranks = connect()
os.write(1, b"%d %d\\n" % (ranks.rank, ranks.local_world))
"""
KIND = {"layers": 3, "batch": 4, "sample-every": 0, "eval-every": 0, "save-every": 2, "watchdog": 4}


def run(*command):
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


class Hosts:
    """Two hosts in namespaces: xtN-1 and xtN-2, at 10.77.N.2 and 10.77.N.3."""

    def __init__(self, folder):
        self.number = os.getpid() % 250
        self.bridge = f"xtb{self.number}"
        self.names = [f"xt{self.number}-{i}" for i in (1, 2)]
        self.addresses = [f"10.77.{self.number}.{i + 1}" for i in (1, 2)]
        self.shell = folder / "shell.sh"
        self.shell.write_text(
            "#!/bin/sh\n"
            '[ "$1" = -x ] && shift\n'
            "host=$1; shift\n"
            "n=$((${host##*.} - 1))\n"
            f"exec ip netns exec xt{self.number}-$n unshare -u -m -i -p --mount-proc -T "
            "--monotonic $((n * 5000)) --boottime $((n * 5000)) --fork --kill-child "
            'sh -c "hostname host$n; mount -t tmpfs shm /dev/shm; exec $*"\n'
        )
        self.shell.chmod(0o755)

    def make(self):
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"10.77.{self.number}.1/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for name, address in zip(self.names, self.addresses):
            run("ip", "netns", "add", name)
            pair = f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name
            run("ip", "link", "add", *pair)
            run("ip", "link", "set", f"{name}v", "master", self.bridge, "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", name, "link", "set", device, "up")

    def processes(self, name):
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        return list(map(int, found.stdout.split()))

    def remove(self):
        for name in self.names:
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            for what in (["netns", "del", name], ["link", "del", f"{name}v"]):
                subprocess.run(["ip", *what], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    def start(self, environment, *command):  # noqa: F811
        launcher = ["-launcher", "ssh", "-launcher-exec", self.shell, "-iface", self.bridge]
        return start(environment, self.addresses, launcher, *command)


def start(environment, hosts, launcher, *command):  # noqa: F811
    hosts = ["-hosts", ",".join(f"{host}:1" for host in hosts)]
    arguments = [MPIRUN, *map(str, launcher), *hosts, "-n", "2", *map(str, command)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(arguments, env=environment, **pipes)


@pytest.fixture
def hosts(tmp_path):
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("needs root, ip and unshare")  # they make the namespaces that stand for hosts
    made = Hosts(tmp_path)
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        reason = error.stderr.decode().strip()
        pytest.skip(f"no namespaces: {reason}")  # a container may refuse them, even to root
    yield made
    made.remove()


def test_two_entries_of_the_hosts_are_two_machines(environment, tmp_path):  # noqa: F811
    """Ranks of two machines share no memory."""
    fork = ["-launcher", "fork"]
    job = start(environment, ("hosta", "hostb"), fork, sys.executable, "-c", WHERE)
    code, out, err = finish(job, 60)
    assert code == 0 and sorted(out.split("\n")[:2]) == ["0 1", "1 1"], out + err
    options = command(tmp_path, **KIND, zero=3)
    code, out, err = finish(start(environment, ("hosta", "hostb"), fork, *MODULE, *options), 60)
    assert code == 0 and "2 ranks" in out, err
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 3


@only_slow
def test_hosts_with_clocks_apart(hosts, environment, tmp_path):  # noqa: F811
    """Their clocks since the start differ by hours; a time limit ends all ranks at the same step."""
    code, out, err = finish(hosts.start(environment, sys.executable, "-c", WHERE), 60)
    assert code == 0 and sorted(out.split("\n")[:2]) == ["0 1", "1 1"], out + err
    more = {"steps": 100000, "time-limit": 25, "zero": 3}
    options = command(tmp_path, **KIND | more)
    code, out, err = finish(hosts.start(environment, *MODULE, *options), 60)
    assert code == 0 and "stopped after step" in out, out + err


@only_slow
def test_a_host_that_is_cut_off_before_the_first_step(hosts, environment, tmp_path):  # noqa: F811
    """While rank 0 reads a text, rank 1 waits as long as that takes, but not for a lost host."""
    reading = tmp_path / "reading"
    job = hosts.start(environment, sys.executable, HERE / "mpi" / "reading.py", reading)
    until = time.monotonic() + 60
    while not reading.exists():
        assert job.poll() is None and time.monotonic() < until, finish(job, 1)
        time.sleep(0.05)
    time.sleep(6)  # longer than the limit
    assert job.poll() is None, finish(job, 1)
    began = time.monotonic()
    run("ip", "link", "set", f"{hosts.names[1]}v", "down")
    code, _, err = finish(job, 60)
    assert code != 0 and time.monotonic() - began < 30, err
    assert "has not run for 3 s" in err, err


@only_slow
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_host_that_is_lost(how, hosts, environment, tmp_path):  # noqa: F811
    """All ranks end, not with 0; the checkpoint is resumed on one host."""
    options = command(tmp_path, **KIND, steps=100000, zero=3)
    job = hosts.start(environment, *MODULE, *options)
    folder = tmp_path / "run" / "checkpoints"
    until = time.monotonic() + 60
    while not list(folder.glob("step-*")):
        assert job.poll() is None and time.monotonic() < until, finish(job, 1)
        time.sleep(0.05)
    lost = hosts.names[1]
    began = time.monotonic()
    if how == "killed":
        for pid in hosts.processes(lost):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
    else:
        run("ip", "link", "set", f"{lost}v", "down")
    code, _, err = finish(job, 60)
    assert code != 0 and time.monotonic() - began < 30, err
    assert how == "killed" or "no progress for 4 s" in err, err
    newest = max(folder.glob("step-*"))
    assert Transformer.from_pretrained(newest)
    resumed = command(tmp_path, **KIND, steps=100000, zero=1)
    resumed += ["--resume", f"--stop-at={int(newest.name[5:]) + 2}"]
    fork = ["-launcher", "fork"]
    code, out, err = finish(start(environment, ("hosta",), fork, *MODULE, *resumed), 60)
    assert code == 0 and "resumed from" in out, err
