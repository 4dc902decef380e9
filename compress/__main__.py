"""python -m compress, and the command `compress`: an interrupt while the libraries are imported is one line, too."""

import os
import signal
from types import FrameType

STOPPED = 130  # what a shell reports for a command that was interrupted


def stop(number: int, frame: FrameType | None) -> None:
    """Leave at once: nothing has begun. An exception would pass through imports of C++, which not all survive."""
    os.write(2, b"compress: stopped\n")
    os._exit(STOPPED)


def main() -> None:
    """Import the command line and run it."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # not where a shell has told its background jobs to ignore interrupts
        signal.signal(signal.SIGINT, stop)
    from compress.cli import main as cli

    signal.signal(signal.SIGINT, usual)
    try:
        cli.main()
    except KeyboardInterrupt:
        stop(signal.SIGINT, None)


if __name__ == "__main__":
    main()
