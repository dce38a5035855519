"""Hosts on this machine: network namespaces with an address and an sshd each, made for some tests and removed after them."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import until

_SSHD_CONFIG = """
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{name}.pid
PermitRootLogin yes
StrictModes no
UsePAM no
"""
_SSH_CONFIG = """
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def run(*words: str) -> None:
    """Run a command, which has to succeed."""
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


@dataclass(frozen=True)
class Hosts:
    """`h1`, `h2`, ...: each is a namespace of that name with an own prefix, whose interface `eth0` leads to all the others."""

    prefix: str
    addresses: dict[str, str]
    ssh_command: str

    def on(self, host: str, *words: str) -> None:
        """Run a command on a host."""
        run("ip", "netns", "exec", self.prefix + host, *words)

    def start(self, host: str, *words: str) -> subprocess.Popen[str]:
        """Start a command on a host, which writes to a pipe."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.prefix + host, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @contextmanager
    def cut(self, host: str) -> Iterator[None]:
        """Pull a host's cable, and put it back after the block."""
        run("ip", "link", "set", f"{self.prefix}v{host}", "down")
        try:
            yield
        finally:
            run("ip", "link", "set", f"{self.prefix}v{host}", "up")

    @contextmanager
    def slow(self, host: str, *netem: str) -> Iterator[None]:
        """Delay or lose a host's packets, as `tc netem` has it."""
        device = f"{self.prefix}v{host}"
        try:
            run("tc", "qdisc", "add", "dev", device, "root", "netem", *netem)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel delays no packets: {error.stderr.strip()}")
        try:
            yield
        finally:
            run("tc", "qdisc", "del", "dev", device, "root")

    @contextmanager
    def firewall(self, host: str) -> Iterator[None]:
        """Drop what a host gets from others but ssh."""
        if shutil.which("iptables") is None:
            pytest.skip("iptables is not installed: apt install iptables")
        rule = ("INPUT", "-i", "eth0", "-p", "tcp", "--syn", "!", "--dport", "22", "-j", "DROP")
        self.on(host, "iptables", "-A", *rule)
        try:
            yield
        finally:
            self.on(host, "iptables", "-D", *rule)


@contextmanager
def made_hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """So many hosts; the test is skipped, with the reason, where this machine can't have them."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program, package in (("ip", "iproute2"), ("/usr/sbin/sshd", "openssh-server"), ("ssh", "openssh-client")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt install {package}")
    number = os.getpid() % 250
    prefix, net = f"anb{number}", f"10.77.{number}"
    with ExitStack() as made:
        try:
            # without an address of its own it takes the lowest of its ports, and hosts have the one before in their tables of neighbours
            run("ip", "link", "add", f"{prefix}br", "address", "02:00:00:00:00:fe", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network interface can be made here: {error.stderr.strip()}")
        made.callback(run, "ip", "link", "del", f"{prefix}br")
        run("ip", "addr", "add", f"{net}.254/24", "dev", f"{prefix}br")
        run("ip", "link", "set", f"{prefix}br", "up")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
        (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)
        addresses = {f"h{index}": f"{net}.{index}" for index in range(1, count + 1)}
        for name, address in addresses.items():
            made.enter_context(_host(prefix, name, address, folder))
        with (folder / "ssh_config").open("a") as config:
            config.writelines(f"Host {name}\n  HostName {address}\n" for name, address in addresses.items())
        yield Hosts(prefix, addresses, f"ssh -F {folder}/ssh_config")


@contextmanager
def _host(prefix: str, name: str, address: str, folder: Path) -> Iterator[None]:
    namespace, device = prefix + name, f"{prefix}v{name}"
    try:
        run("ip", "netns", "add", namespace)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
    try:
        run("ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        run("ip", "link", "set", device, "master", f"{prefix}br", "up")
        for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            run("ip", "-n", namespace, *words.split())
        config = folder / f"sshd_{name}"
        config.write_text(_SSHD_CONFIG.format(address=address, folder=folder, name=name))
        on_host = ["ip", "netns", "exec", namespace]
        sshd = subprocess.Popen(
            [*on_host, "/usr/sbin/sshd", "-D", "-f", str(config), "-E", str(folder / f"{name}.log")]
        )
        try:
            until(lambda: _listens(address), timeout=20.0)
            yield
        finally:
            sshd.terminate()
            sshd.wait(10)
            _end_all(namespace)
    finally:
        run("ip", "netns", "del", namespace)


def _listens(address: str) -> bool:
    with suppress(ConnectionRefusedError):
        socket.create_connection((address, 22), 5).close()
        return True
    return False


def _end_all(namespace: str) -> None:
    """End what still runs in a namespace that a test made."""
    pids = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True, timeout=20
    ).stdout
    for pid in pids.split():
        subprocess.run(["kill", "-9", pid], check=False, capture_output=True, timeout=20)
