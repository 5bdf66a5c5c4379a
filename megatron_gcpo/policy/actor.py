"""The trained policy as the step sees it: log-probabilities of a batch, one optimizer update on it, its weights by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.config.records import TrainConfig
from megatron_gcpo.policy import adam, options, pack, scale
from megatron_gcpo.policy.model import Policy
from megatron_gcpo.policy.scorer import Scorer, last_of
from megatron_gcpo.reshard.gather import export_hf
from megatron_gcpo.types import TokenBatch, TokenStats, UpdateStats

TokenLoss = Callable[[TokenStats, TokenBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""(statistics, batch) of one micro-batch of whole sequences, both on the device -> ([T] loss before weights, differentiable;
[T] values to report under their names). Called with T = 0 too."""


class Actor(Scorer):
    """The policy of one replica with its optimizer. Its methods are collective and get the same batch on all its ranks."""

    def __init__(
        self,
        policy: Policy,
        topology: Topology,
        train: TrainConfig,
        *,
        temperature: float,
        total_updates: int,
        router_replay: bool = False,
    ) -> None:
        """total_updates: optimizer updates of the whole run, the default length of the learning-rate schedule.

        Raises ValueError for optimizer or scheduler options that do not exist or do not fit, and for a policy whose
        routers cannot replay.
        """
        super().__init__(policy, topology, train, temperature=temperature, router_replay=router_replay)
        self.optimizer = _optimizer(policy, train)
        self.scheduler = _scheduler(self.optimizer, train, total_updates)
        self.num_updates = 0
        """Updates applied since the run began."""
        self.num_skipped = 0
        """Updates refused since the run began because the loss or the gradient was not finite."""

    def update(self, batch: TokenBatch, token_loss: TokenLoss, *, entropies: bool = False) -> UpdateStats:
        """One optimizer step on sum over replicas of sum(batch.weights_T * token_loss).

        Each replica passes its own batch with weights_T (policy.scale); its size may differ, or be zero. Without a finite
        loss and gradient nothing changes but ``num_skipped``, and the learning-rate schedule does not advance. Nor does
        anything change when no replica has a token to train (every group filtered out): momentum and weight decay
        alone are no update. That is no skipped step: its loss and gradient are 0.

        entropies: whether the result tells the entropy at every token, which this pass knows anyway.
        """
        assert batch.weights_T is not None, "got a batch without weights_T, expected policy.scale.weights to have run"
        micro = self._micro_batches(batch)
        self._set_training(True)
        for chunk in self.policy.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        factor = scale.loss_factor(len(micro), self.topology.dp_size, self.topology.cp_size)
        seen: list[torch.Tensor] = []

        def report(part: pack.MicroBatch, stats: TokenStats) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            assert part.batch.weights_T is not None
            loss_T, values = token_loss(stats, part.batch)
            if entropies:
                seen.append(stats.entropy_T.detach()[None])
            loss = (part.batch.weights_T * loss_T).sum()
            if not loss.requires_grad:
                # Every stage waits for a gradient, also of a micro-batch that has none.
                loss = loss + 0.0 * stats.logprobs_T.sum()
            return factor * loss, _sums(loss, part.batch.mask_T, values)

        reports = self._forward.run(micro, report, forward_only=False)
        routing = self._forward.replay.agreement() if self._forward.replay else {}
        names, totals = self._global_totals(reports, micro)
        loss, num_tokens, num_real, num_computed, *sums = totals
        rate = get_canonical_lr_for_logging(self.optimizer.param_groups)
        assert rate is not None, "got no parameter group with a learning rate, expected at least one"
        if num_tokens == 0:
            loss = grad_norm = 0.0
        else:
            grad_norm = self._step(math.isfinite(loss))
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        return UpdateStats(
            loss=loss,
            grad_norm=grad_norm,
            skipped=skipped,
            learning_rate=float(rate),
            metrics={name: value / max(num_tokens, 1.0) for name, value in zip(names, sums, strict=True)} | routing,
            useful_token_share=num_real / num_computed,
            entropy_T=self._on_all_stages(micro, seen, 1, len(batch.tokens_T))[0] if entropies else None,
        )

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor of the true vocabulary) of every weight, on the device, on every rank.

        Collective over all ranks: exhaust it everywhere. A tensor is valid until the next one is asked for.
        """
        self.gather_parameters()
        return export_hf(self.policy)

    def _step(self, finite_loss: bool) -> float:
        """Apply the gradient unless it, or the loss, is not finite; its norm before clipping. Alike on all ranks."""
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not (finite_loss and math.isfinite(grad_norm)):
            self.num_skipped += 1
            return grad_norm
        applied, _, _ = self.optimizer.step()
        assert applied, "got an update that Megatron refused, expected it to follow a finite gradient"
        self.scheduler.step(increment=1)
        self.num_updates += 1
        return grad_norm

    def _global_totals(
        self, reports: Sequence[dict[str, torch.Tensor]], micro: Sequence[pack.MicroBatch]
    ) -> tuple[list[str], list[float]]:
        """(names of the metrics, [loss, trained tokens, real tokens, computed positions, sum of each metric]).

        Sums over the micro-batches of all replicas, on every rank.
        """
        topology = self.topology
        names: list[str] = list(reports[0])[2:] if topology.is_last_stage else []
        if topology.pp_size > 1:
            box = [names]
            dist.broadcast_object_list(box, src=last_of(topology.pp_pg), group=topology.pp_pg)
            names = box[0]
        sums_K = torch.zeros(4 + len(names), dtype=torch.float64, device=self.policy.device)
        for values in reports:
            sums_K[:2] += torch.stack([values["loss"], values["tokens"]])
            if names:
                sums_K[4:] += torch.stack([values[name] for name in names])
        self._from_last_stage(sums_K)
        sums_K[2] = sum(part.num_tokens for part in micro)
        sums_K[3] = sum(part.num_positions for part in micro)
        return names, topology.sum_over_replicas(sums_K).tolist()

    def gather_parameters(self) -> None:
        """Finish the parameter gather that train.ddp.overlap_param_gather leaves to the next forward pass."""
        for chunk in self.policy.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def _optimizer(policy: Policy, train: TrainConfig) -> Any:
    ddp = policy.chunks[0].ddp_config
    reserved = {
        **dict.fromkeys(("bf16", "fp16", "params_dtype"), "model.dtype"),
        **dict.fromkeys(("use_distributed_optimizer", "overlap_param_gather"), "train.ddp"),
        "timers": "the trainer",
    }
    given = options.checked("train.optimizer", train.optimizer, OptimizerConfig, reserved)
    if given.get("lr") is None:
        raise ValueError("train.optimizer.lr is missing: set the learning rate, e.g. 1.0e-6")
    config = OptimizerConfig(
        **{"min_lr": 0.0, **given},  # the schedule subtracts it
        bf16=policy.dtype == torch.bfloat16,
        params_dtype=policy.dtype,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, policy.chunks)
    adam.fill(optimizer)
    return optimizer


def _scheduler(optimizer: Any, train: TrainConfig, total_updates: int) -> OptimizerParamScheduler:
    given = options.checked(
        "train.scheduler", train.scheduler, OptimizerParamScheduler, {"optimizer": "train.optimizer"}
    )
    weight_decay = optimizer.config.weight_decay
    settings: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": optimizer.config.lr,
        "min_lr": optimizer.config.min_lr or 0.0,
        "lr_warmup_steps": 0,
        "lr_decay_steps": total_updates,
        "lr_decay_style": "constant",
        "start_wd": weight_decay,
        "end_wd": weight_decay,
        "wd_incr_steps": total_updates,
        "wd_incr_style": "constant",
        # A resumed run goes on at its update, on the schedule its configuration describes now.
        "use_checkpoint_opt_param_scheduler": False,
        "override_opt_param_scheduler": True,
        **given,
    }
    if settings["lr_warmup_steps"] >= settings["lr_decay_steps"]:
        raise ValueError(
            f"train.scheduler.lr_warmup_steps {settings['lr_warmup_steps']} must be below lr_decay_steps "
            f"{settings['lr_decay_steps']} (default: the run's optimizer updates)"
        )
    return OptimizerParamScheduler(optimizer, **settings)


def _sums(loss: torch.Tensor, mask_T: torch.Tensor, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The micro-batch's loss, trained tokens, and sum of each reported value over them, float64, detached."""
    masked = {name: (mask_T * v.detach()).sum(dtype=torch.float64) for name, v in values.items()}
    return {"loss": loss.detach().double(), "tokens": mask_T.sum(dtype=torch.float64), **masked}
