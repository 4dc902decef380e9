"""python -m compress, and the command `compress`: an interrupt while the libraries are imported is one line, too.

`python -m` (torchrun, too) puts the working directory first where modules are looked for. What lies there may be
anybody's, so it is taken out, unless this package lies there or PYTHONPATH names it as well.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__" and not sys.flags.safe_path:
    with suppress(OSError):  # a directory that was removed
        if sys.path[0] == os.getcwd() != HOME:
            del sys.path[0]

# Exit codes that shells report for a command that such a signal ends, and the line to print.
CODES = {
    signal.SIGINT: (130, b"compress: stopped\n"),
    signal.SIGTERM: (143, b"compress: stopped by SIGTERM\n"),
    signal.SIGHUP: (129, b"compress: stopped by SIGHUP, as of a terminal that was closed\n"),
}


def stop(number: int, frame: FrameType | None) -> None:
    """Leave at once: nothing has begun. An exception would pass through imports of C++, which not all survive."""
    code, line = CODES[signal.Signals(number)]
    with suppress(OSError):  # standard error is closed
        os.write(2, line)
    os._exit(code)


def main() -> None:
    """Import the command line and run it."""
    usual = {number: signal.getsignal(number) for number in CODES}
    for number, handler in usual.items():
        if handler in (signal.default_int_handler, signal.SIG_DFL):  # a shell has its background jobs ignore interrupts
            signal.signal(number, stop)
    from compress.cli import main as cli

    for number, handler in usual.items():
        signal.signal(number, handler)
    try:
        cli.main()
    except KeyboardInterrupt:
        stop(signal.SIGINT, None)


if __name__ == "__main__":
    main()
