"""The package's version: a module of its own, as every room may ask for it."""

VERSION = "0.1.0"
