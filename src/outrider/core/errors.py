"""The one error a user sees: it says what is wrong and what to do about it, in one line."""

LONGEST = 300  # characters of another library's error that we repeat: its reason comes first, a terminal shows 3 lines

QUOTED = (
    200  # characters of somebody's input that a message repeats: enough to know it again, and an answer stays short
)


class OutriderError(Exception):
    """Bad input, or something the machine cannot give. The command line prints it and exits with 2."""


def one_line(error: BaseException, *, named: bool = False) -> str:
    """An error as part of a line of ours; with `named`, another library's begins with the name of its class."""
    name, text = type(error).__name__, " ".join(str(error).split())[:LONGEST]
    named = named and not isinstance(error, OutriderError)
    return f"{name}: {text}" if named and text else text or name


def quoted(value: object) -> str:
    """Somebody's input as part of a line of ours: as Python writes it, cut where it is long."""
    text = repr(value[: QUOTED + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."
