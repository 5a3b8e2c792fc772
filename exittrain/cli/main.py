"""`exittrain VERB ...`. Exit codes: 0 done, 1 failed, 2 bad input (one line), 75 interrupted with its state saved."""

from __future__ import annotations

import errno
import sys
from typing import NoReturn

import typer

from exittrain.cli import export, stages, submit, tools
from exittrain.errors import InputError, Interrupted

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
export.register(app)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; never returns."""
    given = sys.argv[1:] if arguments is None else arguments
    given = [argument for argument in given if not argument.startswith("--local_rank")]
    try:
        app(args=given, prog_name="exittrain")
    except InputError as error:
        _leave(f"exittrain: {error}", InputError.exit_code)
    except Interrupted as error:
        _leave(f"exittrain: {error}", Interrupted.exit_code)
    except KeyboardInterrupt:
        _leave("exittrain: interrupted", Interrupted.exit_code)
    except Exception as error:
        if not _disk_is_full(error):
            raise
        _leave("exittrain: no space left on the disk: make room and run the same command again, it goes on", 1)
    sys.exit(0)


def _disk_is_full(error: BaseException | None) -> bool:
    """Also where it only began there: torch and safetensors answer a failed write with errors of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if f"os error {errno.ENOSPC}" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _leave(line: str, code: int) -> NoReturn:
    print(line, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
