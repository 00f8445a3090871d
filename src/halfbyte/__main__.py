"""``python -m halfbyte``."""

from halfbyte.cli.app import main

main()
