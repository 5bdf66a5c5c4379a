"""Unit tests of megatron_gcpo.contract."""
