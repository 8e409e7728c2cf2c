"""Pictures of the demo: curves made of characters, which look right on any terminal, and screenshots of pages."""

import base64
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from rich.text import Text

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MOST_SECONDS, PAGE_SECONDS, DRAWING_SECONDS, CLOSING_SECONDS = 90, 30, 1, 10
START = """import fcntl, os, sys
fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(fds[0], 3), os.dup2(fds[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""
"""Puts the pipes where the browser expects them, at 3 and 4, and becomes the browser."""
HAS_CONTENT = "document.querySelectorAll('main table tbody tr, main canvas').length > 0"


def curves(line, dots, names, width=72, height=10):
    """Two curves on top of each other on a logarithmic scale: the first as a line, the second as dots."""
    values = [math.log10(value) for value in (*line, *dots)]
    low, high = min(values), max(values)
    canvas = _Canvas(width, height)
    canvas.draw_line([(math.log10(value) - low) / (high - low or 1) for value in line])
    canvas.draw_dots([(math.log10(value) - low) / (high - low or 1) for value in dots])

    text = Text("   loss    ")
    text.append(f"⠤⠒ {names[0]}", style="cyan")
    text.append("    ")
    text.append(f"● {names[1]}", style="bold yellow")
    text.append(" (every few steps)\n")
    for row, cells in enumerate(canvas.cells):
        at = high - (high - low) * row / (height - 1)
        text.append(f"{10**at:7.3f} ┤" if row % 3 == 0 or row == height - 1 else "        │")
        for cell in cells:
            text.append(cell, style="bold yellow" if cell == "●" else "cyan")
        text.append("\n")
    text.append("        └" + "─" * width + "\n")
    last = f"step {len(line)}"
    text.append("         1" + last.rjust(width - 1))
    return text


class _Canvas:
    """A grid of characters; a line takes two by four points of each, in braille."""

    def __init__(self, width, height):
        self.width, self.height = width, height
        self.cells = [[" "] * width for _ in range(height)]

    def draw_line(self, values):
        """Values from 0 to 1, spread over the width."""
        columns = 2 * self.width
        places = [round((1 - _at(values, column / (columns - 1))) * (4 * self.height - 1)) for column in range(columns)]
        for column, place in enumerate(places):
            before = places[max(0, column - 1)]
            step = 1 if place >= before else -1
            for y in range(before + step if place != before else place, place + step, step):
                self._set_point(column, y)

    def draw_dots(self, values, every=4):
        for column in range(0, self.width, every):
            value = _at(values, (2 * column + 0.5) / (2 * self.width - 1))
            self.cells[round((1 - value) * (4 * self.height - 1)) // 4][column] = "●"

    def _set_point(self, x, y):
        bit = (0x01, 0x02, 0x04, 0x40, 0x08, 0x10, 0x20, 0x80)[4 * (x % 2) + y % 4]
        cell = self.cells[y // 4][x // 2]
        self.cells[y // 4][x // 2] = chr((0x2800 if cell == " " else ord(cell)) | bit)


def _at(values, share):
    """The value at a share of the way, between its two neighbours."""
    place = min(1.0, share) * (len(values) - 1)
    left = min(int(place), len(values) - 2) if len(values) > 1 else 0
    right = min(left + 1, len(values) - 1)
    return values[left] + (place - left) * (values[right] - values[left])


def screenshots(pages):
    """Write a picture of each page, a dict of addresses by path, as PNG; return the paths that were written.

    None without a browser, or with one that does not answer.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    found = []
    if browser is None:
        return found
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        contextlib.suppress(OSError, EOFError, KeyError),
        _Browser(browser, profile) as window,
    ):
        for path, url in pages.items():
            path.write_bytes(window.picture(url))
            found.append(path)
    return found


class _Browser:
    """A browser without a window, which is controlled by messages over two pipes (Chrome's DevTools protocol)."""

    def __init__(self, browser, profile):
        to_browser, self._to = os.pipe()
        self._of, from_browser = os.pipe()
        options = ["--headless", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--no-first-run"]
        options += ["--window-size=1280,1000", f"--user-data-dir={profile}"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []  # which Chromium demands of root
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(to_browser), str(from_browser), browser, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest = 0, b""
        self._alarm = threading.Timer(MOST_SECONDS, self._process.kill)

    def __enter__(self):
        self._alarm.start()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError, EOFError, KeyError):
            self._ask("Browser.close")
        self._alarm.cancel()
        try:
            self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._of)

    def picture(self, url):
        """Open a page, wait until it shows something and return a picture of it."""
        page = self._ask("Target.createTarget", url=url)["targetId"]
        session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        end = time.monotonic() + PAGE_SECONDS
        while time.monotonic() < end:
            answer = self._ask("Runtime.evaluate", session, expression=HAS_CONTENT)
            if answer["result"].get("value"):
                break
            time.sleep(0.1)
        time.sleep(DRAWING_SECONDS)
        data = self._ask("Page.captureScreenshot", session, captureBeyondViewport=True)["data"]
        self._ask("Target.closeTarget", targetId=page)
        return base64.b64decode(data)

    def _ask(self, method, session=None, **params):
        """Send a request and return its result; other messages in between are dropped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._to, json.dumps({**message, **({"sessionId": session} if session else {})}).encode() + b"\0")
        while True:
            line, end, rest = self._rest.partition(b"\0")
            if end:
                self._rest = rest
                answer = json.loads(line)
                if answer.get("id") == self._number:
                    return answer["result"]
                continue
            part = os.read(self._of, 1 << 16)
            if not part:
                raise EOFError("the browser has ended")
            self._rest += part
