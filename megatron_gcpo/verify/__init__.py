"""Rewards: verifiers judge completions in a pool of confined worker processes. Model output is hostile input."""
