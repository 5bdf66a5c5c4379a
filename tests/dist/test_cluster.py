"""The cluster layer with real processes: grid, groups, Megatron-Core on the CPU, and what happens when a rank dies."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zlib
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_gcpo.cluster import launch, platform, topology
from megatron_gcpo.cluster.deadline import Watch
from megatron_gcpo.config.records import ClusterConfig
from tests.dist.harness import RanksFailed, fork_ranks, launch_ranks, run_ranks

LAYOUTS_8 = (
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "platform": "auto"},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    | {"platform": "auto"},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    {"expert_model_parallel_size": 8},
)
LAYOUTS_4 = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
)


def cluster(num_ranks: int, layout: dict) -> ClusterConfig:
    return ClusterConfig(**{"platform": "cpu", "processes_per_node": num_ranks, **layout})


def look_at_layouts(num_ranks: int, layouts: tuple[dict, ...]) -> list[dict]:
    """Worker: for every layout what parallel_state says of this rank, and what the exchanges return."""
    from megatron.core import parallel_state as ps

    cpu = platform.install("cpu")
    seen = []
    for layout in layouts:
        topo = topology.init(cluster(num_ranks, layout), cpu)
        groups = {
            "tp": ps.get_tensor_model_parallel_rank(),
            "cp": ps.get_context_parallel_rank(),
            "dp": ps.get_data_parallel_rank(),
            "pp": ps.get_pipeline_model_parallel_rank(),
            "etp": ps.get_expert_tensor_parallel_rank(),
            "ep": ps.get_expert_model_parallel_rank(),
            "edp": ps.get_expert_data_parallel_rank(),
        }
        objects = [None] * topo.world_size
        dist.all_gather_object(objects, (groups["dp"], topo.rank))
        seen.append(
            {
                "place": topo.place,
                "groups": groups,
                "replica_ranks": topo.replica_ranks,
                "same_dp": tuple(rank for dp, rank in objects if dp == groups["dp"]),
                "replica_pg": tuple(dist.get_process_group_ranks(topo.replica_pg)),
                "from_leader": topo.broadcast_object({"rank": topo.rank}),
                "from_first": topo.broadcast_object_to_all(topo.rank + 100),
                "sum": topo.sum_over_replicas([1.0, topo.replica / 3]).tolist(),
                "gathered": topo.gather_objects_from_leaders(("replica", topo.replica)),
                "stages": (topo.is_first_stage, topo.is_last_stage),
                "stages of megatron": (
                    ps.is_pipeline_first_stage(ignore_virtual=True),
                    ps.is_pipeline_last_stage(ignore_virtual=True),
                ),
            }
        )
        topo.close()
    return seen


def check_layouts(num_ranks: int, layouts: tuple[dict, ...], seen_by_rank: list[list[dict]]) -> None:
    for n, layout in enumerate(layouts):
        grid = topology.rank_grid(cluster(num_ranks, layout))
        replicas = topology.num_replicas(cluster(num_ranks, layout))
        for place, seen in zip(grid, [seen[n] for seen in seen_by_rank], strict=True):
            assert seen["place"] == place
            assert {axis: getattr(place, axis) for axis in seen["groups"]} == seen["groups"], layout
            assert seen["replica_ranks"] == seen["replica_pg"] == seen["same_dp"], layout
            assert seen["replica_ranks"][0] == place.leader
            assert seen["from_leader"] == {"rank": place.leader}
            assert seen["from_first"] == 100
            assert seen["sum"] == pytest.approx([replicas, sum(range(replicas)) / 3], rel=1e-15)
            everybody = [("replica", replica) for replica in range(replicas)]
            assert seen["gathered"] == (everybody if place.rank == 0 else None)
            assert seen["stages"] == seen["stages of megatron"]


def test_the_grid_of_8_processes_is_that_of_parallel_state(tmp_path):
    kwargs = {"num_ranks": 8, "layouts": LAYOUTS_8}
    check_layouts(8, LAYOUTS_8, run_ranks(__file__, "look_at_layouts", 8, kwargs, tmp_path))


def train(topo: topology.Topology, *, moe: bool, dtype: torch.dtype = torch.float32) -> list[float]:
    """Three clipped steps of a tiny Megatron model with the distributed optimizer; the global loss before each."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    bf16 = dtype == torch.bfloat16
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32} | {
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": topo.ep_size,
        "moe_router_load_balancing_type": "none",
    }
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=64,
        tensor_model_parallel_size=topo.tp_size,
        pipeline_model_parallel_size=topo.pp_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=bf16,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        **(experts if moe else {}),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4 if moe else None, moe_grouped_gemm=False, normalization="RMSNorm"),
        vocab_size=64,
        max_sequence_length=32,
        pre_process=topo.is_first_stage,
        post_process=topo.is_last_stage,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=topo.pp_size > 1,
    )
    if moe:
        fill_by_name(model, first_expert=topo.ep_rank * (4 // topo.ep_size))
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        Float16Module(config, model) if bf16 else model,
    )
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, clip_grad=0.05, use_distributed_optimizer=True, bf16=bf16, params_dtype=dtype
    )
    optimizer = get_megatron_optimizer(options, [ddp])
    rows = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0)).chunk(topo.dp_size)[topo.dp_rank]
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]

    def forward(batches, model):
        row = next(batches)
        losses = model(row[:, :-1], torch.arange(16)[None], mask, labels=row[:, 1:])
        return losses, lambda losses: (losses.mean(), {"loss": losses.detach().float().mean()})

    globally = []
    for _ in range(3):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(rows.split(1)),
            model=ddp,
            num_microbatches=len(rows),
            seq_length=16,
            micro_batch_size=1,
            forward_only=False,
        )
        done, norm, _ = optimizer.step()
        assert done
        assert norm > options.clip_grad, "clipping was not exercised"
        if topo.is_last_stage:
            own = sum(float(output["loss"]) for output in outputs) / len(rows)
            globally.append(float(topo.sum_over_replicas([own])) / ps.get_data_parallel_world_size())
    return globally


