"""Chromium without a window, driven by its DevTools protocol over a pair of pipes (no WebSocket library is needed)."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One tab. profile: an empty folder.

    complaints: errors and warnings of the console, and requests to other places. dialogs: what was asked; the answer is yes.
    """

    def __init__(self, profile):
        to_read, self.to_write = os.pipe()
        self.to_hear, to_say = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        # The program reads commands from descriptor 3 and writes to 4.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_say}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, PROGRAM, *options, "about:blank"],
            pass_fds=(to_read, to_say), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read), os.close(to_say)
        self.number, self.rest, self.session, self.complaints, self.base = 0, b"", None, [], ""
        self.dialogs = []
        end = time.monotonic() + 60
        while not (tabs := [t for t in self._targets() if t["type"] == "page"]):
            assert time.monotonic() < end, "Chromium opened no tab"
            time.sleep(0.05)
        target = tabs[0]["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _targets(self):
        return self.call("Target.getTargets")["targetInfos"]

    def _receive(self):
        end = time.monotonic() + 60
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.to_hear], [], [], end - time.monotonic())
            data = os.read(self.to_hear, 1 << 16) if ready else b""
            assert data, "Chromium does not answer"
            self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def _send(self, method, parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_write, json.dumps(message).encode() + b"\0")

    def call(self, method, **parameters):
        """Send a command. -> its result"""
        self._send(method, parameters)
        number = self.number
        while (got := self._receive()).get("id") != number:
            self._notice(got.get("method"), got.get("params", {}))
        assert "error" not in got, got
        return got["result"]

    def _notice(self, method, about):
        if method == "Page.javascriptDialogOpening":  # whether to leave the page, for example
            self.dialogs.append(about["message"] or about["type"])
            self._send("Page.handleJavaScriptDialog", {"accept": True})
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(about["exceptionDetails"]["exception"].get("description"))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.complaints.append(str(about["args"]))
        elif method == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if not url.startswith((self.base, "data:", "about:")):
                self.complaints.append(f"request to {url}")

    def evaluate(self, script):
        """-> the value of a JavaScript expression"""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, (script, answer)
        return answer["result"].get("value")

    def wait(self, script, seconds=20):
        """Wait until the expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"!!({script})"):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)

    def open(self, url, width=1280, height=900):
        """Load a page."""
        self.base = url
        self.size(width, height)
        self.call("Page.navigate", url=url)
        self.wait(
            f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'"
        )

    def size(self, width, height=900):
        """Width and height of the screen in pixels; narrow ones are phones."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 500,
        )  # fmt: skip

    def type(self, text):
        """Enter a text into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        """Press and release a key: Enter, Escape, Tab. modifiers: 8 is Shift."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"Enter": {"text": "\r"}}.get(key, {})
        same = dict(key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers)
        self.call("Input.dispatchKeyEvent", type="keyDown", **same, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **same)

    def picture(self, file):
        """Write what the screen shows as PNG."""
        file.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def close(self):
        """End the program."""
        self.session = None
        self.call("Browser.close")
        self.process.wait(20)
        os.close(self.to_write), os.close(self.to_hear)
