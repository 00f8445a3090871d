"""The ``halfbyte`` command: collects the commands and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import NoReturn

import typer

from halfbyte.cli import console
from halfbyte.cli.bench import bench
from halfbyte.cli.eval import evaluate
from halfbyte.cli.generate import generate
from halfbyte.cli.import_gguf import import_gguf
from halfbyte.cli.import_qserve import import_qserve
from halfbyte.cli.inspect import inspect
from halfbyte.cli.plan import plan
from halfbyte.cli.quantize import quantize
from halfbyte.cli.verify import verify
from halfbyte.errors import HalfbyteError

app = typer.Typer(
    name="halfbyte",
    help="Make, check and run quantized checkpoints of causal language models at half a byte per weight.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan)
app.command("quantize")(quantize)
app.command("inspect")(inspect)
app.command("verify")(verify)
app.command("eval")(evaluate)
app.command("generate")(generate)
app.command("import-gguf")(import_gguf)
app.command("import-qserve")(import_qserve)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point. Exit codes: 0 fine, 1 the check failed, 2 bad input."""
    _settle_streams()
    try:
        code = app(standalone_mode=False)
    except HalfbyteError as error:
        _refuse(str(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        reason = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror or str(error)
        _refuse(f"{reason}{where}")
    except Exception as error:
        # Typer carries its own copy of Click or uses an installed one, by version: known by what it can do.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(console.EXIT_BAD_INPUT)
        _refuse(error.format_message())
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> NoReturn:
    console.note(f"error: {' '.join(message.split())}")
    sys.exit(console.EXIT_BAD_INPUT)


def _settle_streams() -> None:
    """Streams that were closed swallow what is said, and none fails over a character that it cannot show."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if hasattr(signal, "SIGPIPE"):
        # A reader that has seen enough (`| head`) ends the command as any other, not with "the check failed".
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
