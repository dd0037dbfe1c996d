"""A headless Chromium, spoken to through two pipes: the DevTools protocol without a network."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
from numpy.typing import NDArray

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no Chromium here: apt install chromium"


def find_browser() -> str:
    """The path of a Chromium; empty if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), "")


class Tab:
    """One page.

    Attributes:
        errors: what it wrote to the console as an error, and exceptions; violations of its policy.
        requests: addresses that it asked for.
    """

    def __init__(self, write: io.FileIO, read: io.BufferedReader) -> None:
        self._write, self._read = write, read
        self._number, self._session = 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, page: Path, width: int = 1280, scheme: str = "light") -> None:
        """Load a page, and wait until it is drawn."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        self.errors.clear()
        self.requests.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Press the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def pixels(self) -> NDArray[np.float32]:
        """What is seen: `[height, width, 3]`, from 0 to 1."""
        data = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        return np.asarray(matplotlib.image.imread(io.BytesIO(data)))[:, :, :3]

    def _next(self) -> dict[str, Any]:
        raw = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            if not byte:
                raise BrowserEnded
            raw += byte
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str(params["args"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


class BrowserEnded(Exception):
    """The other end of the pipe is closed."""


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """Start a browser with one tab, and end it."""
    (their_read, our_write), (our_read, their_write) = os.pipe(), os.pipe()
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage"
    flags += " --remote-debugging-pipe --no-first-run"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol wants the descriptors 3 and 4.
        script = f'exec "$0" {flags} "$1" 3<&{their_read} 4>&{their_write}'
        process = subprocess.Popen(
            ["bash", "-c", script, find_browser(), f"--user-data-dir={profile}"],
            pass_fds=(their_read, their_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        with os.fdopen(our_write, "wb", 0) as write, os.fdopen(our_read, "rb") as read:
            try:
                yield Tab(write, read)
            finally:
                process.terminate()
                process.wait(20)
