"""The one error a user sees: it says what is wrong and what to do about it, in one line."""


class OutriderError(Exception):
    """Bad input, or something the machine cannot give. The command line prints it and exits with 2."""
