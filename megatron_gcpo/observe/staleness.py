"""How old the policies are that drew a group's tokens."""

from __future__ import annotations

import numpy as np

from megatron_gcpo.observe.tally import Tally
from megatron_gcpo.types import Group


def staleness(group: Group, step: int, max_lag: int) -> Tally:
    """lag/share_0 to lag/share_<max_lag>: shares of the tokens by version of the weights in force minus the one that drew
    them; lag/mean, in steps; lag/mixed_share: of rollouts that more than one version drew.
    """
    tally = Tally()
    lags_T = step - np.concatenate([rollout.versions_T for rollout in group.rollouts])
    for lag in range(max_lag + 1):
        tally.add(f"lag/share_{lag}", (lags_T == lag).astype(float).tolist())
    tally.add("lag/mean", lags_T.astype(float).tolist())
    mixed = [float(rollout.versions_T.min() < rollout.versions_T.max()) for rollout in group.rollouts]
    tally.add("lag/mixed_share", mixed)
    return tally
