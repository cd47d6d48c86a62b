"""Hosts and the instances on each: `a:4,me@b:4`. Pure."""

import re
from dataclasses import dataclass

from podium.errors import UserError
from podium.submit.site import Site

_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class HostPart:
    """One host, as ssh knows it, and its instances."""

    host: str
    instances: int

    @property
    def address(self) -> str:
        """What the hosts call it among themselves."""
        return self.host.rpartition("@")[2]


def parse_hosts(text: str | None, site: Site) -> list[HostPart]:
    """Return the hosts of the command line or of the site; raise UserError for a name that ssh could misread."""
    named = text.split(",") if text else list(site.ssh.hosts)
    if not named:
        raise UserError("expected --hosts a:4,b:4, or ssh.hosts in the site")
    parts = []
    for one in named:
        host, _, count = one.strip().partition(":")
        if not _HOST.fullmatch(host) or not (not count or (count.isdecimal() and 1 <= int(count) <= 4096)):
            raise UserError(f"--hosts: {one!r}: expected a host with its number of instances, such as a:4 or me@b:4")
        parts.append(HostPart(host, int(count or 1)))
    return parts
