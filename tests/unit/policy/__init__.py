"""Tests of megatron_gcpo.policy."""
