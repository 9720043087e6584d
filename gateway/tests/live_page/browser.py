"""A WebDriver client for headless Chromium, as far as the check needs one."""

import base64
import http.client
import json
import pathlib
import re
import subprocess
import tempfile

PATIENCE_S = 60
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c"}


class Browser:
    """Use as a context: driver and browser end with it."""

    def __enter__(self):
        self.directory = tempfile.TemporaryDirectory()
        log = pathlib.Path(self.directory.name, "driver.log")
        with log.open("wb") as output:
            self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=output, stderr=output)
        try:
            self.port = self.listening(log)
            flags = [*FLAGS, f"--user-data-dir={self.directory.name}/profile"]
            capabilities = {
                "goog:chromeOptions": {"args": flags},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            answer = self.call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
            self.session = f"/session/{answer['sessionId']}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        try:
            if hasattr(self, "session"):
                self.call("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait()
            self.directory.cleanup()

    def listening(self, log):
        import time

        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            found = re.search(r"started successfully on port (\d+)", log.read_text())
            if found:
                return int(found[1])
            time.sleep(0.05)
        raise SystemExit(f"chromedriver did not start: {log.read_text()}")

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request(method, path, json.dumps(body) if body is not None else None)
        answer = json.loads(connection.getresponse().read())["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise SystemExit(f"browser: {answer['error']}: {answer['message']}")
        return answer

    def command(self, path, body=None):
        return self.call("POST", f"{self.session}/{path}", body or {})

    def open(self, url):
        self.command("url", {"url": url})

    def script(self, text, *arguments):
        """The result of a function body."""
        return self.command("execute/sync", {"script": text, "args": list(arguments)})

    def devtools(self, name, **parameters):
        return self.command("goog/cdp/execute", {"cmd": name, "params": parameters})

    def press(self, *keys):
        """Presses keys, or the characters of texts, at the focus."""
        characters = [c for key in keys for c in ([KEYS[key]] if key in KEYS else key)]
        actions = [{"type": kind, "value": c} for c in characters for kind in ("keyDown", "keyUp")]
        self.command("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def resize(self, width, height=900):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def colours(self, scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path):
        """The whole page as a PNG file."""
        picture = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        pathlib.Path(path).write_bytes(base64.b64decode(picture["data"]))

    def problems(self):
        """Errors in the console since the last call."""
        lines = self.command("se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] == "SEVERE"]
