"""Where the `seedrl` command begins: Ctrl-C is exit 130 from the first import on, when there is nothing to stop yet."""

import os
import signal

signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

from seedrl.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
