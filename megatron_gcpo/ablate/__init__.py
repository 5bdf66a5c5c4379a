"""Grids of runs: every cell once, failures apart from the rest, and what the finished ones say together."""
