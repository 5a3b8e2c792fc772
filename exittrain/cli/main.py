"""`exittrain VERB ...`. Exit codes: 0 done, 1 failed, 2 bad input (one line), 75 interrupted with its state saved."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Any, NoReturn

import typer

from exittrain.cli import export, stages, submit, sync, tools
from exittrain.errors import InputError, Interrupted, first_line
from exittrain.runtime import watch
from exittrain.runtime.signals import StopFlag, Stopped
from exittrain.runtime.slurm import is_one_of_several

QUIET = ("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch prints pages about a rank that has gone: ours is one line
PATH_FAULTS = (
    errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
app = typer.Typer(
    help="Train draft models for speculative decoding on the trees they will really draw, and prove the gain.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
stages.register(app)
tools.register(app)
submit.register(app)
sync.register(app)
export.register(app)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; never returns."""
    stop = StopFlag().install(leave=_leave_from_a_thread, at_once=not is_one_of_several(os.environ))
    os.environ.setdefault(*QUIET)
    given = sys.argv[1:] if arguments is None else arguments
    code, told = _run([argument for argument in given if not argument.startswith("--local_rank")])
    stop.heed()  # what is done is done: a signal while the process ends changes nothing
    watch.leave(code, told)
    sys.exit(code)


def _run(arguments: list[str]) -> tuple[int, str]:
    """The exit code, and for the other ranks the reason of one that is not 0, which this rank has printed."""
    try:
        answer = app(args=arguments, prog_name="exittrain", standalone_mode=False)
        return (answer if isinstance(answer, int) else 0), ""  # a verb's own exit code, or nothing
    except (InputError, Interrupted) as error:
        return _say(str(error), error.exit_code)
    except Stopped as signal:
        return _say(str(signal), Interrupted.exit_code)
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own errors, which have no public base class
            return _usage(error)
        if _disk_is_full(error):
            return _say("no space left on the disk: make room and run the same command again, it goes on", 1)
        if (fault := _path_fault(error)) is not None:
            return _say(fault, InputError.exit_code)
        ending = watch.explain(error)
        if ending is not None:
            return _say(ending.line, ending.code)
        if not watch.is_on():
            raise
        watch.depart()
        traceback.print_exc()
        return 1, first_line(error)


def _usage(error: Any) -> tuple[int, str]:
    """A command line that typer cannot read, in one line; without any argument, the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return InputError.exit_code, ""
    context = getattr(error, "ctx", None)
    message = " ".join(error.format_message().split()).rstrip(".")
    return _say(f"{message}: see `{context.command_path if context else 'exittrain'} --help`", InputError.exit_code)


def _disk_is_full(error: BaseException | None) -> bool:
    """Also where it only began there: torch and safetensors answer a failed write with errors of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(f"os error {number}" in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _path_fault(error: BaseException) -> str | None:
    """One line about a file that may not be read or written, or a folder in its place; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in PATH_FAULTS or error.filename is None:
        return None
    path = error.filename if error.filename2 is None else error.filename2  # of a rename, what it was to become
    return f"{path}: {(error.strerror or 'cannot be used').lower()}: put it right and run the same command again"


def _say(line: str, code: int) -> tuple[int, str]:
    watch.depart()
    print(f"exittrain: {line}", file=sys.stderr)
    return code, line


def _leave_from_a_thread(line: str) -> NoReturn:
    """The main thread is in C and does not see the signal: joining the ranks, or importing from a slow disk."""
    code, told = _say(line, Interrupted.exit_code)
    watch.leave(code, told)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
