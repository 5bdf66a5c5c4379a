"""Sampling against transformers' own generate and plain forward passes."""