def fill_by_name(model: torch.nn.Module, first_expert: int) -> None:
    """Weights that depend on the global number of an expert, not on which rank holds it."""
    for name, weight in model.named_parameters():
        name = re.sub(r"(?<=local_experts\.)\d+", lambda local: str(first_expert + int(local.group())), name)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if weight.dim() > 1:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[-1]))


def fork_random_states() -> dict:
    """What the tracker's fork draws here, and whether it leaves the outer stream alone."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    outer = [torch.rand(4)]
    with get_cuda_rng_tracker().fork():
        forked = [torch.rand(4)]
    outer.append(torch.rand(4))
    with get_cuda_rng_tracker().fork():
        forked.append(torch.rand(4))
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    undisturbed = torch.rand(8)
    return {
        "outer": torch.cat(outer).tolist(),
        "undisturbed": undisturbed.tolist(),
        "forked": torch.cat(forked).tolist(),
    }


def train_and_look(layouts: tuple[dict, ...]) -> dict:
    """Worker: everything that needs 4 processes."""
    found: dict = {"layouts": look_at_layouts(4, layouts), "peak": platform.install("cpu").memory_peak_bytes()}
    cases = {
        "dense dp4": ({}, {"moe": False}),
        "dense tp2": ({"tensor_model_parallel_size": 2}, {"moe": False}),
        "dense tp2 pp2 bf16": (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            {"moe": False, "dtype": torch.bfloat16},
        ),
        "moe dp4": ({}, {"moe": True}),
        "moe ep2": ({"expert_model_parallel_size": 2}, {"moe": True}),
        "moe ep2 bf16": ({"expert_model_parallel_size": 2}, {"moe": True, "dtype": torch.bfloat16}),
    }
    for name, (layout, options) in cases.items():
        topo = topology.init(cluster(4, layout), platform.install("cpu"))
        torch.manual_seed(3)
        found[name] = train(topo, **options)
        if name == "dense tp2":
            found["random"] = fork_random_states()
        topo.close()
    return found


def test_megatron_core_trains_on_four_cpu_processes(tmp_path):
    """The same losses under every split of the same model and batch; clipping, bf16, recompute and experts included."""
    found = run_ranks(__file__, "train_and_look", 4, {"layouts": LAYOUTS_4}, tmp_path)
    check_layouts(4, LAYOUTS_4, [rank["layouts"] for rank in found])
    for case in ("dense dp4", "dense tp2", "moe dp4", "moe ep2"):
        assert all(rank[case] == pytest.approx(found[0][case], rel=1e-6) for rank in found), case
        assert found[0][case][0] > found[0][case][-1], f"{case} did not learn"
    assert found[0]["dense tp2"] == pytest.approx(found[0]["dense dp4"], rel=2e-6)
    assert found[0]["moe ep2"] == pytest.approx(found[0]["moe dp4"], rel=2e-6)
    assert found[0]["moe ep2 bf16"] == pytest.approx(found[0]["moe dp4"], rel=2e-2)
    last = found[3]["dense tp2 pp2 bf16"]
    assert last[0] > last[-1]
    randoms = [rank["random"] for rank in found]
    for random in randoms:
        assert random["outer"] == random["undisturbed"]
        assert random["outer"] == randoms[0]["outer"]
    # tp2 x dp2: ranks 0 and 2 are the same tensor-parallel rank of two replicas.
    assert randoms[0]["forked"] == randoms[2]["forked"]
    assert randoms[0]["forked"] != randoms[1]["forked"]
    assert randoms[0]["forked"][:4] != randoms[0]["forked"][4:], "the forked stream must go on where it was"
    assert all(rank["peak"] > 100 * 2**20 for rank in found)
    log = (tmp_path / "logs" / "rank1.log").read_text()
    assert "CPU RNG state changed" not in log


UNTOUCHED = """
import sys
import torch

torch.cuda.is_available = lambda: True
import megatron.core.optimizer.distrib_optimizer as distributed
import megatron.core.optimizer.optimizer as optimizer
from megatron_gcpo.cluster import platform

