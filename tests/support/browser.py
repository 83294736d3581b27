"""A page in headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol)."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REQUIRE = "GRPO_REPLAY_REQUIRE_BROWSER"
"""With this variable at 1, as in CI, a missing browser is a failure."""

PATIENCE_SECONDS = 30.0
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded")
_TO_BROWSER, _FROM_BROWSER = 3, 4  # the descriptors that Chromium reads and writes


class Browser:
    """One page. `complaints` has every exception, console error and blocked resource so far."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol. Raises RuntimeError if it reports an error."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._listen(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = self._answers.read(1 << 16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def _listen(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        is_error = method == "Runtime.consoleAPICalled" and parameters["type"] == "error"
        if is_error or method in _COMPLAINTS:
            self.complaints.append(json.dumps(parameters))

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        for address, test in (("about:blank", "==="), (url, "!==")):
            self.call("Page.navigate", url=address)
            self.wait_for(
                f"document.readyState === 'complete' && location.href {test} 'about:blank'"
            )

    def value(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression. Raises RuntimeError if it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        until(lambda: bool(self.value(expression)), expression)

    def click(self, selector: str) -> None:
        """A click of the mouse on the middle of the first element of a CSS selector."""
        x, y = self.value(
            f"""(() => {{ const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{ block: "center" }}); const box = found.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", **at)

    def type(self, selector: str, text: str) -> None:
        """Click an input and type into it."""
        self.click(selector)
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


def until(is_true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < end, f"not so after {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.02)


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """A browser; skips the test if there is none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        missing = "no Chromium: apt-get install chromium"
        assert os.environ.get(REQUIRE) != "1", missing
        pytest.skip(missing)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        ours_out, theirs_in = reversed(os.pipe())
        ours_in, theirs_out = os.pipe()
        # High numbers, so that the shell below does not overwrite one with the other.
        given = [fcntl.fcntl(each, fcntl.F_DUPFD, 20) for each in (theirs_in, theirs_out)]
        redirect = f'exec "$@" {_TO_BROWSER}<&{given[0]} {_FROM_BROWSER}>&{given[1]}'
        command = [program, *_OPTIONS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", *command], pass_fds=given, stderr=subprocess.DEVNULL
        )
        for each in (*given, theirs_in, theirs_out):
            os.close(each)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            process.terminate()
            process.wait()
            os.close(ours_out)
