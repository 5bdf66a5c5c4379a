"""One small file per method, and the table of all of them."""

from megatron_gcpo.methods.base import (
    LossOptions,
    Method,
    MethodOptions,
    Need,
    OverlongOptions,
    clipped_token_loss,
    has_signal,
)
from megatron_gcpo.methods.resolve import METHODS, resolve

__all__ = [
    "METHODS",
    "LossOptions",
    "Method",
    "MethodOptions",
    "Need",
    "OverlongOptions",
    "clipped_token_loss",
    "has_signal",
    "resolve",
]
