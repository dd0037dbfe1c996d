"""How fast a plain TCP connection carries bytes: the ceiling for whatever uses the link.

python -m benchmarks.goodput receive 29500
python -m benchmarks.goodput send 10.77.0.1 29500 --seconds 3      # prints bytes per second
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Sequence

_CHUNK = 1 << 20


def receive(port: int, host: str = "") -> None:
    """Take one connection, count what comes, and answer with the count."""
    with socket.create_server((host, port)) as server:
        connection, _ = server.accept()
        with connection:
            buffer, total = bytearray(_CHUNK), 0
            while count := connection.recv_into(buffer):
                total += count
            connection.sendall(str(total).encode())


def send(host: str, port: int, seconds: float) -> float:
    """Send for that long; bytes per second until the receiver has all of them."""
    chunk = bytes(_CHUNK)
    with _connect(host, port) as connection:
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(64), b""))
        return int(answer) / (time.perf_counter() - begin)


def _connect(host: str, port: int, patience: float = 20.0) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((host, port), timeout=60)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main(argv: Sequence[str] | None = None) -> None:
    """Be one end of a transfer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ends = parser.add_subparsers(dest="end", required=True)
    ends.add_parser("receive").add_argument("port", type=int)
    sender = ends.add_parser("send")
    sender.add_argument("host")
    sender.add_argument("port", type=int)
    sender.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args(argv)
    if args.end == "receive":
        receive(args.port)
    else:
        print(send(args.host, args.port, args.seconds))


if __name__ == "__main__":
    main()
