"""`outrider` and `python -m outrider`: the command line, which understands Ctrl-C before its imports are done."""

import os
import signal
import sys


def main() -> int:
    """Run the command that was given; the exit code."""
    usual = signal.getsignal(signal.SIGINT)
    try:
        if usual is signal.default_int_handler:  # not where the parent process ignores it
            signal.signal(signal.SIGINT, _leave)
        from outrider import cli

        signal.signal(signal.SIGINT, usual)
        code = cli.main()
        if usual is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)  # threads that end and files that close need no trace either
    except KeyboardInterrupt:
        _leave()
    return code


def _leave(*_: object) -> None:
    """End at once: nothing is open yet, or no more. An exception could be swallowed by an import that it interrupts."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
