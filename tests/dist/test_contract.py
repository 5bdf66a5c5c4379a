"""The start-up contract on real trainers: sound ones pass, each planted fault is refused and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_gcpo.contract.diagnosis import diagnose, keeps
from megatron_gcpo.contract.faults import FAULTS, NO_FAULT, Finding
from tests.dist.harness import run_ranks
from tests.dist.tiny import write_recipe

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "two replicas": {},
    "tp2": {"cluster": {"tensor_model_parallel_size": 2}},
    "pp2, one sequence a row": {"cluster": {"pipeline_model_parallel_size": 2}, "train": {"packing": False}},
}


def recipe(folder: Path, sections: dict[str, dict[str, Any]]) -> Path:
    base: dict[str, dict[str, Any]] = {
        "cluster": {"platform": "cpu", "processes_per_node": 2, "collective_timeout_s": 120},
        "method": {"name": "grpo"},
        "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 16, "temperature": 0.9},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return write_recipe(folder, **merged)


def work(recipes: dict[str, str], folder: str) -> dict[str, Any]:
    """On each rank: every fault under every case, and three runs that begin with sound or unsound engines."""
    return {name: run_case(name, Path(path), Path(folder)) for name, path in recipes.items()}


def run_case(name: str, path: Path, folder: Path) -> dict[str, Any]:
    from megatron_gcpo.cluster import platform as platforms
    from megatron_gcpo.cluster import topology as topologies
    from megatron_gcpo.cluster.deadline import Watch
    from megatron_gcpo.config import load
    from megatron_gcpo.contract.check import check_contract
    from megatron_gcpo.contract.faults import find_planted
    from megatron_gcpo.contract.measure import measure
    from megatron_gcpo.reshard.check import NO_LIMIT
    from megatron_gcpo.run import assemble

    def started(*overrides: str) -> Any:
        config = load(path, ["data.heldout=null", *overrides])  # without it there are no embeddings to wait for
        run = assemble(config, ranks, watch, folder)
        run.push(run.starting_probe(), version=0, limit=NO_LIMIT)
        return run

    def refusal(run: Any) -> tuple[str, str]:
        """(the error, what the engine says afterwards); empty where there is none."""
        try:
            check_contract(run)
        except ValueError as error:
            said = str(error)
        else:
            return "", ""
        if run.leader is None:
            return said, ""
        try:
            run.leader.engine.score([((3, 4), (5,))])
        except ValueError as error:
            return said, str(error)
        return said, ""

    platform = platforms.install("cpu")
    config = load(path)
    ranks = topologies.init(config.cluster, platform)
    result: dict[str, Any] = {}
    with Watch(ranks.store, ranks.rank, ranks.world_size, 120) as watch:
        run = started()
        result["findings"] = [find_planted(run, fault) for fault in FAULTS]
        result["everything"] = measure(run, switch_all=True)
        result["weights_after"] = {n: t.clone() for n, t in run.actor.export()}
        run.close()
        if name == "tp2":
            for key, overrides in {
                "top_p": ["rollout.top_p=0.7"],
                "allowed": ["rollout.top_p=0.7", "rollout.max_logprob_gap=5"],
                "bf16 trainer": ["model.dtype=bf16", "rollout.dtype=fp32"],
                "bf16": ["model.dtype=bf16"],
            }.items():
                run = started(*overrides)
                result[key] = refusal(run)
                run.close()
            untouched = started()
            result["weights_before"] = {n: t.clone() for n, t in untouched.actor.export()}
            untouched.close()
    ranks.close()
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("contract")
    recipes = {name: str(recipe(folder / str(i), sections)) for i, (name, sections) in enumerate(CASES.items())}
    ranks = run_ranks(__file__, "work", 2, {"recipes": recipes, "folder": str(folder)}, folder / "ranks", timeout_s=400)
    return {name: [rank[name] for rank in ranks] for name in recipes}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != NO_FAULT])
@pytest.mark.parametrize("case", CASES)
def test_a_planted_fault_is_found_and_named(case: str, fault: str, results: Any) -> None:
    for rank in results[case]:
        finding: Finding = next(f for f in rank["findings"] if f.fault == fault)
        assert not keeps(finding.evidence)
        named = [(cause.factor, round(cause.explains, 2)) for cause in finding.causes]
        assert named[0][0] == FAULTS[fault].factor, named
        assert named[0][1] >= 0.75, named


@pytest.mark.parametrize("case", CASES)
def test_the_corrupted_tensor_and_no_other_is_named(case: str, results: Any) -> None:
    for rank in results[case]:
        for finding in rank["findings"]:
            tensors = finding.evidence.tensors
            if finding.fault == "a corrupted tensor":
                assert [t.name for t in tensors] == ["model.layers.1.self_attn.q_proj.weight"]
                assert tensors[0].relative > 0.5
            else:
                assert not tensors


@pytest.mark.parametrize("case", CASES)
def test_a_sound_engine_passes(case: str, results: Any) -> None:
    for rank in results[case]:
        sound = next(f for f in rank["findings"] if f.fault == NO_FAULT)
        assert keeps(sound.evidence)
        assert sound.evidence.base.drawn.num_tokens >= 8
        assert max(sound.evidence.base.drawn.max, sound.evidence.base.scored.max) < 2e-5


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_see_the_same_numbers(case: str, results: Any) -> None:
    """Or they would not make the same passes."""
    one, two = results[case]
    assert [(f.evidence, f.causes) for f in one["findings"]] == [(f.evidence, f.causes) for f in two["findings"]]
    assert one["everything"] == two["everything"]


def test_switching_one_factor_of_a_sound_pair_makes_a_gap_each(results: Any) -> None:
    """Every switch that the diagnosis relies on does something; unpacking alone must not."""
    for rank in results["tp2"]:
        for switch in rank["everything"].switches:
            gaps = switch.gaps
            if switch.setting == "the trainer's sequences unpacked":
                assert gaps.scored.max < 2e-5
            elif switch.factor == "temperature":
                assert gaps.scored.mean < 0.02
            else:
                assert gaps.scored.max > 1e-3, switch
        assert not rank["everything"].tensors


def test_measuring_leaves_the_trainer_as_it_was(results: Any) -> None:
    for rank in results["tp2"]:
        assert all((rank["weights_before"][name] == tensor).all() for name, tensor in rank["weights_after"].items())


def test_a_cut_in_force_refuses_to_train_unless_it_is_allowed(results: Any) -> None:
    for leader, rank in zip((True, False), results["tp2"], strict=True):
        said, engine = rank["top_p"]
        assert said.startswith("training does not start")
        assert "Likely cause: sampling mask" in said
        assert "rollout.top_p 0.7" in said
        assert ("serves nothing" in engine) is leader
        assert "\n" not in said
        assert rank["allowed"] == ("", "")


def test_precision_explains_a_trainer_in_bf16_beside_an_engine_in_fp32(results: Any) -> None:
    for rank in results["tp2"]:
        assert "Likely cause: precision" in rank["bf16 trainer"][0]
        assert "the trainer computes in bfloat16, the engine in float32" in rank["bf16 trainer"][0]
        assert rank["bf16"] == ("", "")  # what two sides in bf16 differ by is within the default limit


def test_causes_come_in_order(results: Any) -> None:
    for rank in results["tp2"]:
        for finding in rank["findings"]:
            shares = [cause.explains for cause in finding.causes]
            assert shares == sorted(shares, reverse=True)
            assert not finding.causes or finding.causes == diagnose(finding.evidence)
