"""Weights from the training layout to the rollout engine, and the proof that they arrived.

``Pusher`` gives a trainer's policy to an engine, in one of three modes:

- *sharded*: source.py reads off the bridge which boxes of which Hugging Face tensors each rank holds, the engine's workers
  tell which boxes they take (rollout.vllm.trace), plan.py joins the two, and sharded.py moves each needed byte once;
- *full*: whole tensors, one after the other (gather.py, deliver.py), where either side is more than boxes;
- *adapters*: those alone, whole, upon weights that came once (push_adapters.py), where the engine computes adapters.

All fill buckets (channel.py, transport/) that endpoint.py and receiver.py take at the other end, and an engine may serve
only when the fingerprints of both ends agree; verified.py then lets both sides score the same tokens.

An engine whose weights live in vLLM workers offers ``control`` (rollout.engine.WeightControl), whose ``rpc`` calls the
``gcpo_*`` methods of rollout.vllm.worker.WorkerExtension; its ``load_weights`` is ``deliver`` followed by ``commit``.
"""

from megatron_gcpo.reshard.check import LogprobGap, default_gap_limit, logprob_gap, require_small_gap
from megatron_gcpo.reshard.deliver import deliver
from megatron_gcpo.reshard.push import push
from megatron_gcpo.reshard.stats import PushStats

__all__ = ["LogprobGap", "PushStats", "default_gap_limit", "deliver", "logprob_gap", "push", "require_small_gap"]
