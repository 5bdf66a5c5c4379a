"""How the bytes of a bucket reach the processes that hold the engine's weights: one small file per way.

An *outlet* is the pusher's end, an *inlet* the worker's. An outlet owns two buffers of one bucket each, so that one can be
filled while the other is delivered. A section is the part (offset, bytes) of a buffer that one worker gets.
"""

from megatron_gcpo.reshard.transport.base import Inlet, Outlet, Section
from megatron_gcpo.reshard.transport.table import make_outlet, open_inlet

__all__ = ["Inlet", "Outlet", "Section", "make_outlet", "open_inlet"]
