"""The ``halfbyte`` command: collects the commands and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import sys

import typer

from halfbyte.cli import console
from halfbyte.cli.bench import bench
from halfbyte.cli.eval import evaluate
from halfbyte.cli.generate import generate
from halfbyte.cli.import_gguf import import_gguf
from halfbyte.cli.inspect import inspect
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
app.command("quantize")(quantize)
app.command("inspect")(inspect)
app.command("verify")(verify)
app.command("eval")(evaluate)
app.command("generate")(generate)
app.command("import-gguf")(import_gguf)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point. Exit codes: 0 fine, 1 the check failed, 2 bad input."""
    try:
        app()
    except HalfbyteError as error:
        console.note(f"error: {error}")
        sys.exit(console.EXIT_BAD_INPUT)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        reason = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror or str(error)
        console.note(f"error: {reason}{where}")
        sys.exit(console.EXIT_BAD_INPUT)
