"""A headless Chromium, by its debugging protocol over two pipes: what a page looks like and does to who opens it."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
# Nothing is looked up or fetched, whatever a page asks for; nothing of the browser's own either.
WORDS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0


def found() -> str | None:
    """The browser on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A page. events: what the browser said of its own accord, in order."""

    def __init__(self, program: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._count, self._rest = 0, b""
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        self._read, self._write = ours_in, ours_out

        def places() -> None:  # the browser reads 3 and writes 4
            high_in, high_out = os.dup2(theirs_in, 100), os.dup2(theirs_out, 101)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        words = [program, *WORDS, f"--user-data-dir={self._home.name}", "about:blank"]
        self._process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=places, close_fds=False
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._read, False)
        self._session: str | None = None
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._home.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of the protocol."""
        self._count += 1
        asked: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        answer = self._until(lambda said: said.get("id") == asked["id"])
        assert "error" not in answer, f"{method}: {answer}"
        return dict(answer["result"])

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first message that is wanted; the others are kept."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            message, found, rest = self._rest.partition(b"\0")
            if found:
                self._rest = rest
                said: dict[str, Any] = json.loads(message)
                if wanted(said):
                    return said
                self.events.append(said)
                continue
            assert self._process.poll() is None, "the browser has ended"
            try:
                self._rest += os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
        raise TimeoutError("the browser says nothing")

    def look(self, width: int, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """What the page is seen on."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def open(self, path: Path, scripts: bool = True) -> None:
        """Load a file, to the end."""
        self.events.clear()
        self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        if not any(said.get("method") == "Page.loadEventFired" for said in self.events):
            self._until(lambda said: said.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript comes to in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self, path: Path, whole: bool = True) -> None:
        """A PNG of the page, all of it or what is seen at once."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(shot["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
