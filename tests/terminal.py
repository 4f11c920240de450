"""A small terminal: what a program that draws in place leaves on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

import patience
import warm_desk

_PIECE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[()][A-Z0-9]|([\r\n\x08])|([^\x1b\r\n\x08]+)")


ON_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)  # that of this session, which has none yet
sys.modules["__main__"].take_streams([terminal] * 3)
from tightfit.cli import main
sys.exit(main(sys.argv[2:]))
"""


class Screen:
    """Knows what rich's live display uses: cursor up, erase a line, carriage return; anything else is an error."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        for found in _PIECE.finditer(text):
            numbers, code, control, plain = found.groups()
            if plain:
                self._put(plain)
            elif control:
                self._control(control)
            elif code:
                self._escape(numbers, code)

    def _put(self, text: str) -> None:
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)

    def _control(self, control: str) -> None:
        if control == "\r":
            self.column = 0
        elif control == "\x08":
            self.column = max(0, self.column - 1)
        else:
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append("")

    def _escape(self, numbers: str, code: str) -> None:
        count = int(numbers) if numbers.isdigit() else 1
        if code == "A":
            self.row = max(0, self.row - count)
        elif code == "K":
            self.lines[self.row] = "" if numbers == "2" else self.lines[self.row][: self.column]
        elif code not in "mhl":
            raise AssertionError(f"the terminal does not know {code!r}")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


class Terminal:
    """`tightfit …` on a terminal of its own."""

    def __init__(
        self, words: Sequence[str], env: dict[str, str], cwd: Path, columns: int = 110, rows: int = 40
    ) -> None:
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        sized = {key: value for key, value in env.items() if key not in ("COLUMNS", "LINES")}
        self.process = warm_desk.Process(
            os.ttyname(self._theirs), *words, env={**sized, "TERM": "xterm-256color"}, cwd=cwd, code=ON_TERMINAL
        )
        self.screen, self.raw = Screen(columns), ""
        self._torn = b""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def until(self, there: Callable[[str], bool], seconds: float = 90.0) -> str:
        """The screen, once it is so."""
        deadline = patience.now() + seconds
        while not there(self.screen.text):
            assert patience.now() < deadline, f"never so:\n{self.screen.text}"
            if not self.read(0.1) and self.process.poll() is not None:
                assert there(self.screen.text), f"it ended with {self.process.returncode}:\n{self.screen.text}"
        return self.screen.text

    def rest(self, seconds: float = 90.0) -> int:
        """To its end; its exit code."""
        deadline = patience.now() + seconds
        while self.process.poll() is None or self.read(0.05):
            assert patience.now() < deadline, f"it does not end:\n{self.screen.text}"
            self.read(0.05)
        assert self.process.returncode is not None
        return self.process.returncode

    def read(self, seconds: float) -> bool:
        """Take in what has come, waiting for so long at most; False: nothing."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        try:
            data = self._torn + os.read(self._ours, 65536)
        except OSError:  # the other end has closed
            return False
        cut = max(data.rfind(b"\x1b"), len(data) - 4, 0) if data[-1:] != b"\n" else len(data)
        whole = data
        for end in range(len(data), cut - 1, -1):  # a letter, or a sequence, may be torn
            try:
                text = data[:end].decode()
            except UnicodeDecodeError:
                continue
            whole = data[:end]
            break
        else:
            text = data.decode(errors="replace")
        tail = re.search(r"\x1b(\[[?0-9;]*)?$", text)
        if tail:
            text = text[: tail.start()]
            whole = text.encode()
        self._torn = data[len(whole) :]
        self.raw += text
        self.screen.feed(text)
        return True

    def close(self) -> None:
        self.process.kill()
        os.close(self._ours)
        os.close(self._theirs)
