"""All parts of the chain, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from megatron_gcpo.config.named import by_name
from megatron_gcpo.methods.token_credit import covariance, cuts, flow, polarity
from megatron_gcpo.methods.token_credit.base import TokenCredit

TOKEN_CREDITS: Mapping[str, TokenCredit] = {
    "cw": covariance.TOKEN_CREDIT,
    "opefo": flow.TOKEN_CREDIT,
    "papo": polarity.TOKEN_CREDIT,
    "clip_cov": cuts.CLIP_COV,
    "kl_cov": cuts.KL_COV,
}

TokenCreditOptions = Annotated[
    Annotated[
        covariance.CovarianceOptions | flow.FlowOptions | polarity.PolarityOptions | cuts.ClipCov | cuts.KlCov,
        Field(discriminator="name"),
    ],
    BeforeValidator(by_name),
]
