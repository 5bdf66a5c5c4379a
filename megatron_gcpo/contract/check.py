"""No training on rollouts that the trainer does not recognise."""

from __future__ import annotations

from megatron_gcpo.contract.diagnosis import Evidence, Gaps, diagnose, keeps
from megatron_gcpo.contract.measure import measure
from megatron_gcpo.run import Run


def check_contract(run: Run) -> Gaps:
    """Compare trainer and engine, which holds the pushed weights; collective over all ranks.

    Raises ValueError on every rank when they disagree; the engines then refuse to serve.
    """
    evidence = measure(run)
    if keeps(evidence):
        return evidence.base
    message = explain(evidence)
    if run.leader is not None:
        run.leader.engine.refuse("trainer and engine disagree at the start of the run")
    raise ValueError(message)


def explain(evidence: Evidence) -> str:
    """One line: how far the two sides are apart, why, and what to do."""
    first, *others = diagnose(evidence)
    failing = evidence.base.failing(evidence.limit)
    what = {
        "drawn": "reported with the tokens it drew",
        "scored": "for given tokens",
    }
    gaps = " and ".join(
        f"{what[name]} by {gap.max:.3g} at most, {gap.mean:.3g} on average"
        for name in failing
        for gap in (getattr(evidence.base, name),)
    )
    apart = (
        f"the rollout engine's log-probs differ from the trainer's over {evidence.base.drawn.num_tokens} tokens: {gaps}; "
        f"the limit is {evidence.limit} (rollout.max_logprob_gap)"
        if failing
        else "the rollout engine does not keep to the ids, stops and lengths it was asked for"
    )
    also = "".join(f"; also {cause.factor}, {cause.explains:.0%}" for cause in others if cause.explains >= 0.1)
    return (
        f"training does not start: {apart}. Likely cause: {first.factor} ({first.explains:.0%} of it{also}): "
        f"{first.finding}. To mend it: {first.remedy}. tools/diagnose_mismatch.py shows all measurements"
    )
