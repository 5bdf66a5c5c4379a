"""Tests of megatron_gcpo.verify."""
