"""Measurements as data: each benchmark returns rows, ours and the baseline's from one run."""
