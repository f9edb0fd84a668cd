"""A headless Chromium driven over its debugging pipe: no driver package, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Page:
    """One tab: evaluate JavaScript, take screenshots."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read, self._write = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        raw = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "the browser has gone"
            raw += byte
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.console.append(event["params"]["entry"]["text"])

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 90.0) -> Any:
        """The expression's value once it is true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError(f"{expression} stayed false; console: {self.console}")

    def size(self, width: int, height: int, *, dark: bool = False, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A fresh browser with a profile of its own."""
    name = next((found for n in NAMES if (found := shutil.which(n))), None)
    assert name is not None, "no Chromium: apt-get install chromium"
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def plumb() -> None:
        """The browser reads commands from fd 3 and writes to fd 4; ours may be in the way, so via higher numbers."""
        commands, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_read, from_write))
        os.dup2(commands, 3)
        os.dup2(answers, 4)

    process = subprocess.Popen(
        [name, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
         "--remote-debugging-pipe", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False,
        preexec_fn=plumb,
    )  # fmt: skip
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(from_read, to_write)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
