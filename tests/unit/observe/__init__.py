"""Tests of megatron_gcpo.observe."""
