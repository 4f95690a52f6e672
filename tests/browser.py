"""A headless Chromium, driven by its debugging pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A browser, driven by the messages of its debugging pipe."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing, self._number = os.fdopen(reading, "rb"), writing, 0
        self._session: dict[str, str] = {}

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        """Show a page."""
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def resize(self, width: int, height: int = 900) -> None:
        """Show the page as on a screen of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)

    def value(self, script: str) -> Any:
        """The value of an expression on the page."""
        result = self.call("Runtime.evaluate", expression=script)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression, once it is true."""
        deadline = time.monotonic() + 30
        while not (value := self.value(script)):
            assert time.monotonic() < deadline, (script, self.value("document.body.innerText"))
            time.sleep(0.05)
        return value

    def _message(self) -> bytes:
        content = bytearray()
        while (byte := self._reading.read(1)) != b"\0":
            assert byte, "the browser has ended"
            content += byte
        return bytes(content)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose pipe has the descriptors 3 and 4."""
    assert BROWSER is not None
    their_reading, our_writing = os.pipe()
    our_reading, their_writing = os.pipe()
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
    command = f'exec "$0" {options} --user-data-dir="$1" 3<&{their_reading} 4>&{their_writing}'
    process = subprocess.Popen(
        ["bash", "-c", command, BROWSER, str(folder)],
        pass_fds=[their_reading, their_writing],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_reading)
    os.close(their_writing)
    try:
        yield Browser(our_reading, our_writing)
    finally:
        process.kill()
        process.wait()
        os.close(our_writing)
