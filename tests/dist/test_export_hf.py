"""What a trainer leaves behind for others: Hugging Face folders and PEFT adapters; and checkpoints of adapters alone."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatron_gcpo.config.records import LoraConfig, ModelConfig
from tests.dist.harness import RanksFailed, run_ranks
from tests.dist.test_actor import MODELS, global_batch, hf_statistics, share, token_loss
from tests.dist.test_checkpoint import failure
from tests.dist.test_lora import LORA, start
from tests.dist.tiny import write_recipe

TP2 = {"model": "tied", "tp": 2}
PP2 = {"model": "tied", "pp": 2}
FULL = {"lora": None}


def make_base(folder: Path, seed: int) -> Path:
    """A Hugging Face checkpoint with a tokenizer, a generation config of its own and a licence."""
    values = dict(MODELS["tied"])
    torch.manual_seed(seed)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=1)
    model.save_pretrained(folder)
    write_recipe(folder / "recipe")
    AutoTokenizer.from_pretrained(str(folder / "recipe" / "tokenizer")).save_pretrained(str(folder))
    (folder / "LICENSE").write_text("whatever")
    return folder


def learn(actor: Any, steps: int) -> list[Any]:
    batch = share(global_batch(), actor.topology.replica, actor.topology.dp_size)
    return [actor.update(batch, token_loss) for _ in range(steps)]


def scores(actor: Any) -> torch.Tensor:
    return actor.logprobs(global_batch()).logprobs_T


def export_everything(folder: str, base: str) -> dict[str, Any]:
    """On each of two ranks: exports that work, and one that fails on rank 0."""
    from megatron_gcpo.policy.export import export

    run, seen = Path(folder), {}
    model = ModelConfig(path=base, dtype="fp32")
    tokenizer = AutoTokenizer.from_pretrained(base)

    def others(actor: Any) -> Any:
        return tokenizer if actor.topology.rank == 0 else None

    actor = start(TP2, path=base, hf_config=None, **FULL)
    learn(actor, 2)
    seen["model"] = scores(actor)
    seen["path"] = str(export(run, actor, model, others(actor), step=2))
    seen["again"] = str(export(run, actor, model, others(actor), step=2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if actor.topology.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    seen["failed"] = failure(lambda: export(run, actor, model, others(actor), step=3))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seen["left"] = sorted(path.name for path in (run / "hf").iterdir())
    own = model.model_copy(update={"tokenizer": base})
    seen["own tokenizer"] = str(export(run, actor, own, others(actor), step=4))
    actor.topology.close()

    for name, case in {"adapters tp": TP2, "adapters pp": PP2}.items():
        actor = start(case, path=base, hf_config=None)
        learn(actor, 3)
        at = run / name
        seen[name] = {
            "scores": scores(actor),
            "adapters": str(export(at, actor, model, others(actor), step=3)),
            "merged": str(export(at, actor, model, others(actor), step=4, merged=True)),
        }
        actor.topology.close()
    return seen


def die_while_exporting(folder: str, base: str) -> None:
    from megatron_gcpo.convert import work as convert_work
    from megatron_gcpo.policy.export import export

    actor = start(TP2, path=base, hf_config=None, **FULL)
    tokenizer = AutoTokenizer.from_pretrained(base) if actor.topology.rank == 0 else None
    convert_work.replace_folder = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    export(Path(folder), actor, ModelConfig(path=base, dtype="fp32"), tokenizer, step=1)


def resume_adapters(folder: str, bases: list[str]) -> dict[str, Any]:
    """On each of two ranks: two updates, a checkpoint, two more; then those again, here and on another layout."""
    from megatron_gcpo.policy import checkpoint, manifest

    base, other_base = bases
    run, seen = Path(folder) / "run", {}
    actor = start(TP2, path=base, hf_config=None)
    learn(actor, 2)
    path = checkpoint.save(run, actor, {}, step=2, keep_last=1)
    seen["trained"] = scores(actor)
    seen["straight"] = [(u.loss, u.grad_norm) for u in learn(actor, 2)]
    seen["end"] = scores(actor)
    actor.topology.close()
    seen["bytes"] = sum(file.stat().st_size for file in path.iterdir())
    for name, case in {"same": TP2, "other": PP2}.items():
        actor = start(case, seed=8, path=base, hf_config=None)
        checkpoint.load(manifest.newest(run), actor)
        seen[name] = [(u.loss, u.grad_norm) for u in learn(actor, 2)]
        seen[f"{name} end"] = scores(actor)
        actor.topology.close()

    def resume(case: dict[str, Any], **more: Any) -> str:
        actor = start(case, **{"path": base, "hf_config": None, **more})
        try:
            return failure(lambda: checkpoint.load(manifest.newest(run), actor))
        finally:
            actor.topology.close()

    seen["other base"] = resume(TP2, path=other_base)
    seen["no adapters"] = resume(TP2, **FULL)
    seen["other rank"] = resume(TP2, lora=LoraConfig(rank=2))
    start_from = {"path": base, "hf_config": None, "start_from": str(run)}
    actor = start(PP2, seed=8, **start_from)
    seen["started"], seen["counts"] = scores(actor), (actor.num_updates, actor.num_skipped)
    actor.topology.close()
    seen["start without"] = failure(lambda: start(TP2, **start_from, **FULL))
    seen["start other base"] = failure(lambda: start(TP2, **{**start_from, "path": other_base}))

    # Adapters on the weights of a whole run of ours.
    actor = start(TP2, path=base, hf_config=None, **FULL)
    learn(actor, 1)
    seen["whole"] = scores(actor)
    checkpoint.save(Path(folder) / "whole", actor, {}, step=1, keep_last=1)
    actor.topology.close()
    actor = start(PP2, path=base, hf_config=None, start_from=str(Path(folder) / "whole"))
    seen["adapters on whole"] = scores(actor)
    actor.topology.close()
    return seen


def whole_run(recipe: str, folder: str) -> int:
    """On each of two ranks: GCPO with adapters from start to end, every push checked against the engine."""
    from megatron_gcpo.cluster.platform import install
    from megatron_gcpo.config.load import load
    from megatron_gcpo.loop import work

    return work(load(recipe), Path(folder), install("cpu"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), 1)


@pytest.fixture(scope="module")
def exported(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("export")
    kwargs = {"folder": str(folder / "run"), "base": str(base)}
    return run_ranks(__file__, "export_everything", 2, kwargs, folder / "work")


@pytest.fixture(scope="module")
def resumed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resume")
    kwargs = {"folder": str(folder / "runs"), "bases": [str(base), str(make_base(folder / "other", 2))]}
    return run_ranks(__file__, "resume_adapters", 2, kwargs, folder / "work")


def hf_scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return hf_statistics(model.eval(), global_batch()).logprobs_T


def test_transformers_gives_the_trainers_logprobs(base: Path, exported: list[dict[str, Any]]) -> None:
    seen = exported[0]
    path = Path(seen["path"])
    assert seen["again"] == seen["path"]
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.testing.assert_close(hf_scores(model), seen["model"], rtol=1e-5, atol=2e-5)
    started = hf_scores(AutoModelForCausalLM.from_pretrained(base))
    assert (started - seen["model"]).abs().max() > 0.01  # it has learned: the start would not do
    for rank in exported:
        assert torch.equal(rank["model"], seen["model"])


def test_what_travels_along_is_as_it_was(base: Path, exported: list[dict[str, Any]]) -> None:
    path = Path(exported[0]["path"])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        assert (path / name).read_bytes() == (base / name).read_bytes()
    ours, theirs = AutoConfig.from_pretrained(path), AutoConfig.from_pretrained(base)
    assert {**ours.to_dict(), "_name_or_path": ""} == {**theirs.to_dict(), "_name_or_path": ""}
    own = Path(exported[0]["own tokenizer"])
    assert AutoTokenizer.from_pretrained(str(own)).get_vocab() == AutoTokenizer.from_pretrained(str(base)).get_vocab()
    assert GenerationConfig.from_pretrained(own).temperature == 0.7


def test_an_export_that_fails_leaves_nothing(exported: list[dict[str, Any]]) -> None:
    for rank in exported:
        assert "the Hugging Face export of step 3 was not written" in rank["failed"]
        assert rank["left"] == ["step_00000002"]


def test_a_killed_export_has_no_final_name(base: Path, tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path / "run"), "base": str(base)}
    with pytest.raises(RanksFailed, match="0: -9"):
        run_ranks(__file__, "die_while_exporting", 2, kwargs, tmp_path / "work")
    assert [path.suffix for path in (tmp_path / "run" / "hf").iterdir()] == [".partial"]


@pytest.mark.parametrize("name", ["adapters tp", "adapters pp"])
def test_peft_reads_the_adapters(name: str, base: Path, exported: list[dict[str, Any]]) -> None:
    """PEFT's model on the base, and the merged export, both give the trainer's log-probs."""
    from peft import PeftModel

    seen = exported[0][name]
    files = {path.name for path in Path(seen["adapters"]).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), seen["adapters"])
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (LORA["rank"], LORA["alpha"])
    assert (hf_scores(AutoModelForCausalLM.from_pretrained(base)) - seen["scores"]).abs().max() > 0.01
    torch.testing.assert_close(hf_scores(model), seen["scores"], rtol=1e-5, atol=5e-5)
    merged = AutoModelForCausalLM.from_pretrained(seen["merged"])
    torch.testing.assert_close(hf_scores(merged), seen["scores"], rtol=1e-5, atol=5e-5)


def test_a_run_with_adapters_resumes(resumed: list[dict[str, Any]]) -> None:
    """On the same layout bit for bit, on another with the same losses; the checkpoint is far smaller than the model."""
    for seen in resumed:
        assert seen["same"] == seen["straight"]
        assert torch.equal(seen["same end"], seen["end"])
        for got, expected in zip(seen["other"], seen["straight"], strict=True):
            assert got == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(seen["other end"], seen["end"], rtol=1e-4, atol=1e-4)


def test_adapters_start_another_run(resumed: list[dict[str, Any]]) -> None:
    for seen in resumed:
        torch.testing.assert_close(seen["started"], seen["trained"], rtol=1e-5, atol=2e-5)
        assert seen["counts"] == (0, 0)
        torch.testing.assert_close(seen["adapters on whole"], seen["whole"], rtol=1e-5, atol=2e-5)


def test_adapters_never_meet_another_model(resumed: list[dict[str, Any]]) -> None:
    for seen in resumed:
        assert "adapters of a model with other weights" in seen["other base"]
        assert "adapters of a model with other weights" in seen["start other base"]
        assert "this run has no adapters" in seen["no adapters"]
        assert "rank 4" in seen["other rank"]
        assert "rank 2" in seen["other rank"]
        assert "holds adapters alone" in seen["start without"]


def test_a_whole_run_with_adapters_exports_them(tmp_path: Path) -> None:
    """Three steps of GCPO on TP=2: each push of merged weights passes the engine's check, and exports come every two steps
    and at the end."""
    from peft import PeftModel

    recipe = write_recipe(
        tmp_path,
        run={"steps": 3, "output_dir": str(tmp_path / "run")},
        cluster={"platform": "cpu", "processes_per_node": 2, "tensor_model_parallel_size": 2},
        checkpoint={"export_hf_every": 2},
    )
    text = recipe.read_text().replace("model:\n", "model:\n  lora: {rank: 2, alpha: 4}\n")
    recipe.write_text(text)
    kwargs = {"recipe": str(recipe), "folder": str(tmp_path / "run")}
    assert run_ranks(__file__, "whole_run", 2, kwargs, tmp_path / "work") == [0, 0]
    exports = sorted((tmp_path / "run" / "hf").iterdir())
    assert [path.name for path in exports] == ["step_00000002", "step_00000003"]
    import yaml

    values = dict(yaml.safe_load(text)["model"]["hf_config"])
    tokenizer = AutoTokenizer.from_pretrained(str(exports[1]))
    config = AutoConfig.for_model(values.pop("model_type"), **values, vocab_size=len(tokenizer))
    adapted = [PeftModel.from_pretrained(AutoModelForCausalLM.from_config(config), str(path)) for path in exports]
    norms = [sum(p.abs().sum() for n, p in model.named_parameters() if "lora_B" in n) for model in adapted]
    assert norms[0] > 0
    assert norms[0] != norms[1]
