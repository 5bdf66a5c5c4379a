"""The comparison of trainer and engine on a probe, as configured and with one thing switched at a time. Collective.

Every rank runs the same passes and sees the same numbers, summed over all replicas, so all come to the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from megatron_gcpo.contract.diagnosis import Evidence, Gaps, Switch, TensorDifference, keeps, one_sidedness
from megatron_gcpo.contract.probe import Probe, aligned, draw_probe, prompt_length, with_first_token
from megatron_gcpo.contract.switches import computed_in, fit_temperature, positions_after_gap
from megatron_gcpo.policy.options import DTYPES
from megatron_gcpo.policy.scorer import Scorer
from megatron_gcpo.reshard.check import LogprobGap, logprob_gap
from megatron_gcpo.rollout.engine import Sampling
from megatron_gcpo.run import Run
from megatron_gcpo.types import TokenBatch

NOTHING = LogprobGap(max=0.0, mean=0.0, num_tokens=0)


@runtime_checkable
class ShowsWeights(Protocol):
    """An engine whose tensors can be looked at."""

    def weight(self, name: str) -> torch.Tensor:
        """The tensor it computes with, by its Hugging Face name."""
        ...


def measure(run: Run, *, switch_all: bool = False) -> Evidence:
    """Draw a probe and compare; where the contract is broken (or with ``switch_all``) switch every factor too."""
    leader, policy = run.leader, run.actor.policy
    drawn = draw_probe(leader, run.config, run.topology.replica, policy.vocab_size) if leader else (None, ())
    facts = tuple(dict.fromkeys(fact for facts in _of_leaders(run, drawn[1]) for fact in facts))
    probe: Probe | None = run.topology.broadcast_object(drawn[0])
    rollout = run.config.rollout
    record: dict[str, Any] = {
        "limit": run.gap_limit,
        "sampling": Sampling(
            temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p
        ),
        "trainer_dtype": policy.dtype,
        "engine_dtype": DTYPES[rollout.dtype or run.config.model.dtype],
        "quantized": rollout.quantization != "none",
        "facts": facts,
    }
    if not all(_of_leaders(run, probe is not None)) or probe is None:
        return Evidence(base=Gaps(drawn=NOTHING, scored=NOTHING), **record)
    comparison = _Comparison(run, probe)
    evidence = Evidence(base=comparison.base, **record)
    if keeps(evidence) and not switch_all:
        return evidence
    rounding, precision = comparison.precision()
    return Evidence(
        base=comparison.base,
        one_sided=min(_of_leaders(run, one_sidedness(probe.drawn_n, probe.scored_n))),
        rounding=rounding,
        switches=(
            comparison.temperature(),
            *comparison.tokenizer(),
            *comparison.positions(),
            *precision,
        ),
        tensors=_tensor_differences(run),
        **record,
    )


class _Comparison:
    """One probe, compared again and again."""

    def __init__(self, run: Run, probe: Probe) -> None:
        self._run, self._probe = run, probe
        self._own_n = self._says(probe.batch)
        self.base = self._gaps(self._own_n)

    def temperature(self) -> Switch:
        configured = self._run.config.rollout.temperature
        failing = self.base.failing(self._run.gap_limit) or ("drawn", "scored")

        def gap(temperature: float) -> float:
            gaps = self._gaps(self._says(self._probe.batch, temperature=temperature))
            return max(getattr(gaps, name).mean for name in failing)

        fitted = fit_temperature(gap, configured)
        return Switch(
            factor="temperature",
            setting=f"temperature {fitted:.3g}",
            gaps=self._gaps(self._says(self._probe.batch, temperature=fitted)),
        )

    def tokenizer(self) -> Iterator[Switch]:
        for token_id in (*self._probe.special_ids, None):
            setting = "prompts without their first token" if token_id is None else f"prompts after a token {token_id}"
            gaps = self._gaps(self._says(with_first_token(self._probe.batch, token_id)))
            yield Switch(factor="tokenizer", setting=setting, gaps=gaps)

    def positions(self) -> Iterator[Switch]:
        probe, lengths = self._probe, self._probe.lengths_N
        for shift, direction in ((1, "later"), (-1, "earlier")):
            gaps = Gaps(
                drawn=self._gap(self._own_n, aligned(probe.drawn_n, lengths, shift), ignore_nan=True),
                scored=self._gap(self._own_n, aligned(probe.scored_n, lengths, shift), ignore_nan=True),
            )
            yield Switch(factor="position ids", setting=f"log-probs reported one token {direction}", gaps=gaps)
        rows = [probe.batch.rows([n]) for n in range(probe.batch.num_rows)]
        alone_n = torch.cat([self._says(row) for row in rows])
        yield Switch(factor="position ids", setting="the trainer's sequences unpacked", gaps=self._gaps(alone_n))
        moved = []
        for row in rows:
            with positions_after_gap(self._run.actor.policy, prompt_length(row)) as possible:
                if possible:
                    moved.append(self._says(row))
        if moved:
            setting = "position ids of completions one larger"
            yield Switch(factor="position ids", setting=setting, gaps=self._gaps(torch.cat(moved)))

    def precision(self) -> tuple[LogprobGap | None, tuple[Switch, ...]]:
        """(gap between the trainer in its own precision and the other one, the switch); nothing without the memory for it."""
        policy = self._run.actor.policy
        other = torch.bfloat16 if policy.dtype == torch.float32 else torch.float32
        if not self._has_room(other):
            return None, ()
        self._run.actor.gather_parameters()
        with computed_in(policy, other):
            other_n = self._says(self._probe.batch)
        setting = f"the trainer in {str(other).removeprefix('torch.')}"
        return self._gap(self._own_n, other_n), (Switch(factor="precision", setting=setting, gaps=self._gaps(other_n)),)

    def _has_room(self, dtype: torch.dtype) -> bool:
        policy = self._run.actor.policy
        if policy.platform.name != "cuda":
            return True
        needed = sum(p.numel() for chunk in policy.chunks for p in chunk.module.parameters()) * dtype.itemsize
        spare = torch.tensor([torch.cuda.mem_get_info()[0] - 1.2 * needed], dtype=torch.float64)
        dist.all_reduce(spare, dist.ReduceOp.MIN, group=self._run.topology.world_cpu_pg)
        return bool(spare > 0)

    def _says(self, batch: TokenBatch, temperature: float | None = None) -> torch.Tensor:
        """[n] the trainer's log-probs of the completion tokens."""
        run = self._run
        temperature = run.config.rollout.temperature if temperature is None else temperature
        # a sequence that fills a micro-batch may be scored with one token more
        room = run.config.train.max_tokens_per_micro_batch + 64
        train = run.config.train.model_copy(update={"max_tokens_per_micro_batch": room})
        scorer = Scorer(run.actor.policy, run.topology, train, temperature=temperature)
        return scorer.logprobs(batch).logprobs_T[batch.mask_T.bool()]

    def _gaps(self, trainer_n: torch.Tensor) -> Gaps:
        return Gaps(drawn=self._gap(trainer_n, self._probe.drawn_n), scored=self._gap(trainer_n, self._probe.scored_n))

    def _gap(self, one_n: torch.Tensor, other_n: torch.Tensor, *, ignore_nan: bool = False) -> LogprobGap:
        """Over the tokens of all replicas, the same on all ranks."""
        local = logprob_gap(one_n, other_n, ~(one_n.isnan() | other_n.isnan()) if ignore_nan else None)
        largest = torch.tensor([local.max], dtype=torch.float64)
        sums = torch.tensor([local.mean * local.num_tokens, local.num_tokens], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._run.topology.world_cpu_pg)
        dist.all_reduce(sums, group=self._run.topology.world_cpu_pg)
        replica_size = len(self._run.topology.replica_ranks)
        return LogprobGap(
            max=float(largest), mean=float(sums[0] / sums[1].clamp(min=1)), num_tokens=int(sums[1]) // replica_size
        )


def _tensor_differences(run: Run) -> tuple[TensorDifference, ...] | None:
    """What differs between the trainer's export and the engines' tensors; None when no engine shows them."""
    engine = run.leader.engine if run.leader else None
    shows = isinstance(engine, ShowsWeights)
    found: list[TensorDifference] | None = [] if shows else None
    if engine is not None and engine.control is not None and run.config.rollout.push.fingerprint:
        found = []  # the push compared the fingerprints of all tensors
    for name, tensor in run.actor.export():
        if isinstance(engine, ShowsWeights) and found is not None:
            held = engine.weight(name)
            wanted = tensor.to(held)
            if not torch.equal(held, wanted):
                relative = (held - wanted).float().norm() / wanted.float().norm()
                found.append(TensorDifference(name=name, relative=float(relative)))
    seen = [differences for differences in _of_leaders(run, found) if differences is not None]
    if not seen:
        return None
    return tuple({d.name: d for differences in seen for d in differences}.values())


def _of_leaders[T](run: Run, value: T) -> list[T]:
    """What every leader holds, on all ranks."""
    return run.topology.broadcast_object_to_all(run.topology.gather_objects_from_leaders(value))
