"""The address and interface through which other nodes reach this one, from the kernel, without network traffic."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tula_cli.errors import JobFailed

_VIRTUAL_INTERFACE_PREFIXES = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc", "tun", "tap", "ifb")
"""Prefixes of virtual interfaces, which lead to containers of this node and not to other nodes."""


def get_node_name() -> str:
    """Return the scheduler's name of this node, which may differ from its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def find_node_address(interface: str | None = None) -> str:
    """Return the address under which other nodes reach this one.

    Args:
        interface: the interface to use; of several, separated by commas, the first; None: the address to which this
            node's name resolves, else that of the interface of the default route, or of the first other external one.

    Returns:
        An IPv4 address, an IPv6 address if there is none, or the host name if no address is found.

    Raises:
        JobFailed: an interface does not exist or has no address.
    """
    if interface is not None:
        first_address, *_ = [_find_interface_address(name) for name in interface.split(",")]
        return first_address
    return find_named_address() or next(_list_outside_addresses(), socket.gethostname())


def make_interface_variables(interface: str | None) -> dict[str, str]:
    """Return the environment variables that set the interface for gloo and NCCL.

    Args:
        interface: the interface, or None to detect one.

    Raises:
        JobFailed: the interface does not exist or has no address.
    """
    if interface:
        find_node_address(interface)
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    # gloo uses the address of the node's name, which may be the loopback; NCCL finds an interface by itself.
    default_interface = find_interface(find_node_address()) if find_named_address() is None else None
    return {"GLOO_SOCKET_IFNAME": default_interface} if default_interface else {}


def find_named_address() -> str | None:
    """Return the address to which this node's name resolves; None if it is another node's or others cannot reach it."""
    with suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        ipv4_first = sorted((str(entry[4][0]) for entry in entries), key=lambda address: ":" in address)
        return next((address for address in ipv4_first if _is_reachable_address(address)), None)
    return None


def find_interface(address: str) -> str | None:
    """Return the name of the network interface with the given address; None if no interface has it, or it is no IP address."""
    with suppress(ValueError):
        parsed = ipaddress.ip_address(address)
        for name in list_interfaces():
            if parsed in map(ipaddress.ip_address, _list_interface_addresses(name)):
                return name
    return None


def list_interfaces() -> tuple[str, ...]:
    """Return the names of this node's interfaces, in the kernel's order."""
    return tuple(name for _, name in socket.if_nameindex())


def find_free_port() -> int:
    """Return a port that is free now; another process may take it before the caller does."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _find_interface_address(interface: str) -> str:
    names, problem = list_interfaces(), f"no network interface {interface!r} on {socket.gethostname()}"
    if interface in names:
        if address := next(_list_interface_addresses(interface), None):
            return address
        problem = f"network interface {interface!r} on {socket.gethostname()} has no address"
        names = tuple(name for name in names if any(_list_interface_addresses(name)))
    raise JobFailed(problem, f"set cluster.interface to one of {', '.join(names)}")


def _is_reachable_address(address: str) -> bool:
    """Return whether an address belongs to this node and other nodes can reach it."""
    if "%" in address or ipaddress.ip_address(address).is_loopback:  # "%": link-local
        return False
    if (find_interface(address) or "").startswith(_VIRTUAL_INTERFACE_PREFIXES):
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _list_outside_addresses() -> Iterator[str]:
    """Yield the addresses of external interfaces, those of the default route first."""
    candidates = [name for name in list_interfaces() if not name.startswith(_VIRTUAL_INTERFACE_PREFIXES)]
    states = psutil.net_if_stats()
    for name in dict.fromkeys([*_list_default_routes(), *candidates]):
        if name in states and states[name].isup and "loopback" not in states[name].flags.split(","):
            yield from _list_interface_addresses(name)


def _list_default_routes() -> list[str]:
    """Return the interfaces of the default routes, the preferred one first."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1:]
        routes = [fields for fields in map(str.split, lines) if fields[1] == "00000000" and fields[7] == "00000000"]
        return [fields[0] for fields in sorted(routes, key=lambda fields: int(fields[6]))]
    return []


def _list_interface_addresses(interface: str) -> Iterator[str]:
    """Yield the IPv4 addresses of an interface, then its IPv6 addresses that are not link-local."""
    entries = psutil.net_if_addrs().get(interface, [])
    yield from (entry.address for entry in entries if entry.family == socket.AF_INET)
    for entry in entries:
        if entry.family == socket.AF_INET6 and "%" not in entry.address:  # "%": link-local
            yield str(ipaddress.ip_address(entry.address))
