"""Configuration: frozen records (records), YAML composition (load), cross-stage checks (checks)."""

from megatron_gcpo.config.load import load, validate
from megatron_gcpo.config.records import Config, Record

__all__ = ["Config", "Record", "load", "validate"]
