"""Names and addresses of hosts: those of this host, and where instances meet. Called by `join.py` and the commands."""

import os
import re
import socket
import subprocess
from contextlib import suppress

import psutil

from podium.errors import UserError
from podium.launch.environment import Place


def local_names() -> frozenset[str]:
    """Return every name and address of this host."""
    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        names.update(a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
    return frozenset(names)


def resolved_address(place: Place) -> str:
    """Return the address of the host where instances meet. Slurm may know it where the name service does not."""
    name = place.address
    try:
        found = socket.gethostbyname(name)
    except OSError:
        found = ""
    # A host often resolves its own name to loopback, which is of no use to the others.
    useless = place.count > place.local_count and found.startswith("127.") and name not in (found, "localhost")
    if found and not useless:
        return found
    if address := _slurm_address(name):
        return address
    why = f"resolves to {found}, which no other host can reach" if found else "cannot be resolved"
    raise UserError(f"{name}, where the instances meet, {why}: correct the name service or /etc/hosts")


def _slurm_address(name: str) -> str:
    """Return the address that Slurm's configuration has for a host, or nothing."""
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(["scontrol", "show", "node", name], capture_output=True, text=True, timeout=30).stdout
        match = re.search(r"\bNodeAddr=(\S+)", shown)
        if match and match[1] != name:
            return socket.gethostbyname(match[1])
    return ""


def use_interface(address: str) -> None:
    """Have gloo listen on the interface that leads to where instances meet, and on no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: asks the system which of its addresses it would use
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
