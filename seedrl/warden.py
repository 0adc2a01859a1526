"""The warden: when the supervisor is gone, however it went, nothing that it started stays.

`python -m seedrl.warden` reads lines on its standard input: `+PGID`, `-PGID` (a process group began, ended) and `!PATH` (a file
that must not outlive the run). The end of the input means that the supervisor has ended or was killed: every group that is
left is killed, grandchildren included, and every file unlinked. It runs in a session of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    paths: set[Path] = set()
    for line in sys.stdin:
        word, rest = line[0], line[1:].rstrip("\n")
        if word == "+":
            groups.add(int(rest))
        elif word == "-":
            groups.discard(int(rest))
        elif word == "!":
            paths.add(Path(rest))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    for path in paths:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
