"""Several hosts on one machine: network namespaces, joined by a bridge with links of a given rate.

    python -m benchmarks.netlab --hosts 2 --ranks-per-host 1 --rate 1gbit -- train.py --steps 10

Runs `torchrun train.py --steps 10` across the hosts (`-m package.module` works too). Each host has
one interface, `eth0`, whose two directions a token bucket holds to the rate (`unlimited`: nothing
holds them). Needs Linux, root and iproute2. What an earlier run left behind is removed first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.launch import MASTER_PORT, run_all, terminable, torchrun

BRIDGE = "zerofx-lab"
UNLIMITED = "unlimited"
_HOST = "zerofx-lab-"
_GOODPUT_PORT = MASTER_PORT + 1
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class LabError(RuntimeError):
    """This machine, or this user, cannot have a lab."""


def bits_per_second(rate: str) -> int:
    """A rate as `tc` writes it, such as `1gbit` or `2.5gbit`.

    Raises:
        ValueError: it is not one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    if not match or not float(match[1]):
        raise ValueError(f"{rate!r} is not a rate: say 100mbit, 1gbit, 2.5gbit or {UNLIMITED}")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclasses.dataclass(frozen=True)
class Lab:
    """The hosts; they exist inside `with lab.up():`.

    Attributes:
        hosts: how many.
        rate: of each direction of each host's link.
    """

    hosts: int = 2
    rate: str = "1gbit"

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= 200:
            raise ValueError(f"a lab of {self.hosts} hosts cannot be built: 1 to 200 can")
        if self.rate != UNLIMITED:
            bits_per_second(self.rate)

    @property
    def interface(self) -> str:
        """Where the traffic of the ranks passes; a single host speaks to itself."""
        return "eth0" if self.hosts > 1 else "lo"

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.77.0.{host + 1}" if self.hosts > 1 else "127.0.0.1"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, run on a host."""
        return ["ip", "netns", "exec", f"{_HOST}{host}", *command]

    def build_commands(self) -> list[list[str]]:
        """What makes the bridge, the hosts and their links."""
        lines = [f"ip link add {BRIDGE} type bridge", f"ip link set {BRIDGE} up"]
        for host in range(self.hosts):
            name, port = f"{_HOST}{host}", f"zerofxlab{host}"
            lines += [
                f"ip netns add {name}",
                f"ip -n {name} link set lo up",
                f"ip link add {port} type veth peer name eth0 netns {name}",
                f"ip link set {port} master {BRIDGE} up",
                f"ip -n {name} addr add 10.77.0.{host + 1}/24 dev eth0",
                f"ip -n {name} link set eth0 up",
            ]
            if self.rate != UNLIMITED:
                bucket = self._bucket()
                # What leaves the host, and what comes to it from the bridge.
                lines += [
                    f"tc -n {name} qdisc add dev eth0 root {bucket}",
                    f"tc qdisc add dev {port} root {bucket}",
                ]
        return [line.split() for line in lines]

    def _bucket(self) -> str:
        # Room for two milliseconds, and for the largest segment that the kernel hands down whole.
        burst = max(128 * 1024, bits_per_second(self.rate) // 8 // 500)
        return f"tbf rate {bits_per_second(self.rate)}bit burst {burst} latency 50ms"

    @contextlib.contextmanager
    def up(self) -> Iterator[Lab]:
        """Build, and always take down.

        Raises:
            LabError: root or a tool is missing, or another lab is up.
        """
        require_tools()
        with _only_one(), terminable():
            take_down()
            try:
                for command in self.build_commands():
                    _call(command)
                yield self
            finally:
                take_down()

    def goodput(self, seconds: float = 3.0) -> float:
        """Bytes per second that one TCP connection carries from the last host to the first."""
        end = [sys.executable, "-m", "benchmarks.goodput"]
        port = str(_GOODPUT_PORT)
        with subprocess.Popen(self.inside(0, [*end, "receive", port])) as receiver:
            try:
                sender = [*end, "send", self.address(0), port, "--seconds", str(seconds)]
                return float(_call(self.inside(self.hosts - 1, sender)))
            finally:
                receiver.kill()

    def torchrun(self, command: Sequence[str], ranks_per_host: int) -> list[list[str]]:
        """One torchrun for each host."""
        return [
            self.inside(host, torchrun(command, ranks_per_host, self.hosts, host, self.address(0)))
            for host in range(self.hosts)
        ]

    def environment(self) -> dict[str, str]:
        """What ranks need to know to use the links."""
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        return {**os.environ, **dict.fromkeys(names, self.interface)}


def require_tools() -> None:
    """Say what is missing.

    Raises:
        LabError: something is.
    """
    if not sys.platform.startswith("linux"):
        raise LabError("network namespaces need Linux")
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        raise LabError(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise LabError("network namespaces need root: run this with sudo, or in a root container")


def take_down() -> None:
    """Remove every host and link of a lab, with what still runs there."""
    listed = _call(["ip", "netns", "list"]).splitlines()
    for name in [line.split()[0] for line in listed if line.startswith(_HOST)]:
        for process in _call(["ip", "netns", "pids", name]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _call(["ip", "netns", "del", name])  # takes both ends of its link along
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        _call(["ip", "link", "del", BRIDGE])


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / f"{BRIDGE}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError("another lab is up on this machine") from None
        yield


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help=f"of each link, or {UNLIMITED}")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the goodput transfer")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- what torchrun runs")
    args = parser.parse_args(argv)
    args.command = [*args.command[args.command[:1] == ["--"] :]]
    if not args.command:
        parser.error("say what to run, after --")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Build a lab, measure it, run the command in it, and leave nothing behind."""
    args = parse(argv)
    try:
        with Lab(args.hosts, args.rate).up() as lab:
            rate = lab.goodput(args.seconds)
            Console().print(f"{lab.hosts} hosts, {lab.rate}: goodput {rate / 1e6:.1f} MB/s")
            commands = lab.torchrun(args.command, args.ranks_per_host)
            raise SystemExit(run_all(commands, lab.environment()))
    except (LabError, ValueError) as error:
        raise SystemExit(f"netlab: {error}") from None


if __name__ == "__main__":
    main()
