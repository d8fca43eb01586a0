"""`outrider` and `python -m outrider`: the command line, which understands Ctrl-C before its imports are done."""

import io
import os
import signal
import sys

from outrider.interrupt import ends_at_once, leave


def main() -> int:
    """Run the command that was given; the exit code."""
    _open_closed_streams()
    _tolerate_other_encodings()
    try:
        with ends_at_once():
            from outrider import cli
        code = cli.main()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, leave)  # threads that end and files that close need no trace either
    except KeyboardInterrupt:
        leave()
    return code


def _open_closed_streams() -> None:
    """A standard stream that was closed by whoever started us is /dev/null: Python has None for it, and the next file
    that is opened would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _tolerate_other_encodings() -> None:
    """Bytes that are not text reach the command, which refuses them in a line; an answer that the terminal's encoding
    cannot show is shown escaped."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


if __name__ == "__main__":
    sys.exit(main())
