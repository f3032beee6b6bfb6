"""Two 'hosts' on one machine: network namespaces with one cable between them, each with addresses of its own only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A network namespace: what is started by `command` in it sees its own loopback and this one interface."""

    namespace: str
    interface: str
    address: str

    def command(self, words: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]


def refusal() -> str | None:
    """Why this machine cannot make namespaces; None where it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian package iproute2)"
    name = f"lrt{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here (they take root or CAP_SYS_ADMIN): {made.stderr.strip()}"
    pair = ["ip", "link", "add", "name", f"{name}a", "netns", name, "type", "veth", "peer", "name", f"{name}b"]
    cable = subprocess.run([*pair, "netns", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"no veth pair can be made here: {cable.stderr.strip()}" if cable.returncode else None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Inside there are two hosts that reach each other, and nothing else."""
    names = [f"lr{os.getpid()}{letter}" for letter in "ab"]
    hosts = tuple(Host(name, f"v{name}", f"10.77.0.{number}") for number, name in enumerate(names, start=1))
    first, second = hosts
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
        cable = ["link", "add", "name", first.interface, "netns", first.namespace, "type", "veth"]
        ip(*cable, "peer", "name", second.interface, "netns", second.namespace)
        for host in hosts:
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                ip("-n", host.namespace, "link", "set", interface, "up")
        yield first, second
    finally:
        for host in hosts:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
