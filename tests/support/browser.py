"""A headless Chromium, driven through the pipe of its DevTools protocol.

Needs no further package: where no Chromium is installed, tests skip.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
FLAGS = (
    '--headless=new',
    '--remote-debugging-pipe',
    '--no-sandbox',
    '--disable-gpu',
    '--disable-dev-shm-usage',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-extensions',
    '--no-first-run',
    '--hide-scrollbars',
)
ANSWER_SECONDS = 60.0


def find_chromium() -> str | None:
    """Path of an installed Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a running Chromium.

    Args:
        send: File descriptor that Chromium reads from.
        receive: File descriptor that it writes to.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._rest, self._number, self._session = b'', 0, ''
        self.events: list[dict[str, Any]] = []
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        self._session = self.call(
            'Target.attachToTarget', targetId=target, flatten=True
        )['sessionId']
        for domain in ('Page', 'Runtime', 'Network', 'Log'):
            self.call(f'{domain}.enable')

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        self._number += 1
        message: dict[str, Any] = {
            'id': self._number,
            'method': method,
            'params': params,
        }
        if self._session:
            message['sessionId'] = self._session
        os.write(self._send, json.dumps(message).encode() + b'\0')
        while True:
            answer = self._next()
            if answer.get('id') == self._number:
                assert 'error' not in answer, (method, answer['error'])
                return answer['result']
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while b'\0' not in self._rest:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._receive], [], [], max(left, 0))
            assert ready, 'Chromium does not answer'
            chunk = os.read(self._receive, 1 << 20)
            assert chunk, 'Chromium has ended'
            self._rest += chunk
        text, self._rest = self._rest.split(b'\0', 1)
        return json.loads(text)

    def open(self, path: pathlib.Path, width: int, height: int, dark: bool) -> None:
        """Shows a file in a window of so many pixels."""
        self.call(
            'Emulation.setDeviceMetricsOverride',
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
        self.call('Emulation.setEmulatedMedia', features=[scheme])
        self.events.clear()
        self.call('Page.navigate', url=path.resolve().as_uri())
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.run('document.readyState') != 'complete':
            assert time.monotonic() < deadline, f'{path} does not load'
            time.sleep(0.02)

    def run(self, program: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            'Runtime.evaluate',
            expression=program, returnByValue=True, awaitPromise=True,
        )  # fmt: skip
        assert 'exceptionDetails' not in answer, answer['exceptionDetails']
        return answer['result'].get('value')

    def settle(self) -> None:
        """Waits until two frames have been drawn."""
        frame = 'new Promise(requestAnimationFrame)'
        self.run(f'{frame}.then(() => {frame})')

    def press(self, key: str, shift: bool = False) -> None:
        """A key of the keyboard, pressed and left."""
        text = key if len(key) == 1 else {'Enter': '\r', 'Space': ' '}.get(key, '')
        code = _CODES.get(key, ord(key.upper()) if len(key) == 1 else 0)
        name = ' ' if key == 'Space' else key
        common = {
            'key': name,
            'windowsVirtualKeyCode': code,
            'modifiers': 8 * shift,
        }
        down = {'text': text} if text else {}
        kind = 'keyDown' if text else 'rawKeyDown'
        self.call('Input.dispatchKeyEvent', type=kind, **common, **down)
        self.call('Input.dispatchKeyEvent', type='keyUp', **common)

    def point(self, x: float, y: float, click: bool = False) -> None:
        """Moves the mouse to a place of the window, and clicks there."""
        kinds = ['mouseMoved', *(['mousePressed', 'mouseReleased'] if click else [])]
        for kind in kinds:
            pressed = {} if kind == 'mouseMoved' else {'button': 'left'}
            self.call(
                'Input.dispatchMouseEvent',
                type=kind, x=x, y=y, clickCount=int(kind != 'mouseMoved'), **pressed,
            )  # fmt: skip

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drags the mouse from one place of the window to another one."""
        for kind, (x, y) in (
            ('mouseMoved', start),
            ('mousePressed', start),
            ('mouseMoved', end),
            ('mouseReleased', end),
        ):
            button = 'left' if kind != 'mouseMoved' or (x, y) == end else 'none'
            self.call(
                'Input.dispatchMouseEvent',
                type=kind, x=x, y=y, button=button, buttons=1, clickCount=1,
            )  # fmt: skip

    def problems(self) -> list[Any]:
        """Exceptions, console errors and requests to a network so far."""
        self.run('0')
        found: list[Any] = []
        for event in self.events:
            method, params = event.get('method', ''), event.get('params', {})
            if method == 'Runtime.exceptionThrown':
                found.append(params['exceptionDetails'])
            elif method == 'Log.entryAdded' and params['entry']['level'] == 'error':
                found.append(params['entry'])
            elif method == 'Network.requestWillBeSent':
                url = params['request']['url']
                if not url.startswith(('file:', 'data:', 'about:')):
                    found.append(url)
        return found


_CODES = {
    'Tab': 9, 'Enter': 13, 'Escape': 27, 'Space': 32, 'PageUp': 33, 'PageDown': 34,
    'End': 35, 'Home': 36, 'ArrowLeft': 37, 'ArrowUp': 38, 'ArrowRight': 39,
    'ArrowDown': 40,
}  # fmt: skip


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A Chromium with one page, which ends with the block."""
    path = find_chromium()
    assert path is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # It reads from descriptor 3 and writes to 4.
        start = (
            f'import os, sys; os.dup2(os.dup({theirs_out}), 20); '
            f'os.dup2({theirs_in}, 3); os.dup2(20, 4); '
            'os.execv(sys.argv[1], sys.argv[1:])'
        )
        options = [*FLAGS, f'--user-data-dir={folder}', 'about:blank']
        process = subprocess.Popen(
            [sys.executable, '-I', '-S', '-c', start, path, *options],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
