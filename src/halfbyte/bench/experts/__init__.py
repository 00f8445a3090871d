"""Grouped products of a mixture's experts, timed side by side."""
