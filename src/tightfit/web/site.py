"""What one start of the page is: where it listens, who may look, and at what. Data only."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    token: str
    """Whoever has it may look."""
    host: str
    """The address that is listened on."""
    port: int
    roots: tuple[Path, ...]
    """Folders below which runs are looked for; resolved."""

    @property
    def cookie(self) -> str:
        """Browsers do not keep the cookies of two ports apart."""
        return f"tightfit_{self.port}"

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    @property
    def link(self) -> str:
        """What the user opens."""
        return f"http://{format_host(self.host)}:{self.port}/?token={self.token}"


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    address = as_address(host)
    return address is not None and address.is_loopback


def as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def format_host(host: str) -> str:
    """As an address bar wants it; what listens everywhere can be reached here."""
    address = as_address(host)
    if address is not None and address.is_unspecified:
        return "127.0.0.1"
    return f"[{host}]" if address is not None and address.version == 6 else host
