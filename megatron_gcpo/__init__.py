"""Group Cooperative Policy Optimization and other RLVR methods on Megatron-Core."""

__version__ = "0.1.0"
