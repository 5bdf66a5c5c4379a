"""The trained policy: the Megatron-Core model, its micro-batches, its token statistics and its updates."""
