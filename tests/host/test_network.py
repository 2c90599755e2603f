"""The address under which other nodes reach this one; on this machine's own interfaces, and in a network made for it."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from tula_cli.errors import JobFailed
from tula_cli.host import network


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this machine's name stand for addresses; without any it is unknown."""

    def named_(*addresses: str) -> None:
        def look_up(host: str, port: object, **options: object) -> list[tuple[object, ...]]:
            assert host == socket.gethostname()
            if not addresses:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            kind = {True: socket.AF_INET6, False: socket.AF_INET}
            return [(kind[":" in a], socket.SOCK_STREAM, 6, "", (a, 0)) for a in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return named_


def test_interface_of_loopback_is_found() -> None:
    assert network.find_interface("127.0.0.1") == "lo"
    assert network.find_node_address("lo") == "127.0.0.1"


@pytest.mark.parametrize("address", ["203.0.113.77", "2001:db8::77", "no address", ""])
def test_address_of_no_interface_here(address: str) -> None:
    assert network.find_interface(address) is None


def test_unknown_interface_is_reported_with_those_there_are() -> None:
    with pytest.raises(JobFailed, match="no network interface 'ib77'") as caught:
        network.find_node_address("ib77")
    assert socket.gethostname() in caught.value.message
    assert "lo" in caught.value.hint
    with pytest.raises(JobFailed, match="ib77"):
        network.find_node_address("lo,ib77")


def test_name_that_stands_for_loopback_is_no_way_here(named: Callable[..., None]) -> None:
    for addresses in (["127.0.0.1"], ["127.0.1.1", "::1"], []):
        named(*addresses)
        assert network.find_named_address() is None


def test_name_that_stands_for_another_machine_is_no_way_here(named: Callable[..., None]) -> None:
    named("203.0.113.77")
    assert network.find_named_address() is None


def test_free_port_is_free() -> None:
    port = network.find_free_port()
    with socket.create_server(("", port)):
        assert network.find_free_port() != port


# --- a network made for the test: needs root

LINK = "ip link add {0} type veth peer name veth-{0}; ip link set veth-{0} up; ip addr add {1} dev {0}\n"
INTERFACES = (
    "hostname made-here; ip link set lo up\n"
    + "".join(
        LINK.format(name, address)
        for name, address in (("docker0", "172.17.0.1/16"), ("down0", "10.1.0.1/24"), ("eth5", "10.2.0.1/24"))
    )
    + "ip link set docker0 up; ip link set eth5 up\n"
    + LINK.format("six0", "fd77::1/64 nodad")
    + "ip link set six0 up\n"
)
IB = LINK.format("ib0", "10.3.0.1/24") + "ip link set ib0 up\n"
ROUTE = "ip route add default via 10.2.0.2 dev eth5 metric 50; ip route add default via 10.3.0.2 dev ib0 metric 5\n"
PROGRAM = """
import sys
from tula_cli.host import network
try:
    print(eval(sys.argv[1]))
except network.JobFailed as error:
    print(error.message, error.hint)
"""


def tells(question: str, *, name: str = "127.0.1.1", before: str = "", interfaces: str = INTERFACES) -> str:
    """Return what tula_cli.host.network says on a machine whose name stands for an address."""
    hosts = f"127.0.0.1 localhost\n{name} made-here\n"
    script = f"mount -t tmpfs none /run; echo '{hosts}' > /run/hosts; mount --bind /run/hosts /etc/hosts\n"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-ec", f'{script}{interfaces}{before}exec "$@"', "sh",
         sys.executable, "-c", PROGRAM, question],
        capture_output=True, text=True, env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def own_network() -> None:
    """Skip where no network can be made."""
    trial = ["unshare", "--net", "--uts", "--mount", "sh", "-ec", "hostname trial; ip link add eth5 type veth"]
    if not all(shutil.which(program) for program in ("unshare", "ip")):
        pytest.skip("needs unshare and ip")
    if (done := subprocess.run(trial, capture_output=True, text=True)).returncode:
        pytest.skip(f"no network can be made here: {done.stderr.strip()}")


@pytest.mark.usefixtures("own_network")
def test_name_leads_to_its_own_address() -> None:
    assert (
        tells("network.find_node_address(), network.find_named_address()", name="10.2.0.1")
        == "('10.2.0.1', '10.2.0.1')"
    )
    assert tells("network.find_node_address()", name="fd77::1") == "fd77::1"


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("name", ["127.0.1.1", "172.17.0.1", "203.0.113.77"])
def test_name_that_leads_nowhere_is_passed_over(name: str) -> None:
    """Loopback, a bridge of containers, another machine: the first interface that leads outside is taken."""
    question = (
        "network.find_named_address(), network.find_node_address(), network.find_interface(network.find_node_address())"
    )
    assert tells(question, name=name) == "(None, '10.2.0.1', 'eth5')"


@pytest.mark.usefixtures("own_network")
def test_the_default_routes_interface_comes_first() -> None:
    assert tells("network.find_node_address()", before=IB) == "10.2.0.1"
    assert tells("network.find_node_address()", before=IB + ROUTE) == "10.3.0.1"


@pytest.mark.usefixtures("own_network")
def test_interface_that_is_asked_for_wins_over_the_name() -> None:
    assert tells("network.find_node_address('docker0')", name="10.2.0.1") == "172.17.0.1"
    assert tells("network.find_node_address('eth5,docker0')", name="172.17.0.1") == "10.2.0.1"


@pytest.mark.usefixtures("own_network")
def test_ipv6_is_used_where_there_is_nothing_else() -> None:
    assert tells("network.find_node_address('six0'), network.find_interface('fd77:0:0:0::1')") == "('fd77::1', 'six0')"
    both = "ip addr add fd88::1/64 dev eth5 nodad\n"
    assert (
        tells("network.find_node_address('eth5'), network.find_interface('fd88::1')", before=both)
        == "('10.2.0.1', 'eth5')"
    )


@pytest.mark.usefixtures("own_network")
def test_machine_without_a_network_has_its_name() -> None:
    assert tells("network.find_node_address()", interfaces="hostname made-here; ip link set lo up\n") == "made-here"


@pytest.mark.usefixtures("own_network")
def test_interface_without_an_address_is_reported_with_those_that_have_one() -> None:
    text = tells("network.find_node_address('veth-eth5')")
    assert text.startswith("network interface 'veth-eth5' on made-here has no address")
    assert "eth5, six0" in text
