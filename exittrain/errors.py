"""The two ways a run ends early on purpose, with the exit code each one gets, and words for messages."""

from __future__ import annotations


class InputError(ValueError):
    """What the user gave cannot be used. One line: the thing, and the remedy. Exit code 2, nothing written."""

    exit_code = 2


class Interrupted(RuntimeError):
    """Stopped by a signal with its state saved: run the same command again to go on. Exit code 75."""

    exit_code = 75


def nearest(name: str, known: list[str]) -> str:
    """`, did you mean 'x'?` for the known name closest to `name`, or an empty string."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def first_line(error: BaseException) -> str:
    """`KeyError: 'x'`: the kind of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
