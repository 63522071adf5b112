"""Headless Chromium for tests, through chromedriver's HTTP interface: no package is needed, only Debian's two
programs."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
REASON = "a browser is needed: apt-get install chromium chromium-driver"
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
]
_SECONDS_TO_START = 30.0


class Browser:
    """One session of a browser."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, path: Path) -> None:
        """Show a file."""
        self._post("url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the script returns."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int = 900) -> None:
        """The size of the page, below the window's 500 pixels too."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._post("goog/cdp/execute", {"cmd": name, "params": parameters})

    def console(self) -> list[str]:
        """Errors and warnings of the page, those of its policy included, since the last call."""
        return [
            f"{entry['level']}: {entry['message']}" for entry in self._post("se/log", {"type": "browser"})
        ]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since the last call."""
        events = [
            json.loads(entry["message"])["message"] for entry in self._post("se/log", {"type": "performance"})
        ]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def wait_for(self, script: str, seconds: float = 10.0) -> Any:
        """The first true value of an expression."""
        until = time.monotonic() + seconds
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < until, f"{script} was not true within {seconds} s"
            time.sleep(0.05)
        return value

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _call(f"{self._session}/{path}", body)


def _call(address: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.loads(error.read())["value"]["message"]) from error


@contextmanager
def open_browser(*arguments: str) -> Iterator[Browser]:
    """A browser that ends with the block, with everything it started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    server = f"http://127.0.0.1:{port}"
    session = ""
    try:
        until = time.monotonic() + _SECONDS_TO_START
        while True:
            with suppress(OSError):
                _call(f"{server}/status")
                break
            assert time.monotonic() < until, "chromedriver did not start"
            time.sleep(0.1)
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, *arguments]}
        logs = {"browser": "ALL", "performance": "ALL"}
        capabilities = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        session = f"{server}/session/{_call(f'{server}/session', {'capabilities': {'alwaysMatch': capabilities}})['sessionId']}"  # noqa: E501
        yield Browser(session)
    finally:
        if session:
            with suppress(OSError, AssertionError):
                _call(session, method="DELETE")
        driver.terminate()
        driver.wait(10)
