"""Pushing weights and noticing when they did not arrive."""
