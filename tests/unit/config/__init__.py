"""Tests of megatron_gcpo.config."""
