"""One small file per method, and the table of all of them."""

from megatron_gcpo.methods.base import (
    EMBEDDING_NEEDS,
    LossOptions,
    Method,
    MethodOptions,
    Need,
    OverlongOptions,
    has_signal,
)
from megatron_gcpo.methods.composition import check_run
from megatron_gcpo.methods.lengths import Longest, longest_sequences
from megatron_gcpo.methods.phase import Scope
from megatron_gcpo.methods.prepare import Memory, prepare, without_unsampled
from megatron_gcpo.methods.resolve import FAMILIES, METHODS, resolve

__all__ = [
    "EMBEDDING_NEEDS",
    "FAMILIES",
    "METHODS",
    "Longest",
    "LossOptions",
    "Memory",
    "Method",
    "MethodOptions",
    "Need",
    "OverlongOptions",
    "Scope",
    "check_run",
    "has_signal",
    "longest_sequences",
    "prepare",
    "resolve",
    "without_unsampled",
]
