"""Which experts the embedded engine's model sent each token to, read where the experts receive their tokens."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts$")
"""Names of the modules of a transformers model that hold a layer's routed experts."""
UNKNOWN = -1


class RoutingRecorder:
    """Remembers the routing of the model's last forward pass.

    The experts of every mixture in transformers are one module per layer, called with the flattened tokens, their expert
    ids and the weights of these: what is recorded is what was computed, whatever rule chose it.
    """

    def __init__(self, model: nn.Module, *, num_layers: int) -> None:
        """Hooks on ``model``, which stay. Raises ValueError when no layer of it has experts."""
        self._num_layers = num_layers
        self._last: dict[int, torch.Tensor] = {}
        for name, module in model.named_modules():
            if found := EXPERTS.search(name):
                self._listen(module, int(found.group(1)))
                self._last[int(found.group(1))] = torch.empty(0)
        if not self._last:
            raise ValueError(
                f"rollout.router_replay needs a mixture of experts, but {type(model).__name__} has no routed experts: "
                "set rollout.router_replay: false"
            )

    def _listen(self, experts: nn.Module, layer: int) -> None:
        def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and not v.is_floating_point()]
            assert len(ids) == 1, f"got {len(ids)} integer inputs of {type(module).__name__}, expected the expert ids"
            self._last[layer] = ids[0]

        experts.register_forward_pre_hook(remember, with_kwargs=True)

    def last(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """[R, T, layers, k] int16 of the last forward pass, which had R rows of T tokens; -1 in layers without experts."""
        k = next(iter(self._last.values())).shape[-1]
        routed_RTLk = torch.full((num_rows, num_tokens, self._num_layers, k), UNKNOWN, dtype=torch.int16)
        for layer, ids_Nk in self._last.items():
            assert len(ids_Nk) == num_rows * num_tokens, f"got {len(ids_Nk)} tokens, expected {num_rows} x {num_tokens}"
            routed_RTLk[:, :, layer] = ids_Nk.view(num_rows, num_tokens, k).to("cpu", torch.int16)
        return routed_RTLk


class RoutedTokens:
    """The routing of N requests as decoding goes on, each token's when it was first computed."""

    def __init__(
        self, recorder: RoutingRecorder, owner_N: torch.Tensor, lengths_P: torch.Tensor, max_new_tokens: int
    ) -> None:
        """To be made right after the pass over P prompts, padded on the left; owner_N: which of them a request has."""
        self._recorder = recorder
        self._lengths = lengths_P[owner_N].tolist()
        self._width = int(lengths_P.max())
        prompts_NTLk = recorder.last(len(lengths_P), self._width)[owner_N.cpu()]
        room_NTLk = prompts_NTLk.new_full((len(owner_N), max_new_tokens, *prompts_NTLk.shape[2:]), UNKNOWN)
        self._all = torch.cat([prompts_NTLk, room_NTLk], dim=1)

    def add(self, token: int, rows_R: torch.Tensor) -> None:
        """Token number ``token`` of these requests' completions just went through the model."""
        self._all[rows_R.cpu(), self._width + token] = self._recorder.last(len(rows_R), 1)[:, 0]

    def of(self, row: int, num_tokens: int) -> torch.Tensor:
        """[prompt + T, layers, k] of a request whose completion has ``num_tokens`` tokens; the last one is unknown."""
        routed_TLk = self._all[row, self._width - self._lengths[row] : self._width + num_tokens].clone()
        routed_TLk[-1] = UNKNOWN
        return routed_TLk