names = [*platform.MODULES_SPELLING_CUDA, "megatron.core.tensor_parallel.random"]
names += ["megatron.core.transformer.moe.token_dispatcher", "megatron.core.optimizer.distrib_optimizer"]
for name in names:
    __import__(name)
owners = [torch, torch.cuda, torch.cuda.random, torch.Tensor, torch.nn.Module, distributed.DistributedOptimizer]
owners += [optimizer.Float16OptimizerWithFloat16Params, *(sys.modules[name] for name in names)]
tracker_log = __import__("logging").getLogger("megatron.core.tensor_parallel.random")

def everything():
    return [(id(owner), name, id(value)) for owner in owners for name, value in sorted(vars(owner).items())], len(
        tracker_log.filters)

before = everything()
assert platform.install("auto").name == platform.install("cuda").name == "cuda"
assert everything() == before, "a CUDA machine was changed"

torch.cuda.is_available = lambda: False
before = everything()
cpu = platform.install("auto")
adapted = everything()
assert adapted != before, "this comparison sees nothing"
assert platform.install("cpu") == cpu and everything() == adapted, "not idempotent"
assert torch.zeros(1).type() == "torch.FloatTensor", "the spelling of types leaked"
try:
    platform.install("cuda")
except ValueError as error:
    print(error)
"""


def test_cuda_machines_are_left_alone():
    """Every attribute of what the CPU adaptation changes keeps its identity where torch says there is a device."""
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("cluster.platform is cuda, but torch sees no CUDA device: set cluster.platform=cpu")


def look_for_transformer_engine() -> dict:
    """Worker: what importing the bridge has left behind."""
    bridge = platform.import_megatron_bridge(platform.install("cpu"))
    traces = [name for name in sys.modules if name.startswith("transformer_engine")]
    return {"has bridge": hasattr(bridge, "AutoBridge"), "traces": traces, "have": bridge.peft.utils.HAVE_TE}


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_the_bridge_needs_no_transformer_engine(tmp_path):
    (found,) = run_ranks(__file__, "look_for_transformer_engine", 1, {}, tmp_path)
    assert found == {"has bridge": True, "traces": [], "have": False}


def peer(what: str) -> None:
    """Worker: two phases, in which something goes wrong with one rank."""
    timeout_s = 6.0
    env = launch.worker_env()
    store = launch.connect(env, timedelta(seconds=60))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("groups", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    with Watch(store, env.rank, env.world_size, timeout_s) as watch:
        watch.barrier("start")
        with watch.phase("generate"):
            if what == f"kill {env.rank}":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == f"sleep {env.rank}":
                time.sleep(60)
            if what == f"hang {env.rank}":
                while True:  # no collective, no exception: only the thread can end this
                    time.sleep(1)
        if what.startswith("hang") and env.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with watch.phase("update"):
            dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def run_peers(what: str, folder: Path) -> list[tuple[int, str]]:
    """Three ranks started one by one, as srun would: nobody supervises them. Their exit codes and last lines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    peers = fork_ranks(__file__, "peer", 3, {"what": what}, folder, port, {}, 60)
    for one in peers:
        one.join()
    errors = [(folder / "logs" / f"rank{rank}.log").read_text().strip() for rank in range(3)]
    return [(one.exitcode, error.splitlines()[-1] if error else "") for one, error in zip(peers, errors, strict=True)]


@pytest.mark.parametrize(
    ("what", "dead", "expected"),
    [
        ("kill 1", 1, r"rank 1 \(last in generate\) died or was killed"),
        ("kill 0", 0, r"the meeting point of the ranks is gone: rank 0"),
        ("hang 1", 2, r"rank 2 \(last in start\) died or was killed"),
        ("sleep 2", None, r"rank 2 \(in generate\)"),
    ],
)
def test_nobody_waits_for_ever_and_the_missing_are_named(what, dead, expected, tmp_path):
    """Every survivor ends by itself with exit code 1 and a last line that names the culprit."""
    for rank, (code, line) in enumerate(run_peers(what, tmp_path)):
        if rank == dead:
            assert code == -signal.SIGKILL
        else:
            assert code == 1, line
            assert re.match(rf"error: rank {rank}: ", line), line
            assert re.search(expected, line), line


def die_or_wait() -> None:
    """Worker: rank 2 dies while the others wait for it in a collective."""
    env = launch.worker_env()
    store = launch.connect(env, timedelta(seconds=150))
    dist.init_process_group("gloo", store=dist.PrefixStore("g", store), rank=env.rank, world_size=env.world_size)
    with Watch(store, env.rank, env.world_size, 60) as watch, watch.phase("update"):
        if env.rank == 2:
            raise LookupError("no such expert")
        time.sleep(0.1)
        dist.all_reduce(torch.ones(1))


def test_the_launcher_reports_the_cause_and_not_its_consequences(tmp_path):
    with pytest.raises(RanksFailed, match=r"error: rank 2: LookupError: no such expert \(log: .*rank2.log\)"):
        launch_ranks(__file__, "die_or_wait", 3, {}, tmp_path)
    assert "LookupError: no such expert" in (tmp_path / "logs" / "rank2.log").read_text()
