"""Command lines of the lab; nothing is built."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys

import pytest

from benchmarks import netlab
from benchmarks.launch import run_all, torchrun
from benchmarks.netlab import Lab, LabError, bits_per_second, parse


def test_rates() -> None:
    assert bits_per_second("1gbit") == 10**9
    assert bits_per_second("2.5Gbit") == 25 * 10**8
    for wrong in ("fast", "1", "0gbit", "1gb", "-1gbit"):
        with pytest.raises(ValueError, match="is not a rate"):
            bits_per_second(wrong)
        with pytest.raises(ValueError, match="is not a rate"):
            Lab(2, wrong)


@pytest.mark.parametrize("hosts", [0, 1000])
def test_number_of_hosts(hosts: int) -> None:
    with pytest.raises(ValueError, match="hosts cannot be built"):
        Lab(hosts)


def test_the_command_line_splits_at_two_dashes() -> None:
    args = parse(["--hosts", "3", "--rate", "10gbit", "--", "train.py", "--hosts", "7"])
    assert (args.hosts, args.rate, args.ranks_per_host) == (3, "10gbit", 1)
    assert args.command == ["train.py", "--hosts", "7"]
    with pytest.raises(SystemExit):
        parse(["--hosts", "3"])


def test_every_link_is_held_in_both_directions() -> None:
    lines = [" ".join(command) for command in Lab(3, "1gbit").build_commands()]
    held = [line for line in lines if "tbf rate 1000000000bit" in line]
    assert len(held) == 6
    assert sum("dev eth0" in line for line in held) == 3
    assert len([line for line in lines if line.startswith("ip netns add")]) == 3


def test_unlimited_links_are_not_held() -> None:
    assert not [line for line in Lab(3, "unlimited").build_commands() if "tc" in line]


def test_a_torchrun_for_each_host() -> None:
    first, second = Lab(2).torchrun(["-m", "x"], ranks_per_host=4)
    assert first[:3] == ["ip", "netns", "exec"]
    assert first[-2:] == ["-m", "x"]
    for command, rank in ((first, 0), (second, 1)):
        assert {"--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=4"} <= set(command)
        assert "--master-addr=10.77.0.1" in command


def test_ranks_are_told_their_interface() -> None:
    assert Lab(2).environment()["GLOO_SOCKET_IFNAME"] == "eth0"
    assert Lab(1).environment()["GLOO_SOCKET_IFNAME"] == "lo"
    assert "--nnodes=1" in torchrun(["x.py"], 2)


def test_one_host_takes_a_port_that_is_free() -> None:
    (port,) = (each for each in torchrun(["x.py"], 2) if each.startswith("--master-port="))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(port.partition("=")[2])))
        assert port not in torchrun(["x.py"], 2)
    assert "--master-port=29500" in torchrun(["x.py"], 2, hosts=2)


def test_missing_tools_and_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab.sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(LabError, match="ip and tc not found: install iproute2"):
        netlab.require_tools()
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="need root"):
        netlab.require_tools()


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_one_failure_ends_all() -> None:
    forever, failing = _python("import time; time.sleep(60)"), _python("raise SystemExit(3)")
    assert run_all([forever, failing], dict(os.environ)) == 3
    assert run_all([_python("")] * 2, dict(os.environ)) == 0


def test_sigterm_ends_all() -> None:
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_all([_python(code)], dict(os.environ))
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_the_time_ends_all() -> None:
    with pytest.raises(TimeoutError, match="not done after"):
        run_all([_python("import time; time.sleep(60)")], dict(os.environ), timeout=0.3)
