"""A real Chromium, driven by chromedriver over its plain HTTP protocol (W3C WebDriver)."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import until

from trainer.host.ports import free_port

MISSING = shutil.which("chromedriver") is None or shutil.which("chromium") is None
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window."""

    def __init__(self, port: int, *, dark: bool, width: int, network: bool) -> None:
        self._address = f"http://127.0.0.1:{port}"
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={width},1000",
        ]
        if not network:
            arguments.append("--host-resolver-rules=MAP * ~NOTFOUND")
        options = {"args": arguments, "binary": shutil.which("chromium")}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        until(self._ready)
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def _ready(self) -> bool:
        try:
            return bool(self._call("GET", "/status")["ready"])
        except OSError:
            return False

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def command(self, name: str, **parameters: Any) -> Any:
        """Call a method of the DevTools protocol."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, address: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page and return its result."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        found = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(b64decode(found["data"]))

    def messages(self) -> list[str]:
        """Return what the console of the page has got since the last call."""
        return [each["message"] for each in self._call("POST", f"{self._session}/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._call("DELETE", self._session)


@contextmanager
def browser(*, dark: bool = False, width: int = 1280, network: bool = False) -> Iterator[Browser]:
    """Start a browser with one window; without ``network`` it resolves no name."""
    port = free_port()
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        window = Browser(port, dark=dark, width=width, network=network)
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait()
