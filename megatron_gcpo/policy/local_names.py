"""megatron-bridge's translations for layers without Transformer Engine.

Some of its architectures know parameters only by the names that Transformer Engine's layers give them. The local layers
hold the same parameters elsewhere: a norm that is fused into the projection after it there is a module of its own here,
and experts that are one module there are many here. A name that the bridge does not know is looked up as its twin.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

TWINS = (
    (re.compile(r"\.input_layernorm\.weight$"), r".self_attention.linear_qkv.layer_norm_weight"),
    (re.compile(r"\.pre_mlp_layernorm\.weight$"), r".mlp.linear_fc1.layer_norm_weight"),
    (re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$"), r".experts.\2.\3\1"),
)


@functools.cache
def know_local_names() -> None:
    """From now on the bridge of this process knows them."""
    lookup = MegatronMappingRegistry.megatron_to_hf_lookup

    def look_up(self: Any, megatron_param_name: str) -> Any:
        mapping = lookup(self, megatron_param_name)
        if mapping is not None:
            return mapping
        for local, fused in TWINS:
            twin = local.sub(fused, megatron_param_name)
            if twin != megatron_param_name and (mapping := lookup(self, twin)) is not None:
                mapping.megatron_param = megatron_param_name  # by which it finds the module, and knows an expert
                return mapping
        return None

    MegatronMappingRegistry.megatron_to_hf_lookup = look_up  # pyright: ignore[reportAttributeAccessIssue]
