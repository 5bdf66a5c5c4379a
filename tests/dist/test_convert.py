"""Conversion against transformers itself: bit for bit there and back, the same logits in every layout, bounded memory.

CONVERT_GRID=nightly runs every family in every layout; otherwise a few of each (convert_grid.CI).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from megatron_gcpo.policy import manifest as manifests
from tests.dist import convert_grid
from tests.dist.convert_grid import folder_name, grid, is_nightly
from tests.dist.harness import RanksFailed, run_ranks

PAIRS = grid(is_nightly())
FROM_HF = (
    [pair for pair in PAIRS if pair[0] != "GLM-4" and pair[1] != "TP2 ETP2"] if is_nightly() else convert_grid.FROM_HF
)
UNKNOWN = {"GLM-4": "is not yet supported"}
"""Families that megatron-bridge does not have, and how it says so."""
IMPOSSIBLE = {("gpt-oss", "TP2 ETP2"): "Bias in Moe is only supported when ETP==1"}
"""What Megatron-Core refuses anywhere."""
NOT_ON_CPUS = {"TP2 ETP2": "on CPUs the experts cannot be cut"}
"""Layouts that are converted for, and loaded elsewhere."""
TRAINED = "Qwen3 tied, q/k norm"
SMALL = {"model_type": "qwen3", **convert_grid.BASE, **convert_grid.WIDE, **convert_grid.TIED}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("convert") / "data"


@pytest.fixture(scope="module")
def converted(data: Path) -> dict[tuple[str, str], str | None]:
    arguments = {"folder": str(data), "pairs": PAIRS}
    return run_ranks(convert_grid.__file__, "convert_all", 1, arguments, data.parent / "convert", timeout_s=900)[0]


@pytest.fixture(scope="module")
def gaps(data: Path, converted: dict[tuple[str, str], str | None]) -> dict[tuple[str, str], Any]:
    pairs = [pair for pair in PAIRS if converted[pair] is None]
    arguments = {"folder": str(data), "pairs": pairs}
    ranks = run_ranks(
        convert_grid.__file__, "logits_everywhere", convert_grid.RANKS, arguments, data.parent / "logits", timeout_s=900
    )
    return {pair: gap for rank in ranks for pair, gap in rank.items()}


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_there_and_back_is_bit_for_bit(family: str, layout: str, data: Path, converted: dict[Any, Any]) -> None:
    """Names, shapes, types, values, index, config, tokenizer and generation config, read by the safetensors library."""
    impossible = UNKNOWN.get(family) or IMPOSSIBLE.get((family, layout))
    if impossible:
        assert impossible in converted[family, layout]
        return
    assert converted[family, layout] is None
    source, back = data / folder_name(family), data / (folder_name(family, layout) + "_back")
    expected, found = read_all(source), read_all(back)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    carried = {p.name for p in source.iterdir() if p.suffix != ".safetensors" and not p.name.endswith("index.json")}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= carried
    for name in carried:
        assert (back / name).read_bytes() == (source / name).read_bytes(), name
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    for name, file in index["weight_map"].items():
        with safe_open(back / file, framework="pt") as opened:
            assert name in set(opened.keys())


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_the_trainer_starts_from_it_with_the_same_logits(family: str, layout: str, gaps: dict[Any, Any]) -> None:
    if family in UNKNOWN or (family, layout) in IMPOSSIBLE:
        assert (family, layout) not in gaps
    elif layout in NOT_ON_CPUS:
        assert NOT_ON_CPUS[layout] in gaps[family, layout]
    else:
        assert gaps[family, layout] < 1e-4


@pytest.fixture(scope="module")
def from_hf(data: Path, converted: dict[tuple[str, str], str | None]) -> list[dict[tuple[str, str], Any]]:
    arguments = {"folder": str(data), "pairs": FROM_HF}
    work = data.parent / "from_hf"
    file, function = convert_grid.__file__, "start_from_hf_everywhere"
    return run_ranks(file, function, convert_grid.RANKS, arguments, work, timeout_s=900)


@pytest.mark.parametrize(("family", "layout"), FROM_HF)
def test_the_trainer_starts_from_the_folder_itself_and_exports_it_unchanged(
    family: str, layout: str, from_hf: list[dict[Any, Any]]
) -> None:
    found = [rank[family, layout] for rank in from_hf]
    gaps = [gap for gap, _ in found if gap is not None]
    assert gaps
    assert max(gaps) < 1e-4
    assert [changed for _, changed in found] == [[]] * convert_grid.RANKS


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in safetensors.torch.load_file(file).items()}


def train_and_save(run: str) -> dict[str, torch.Tensor]:
    """On each of four ranks: a step of training at TP2 PP2 with a padded vocabulary, and its checkpoint."""
    from megatron_gcpo.policy import checkpoint
    from tests.dist.test_actor import export
    from tests.dist.test_checkpoint import TP2_PP2, start, train

    actor = start({"model": "tied", "dtype": "bf16", **TP2_PP2}, seed=3)
    train(actor, 2)
    checkpoint.save(run, actor, {}, step=2, keep_last=1)
    weights = export(actor)
    actor.topology.close()
    return weights


def look_around(folder: str, run: str) -> dict[str, Any]:
    """In one process: a trained checkpoint, casts, other sources, errors, and what a kill and a limit leave."""
    from transformers import AutoConfig

    from megatron_gcpo.convert import to_hf, to_megatron
    from megatron_gcpo.convert.compare import compare
    from megatron_gcpo.convert.describe import describe
    from megatron_gcpo.convert.work import Options

    root, seen = Path(folder), {}
    root.mkdir()
    options = Options(max_shard_bytes=100_000)
    to_hf.convert(run, root / "trained", options=options)
    trained = describe(run)
    seen["trained"] = (trained.model_type, trained.dtypes)
    seen["trained config"] = AutoConfig.from_pretrained(root / "trained").to_dict()["dtype"]

    source = root / "source"
    convert_grid.write_hf(source, SMALL)
    add_tied_head(source)
    to_megatron.convert(source, root / "bf16", dtype="bf16", options=options)
    to_hf.convert(root / "bf16", root / "bf16_back", options=options)
    seen["bf16"] = {d.what for d in compare(source, root / "bf16").different}
    seen["bf16 back"] = compare(root / "bf16", root / "bf16_back").equal
    to_megatron.convert(source, root / "fp32", options=Options(processes=2, max_shard_bytes=50_000))
    seen["fp32"] = compare(root / "fp32", source).equal
    seen["head comes back"] = compare(source, to_hf.convert(root / "fp32", root / "fp32_back", options=options)).equal

    pickled = root / "pickled"
    shutil.copytree(source, pickled, ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save(read_all(source), pickled / "pytorch_model.bin")
    seen["pickle refused"] = failure(lambda: to_megatron.convert(pickled, root / "no", options=options))
    allowed = Options(allow_pickle=True, max_shard_bytes=100_000)
    seen["pickle"] = compare(to_megatron.convert(pickled, root / "pickle", options=allowed), source).equal

    for name, (change, config) in DAMAGES.items():
        damaged = root / f"damaged {name}"
        shutil.copytree(source, damaged)
        rewrite(damaged, change, config)
        seen[name] = failure(lambda damaged=damaged: to_megatron.convert(damaged, root / "no", options=options))
    patterns = Options(leave_out=(r"extra$",), max_shard_bytes=100_000)
    left_out = to_megatron.convert(root / "damaged extra", root / "left out", options=patterns)
    seen["left out"] = compare(left_out, source).equal

    foreign = root / "foreign"
    shutil.copytree(root / "fp32", foreign, ignore=shutil.ignore_patterns("manifest.json", "hf"))
    seen["foreign"] = failure(lambda: to_hf.convert(foreign, root / "no", options=options))
    to_hf.convert(foreign, root / "foreign_back", reference=source, options=options)
    seen["foreign back"] = compare(root / "foreign_back", root / "trained").missing  # one of them repeats its head
    wrong = root / "wrong"
    convert_grid.write_hf(wrong, {**SMALL, "num_hidden_layers": 5})
    seen["foreign of another model"] = failure(lambda: to_hf.convert(foreign, root / "no", reference=wrong))
    seen["of another model"] = failure(lambda: to_hf.convert(root / "fp32", root / "no", reference=wrong))
    seen["nothing left"] = sorted(path.name for path in root.iterdir() if path.name.startswith("no"))
    return seen


def add_tied_head(folder: Path) -> None:
    """Some tied checkpoints of the hub hold their embedding twice."""
    rewrite(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}), {}
    )


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], config: dict[str, Any]) -> None:
    tensors = read_all(folder)
    for file in folder.glob("model*"):
        file.unlink()
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))


Q = "model.layers.1.self_attn.q_proj.weight"
Damage = tuple[Callable[[dict[str, torch.Tensor]], Any], dict[str, Any]]
DAMAGES: dict[str, Damage] = {
    "missing": (lambda t: t.pop(Q), {}),
    "extra": (lambda t: t.update({"model.layers.0.extra": torch.ones(1)}), {}),
    "shape": (lambda t: t.update({Q: t[Q][:-32].clone()}), {}),
    "type": (lambda t: t.update({Q: t[Q].to(torch.int64)}), {}),
    "nan": (lambda t: t[Q].view(-1)[5].fill_(float("nan")), {}),
    "half": (lambda t: t.update({name: tensor.half() for name, tensor in t.items()}), {}),
    "other head": (lambda t: t["lm_head.weight"].add_(1), {}),
    "vocabulary": (lambda t: None, {"vocab_size": 66}),
    "layers": (lambda t: None, {"num_hidden_layers": 3, "layer_types": None}),
    "config": (lambda t: None, {"num_hidden_layers": 3}),
}
MESSAGES = {
    "missing": f"tensor '{Q}' is missing",
    "extra": "model.safetensors: tensor 'model.layers.0.extra' is extra",
    "shape": f"'{Q}': [96, 64]",
    "type": f"model.safetensors: tensor '{Q}' has type int64",
    "nan": f"model.safetensors: tensor '{Q}' holds 1 values that are NaN",
    "half": "float16, which the trainer does not store: pass --dtype",
    "other head": "tensor 'lm_head.weight' differs from 'model.embed_tokens.weight'",
    "vocabulary": "'model.embed_tokens.weight': [67, 64]",
    "config": "config.json: no model config can be read there",
    "layers": "tensor 'model.layers.3.input_layernorm.weight' is extra",
}


def failure(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("convert_more")
    weights = run_ranks(__file__, "train_and_save", 4, {"run": str(root / "run")}, root / "train")[0]
    arguments = {"folder": str(root / "data"), "run": str(root / "run")}
    return {
        "root": root / "data",
        "weights": weights,
        **run_ranks(__file__, "look_around", 1, arguments, root / "look", timeout_s=300)[0],
    }


def test_a_trained_checkpoint_becomes_what_the_trainer_would_export(seen: dict[str, Any]) -> None:
    """From TP2 PP2 with a padded vocabulary and the optimizer beside the weights, in bf16."""
    found = read_all(seen["root"] / "trained")
    assert found.keys() == seen["weights"].keys()
    for name, tensor in seen["weights"].items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name
    assert seen["trained"][0] == "qwen3"
    assert list(seen["trained"][1]) == ["bfloat16"]
    assert seen["trained config"] in ("bfloat16", torch.bfloat16)


def test_casts_pickles_foreign_folders_and_repeated_heads(seen: dict[str, Any]) -> None:
    assert seen["bf16"] == {"values"}
    assert seen["bf16 back"]
    cast = read_all(seen["root"] / "bf16_back")
    for name, tensor in read_all(seen["root"] / "source").items():
        assert torch.equal(cast[name], tensor.to(torch.bfloat16)), name
    assert json.loads((seen["root"] / "bf16_back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert seen["fp32"]
    assert seen["head comes back"]
    assert "--allow-pickle" in seen["pickle refused"]
    assert seen["pickle"]
    assert "--hf" in seen["foreign"]
    assert seen["foreign back"] == ()
    assert "is missing" in seen["foreign of another model"] or "has shape" in seen["foreign of another model"]
    assert "num_hidden_layers is 4 there and 5 here" in seen["of another model"]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_checkpoint_that_is_not_the_model_is_refused_by_name(name: str, seen: dict[str, Any]) -> None:
    assert MESSAGES[name] in seen[name]
    assert "\n" not in seen[name]


def test_nothing_half_written_is_left_under_the_name_and_what_can_be_left_out_is(seen: dict[str, Any]) -> None:
    assert [name for name in seen["nothing left"] if not name.endswith(manifests.PARTIAL)] == []
    assert seen["left out"]


def killed_once(source: str, target: str, direction: str, stop: int) -> list[str]:
    """In one process: a conversion in which file number ``stop`` kills it; below 0: none does. The files it wrote."""
    from megatron_gcpo.convert import to_hf, to_megatron, work

    written: list[str] = []
    seal_file = work._seal

    def seal(partial: Path, job: Any, *rest: Any) -> None:
        if len(written) == stop:
            (partial / (job.file + ".tmp")).write_bytes(b"torn")
            os.kill(os.getpid(), signal.SIGKILL)
        seal_file(partial, job, *rest)
        written.append(job.file)

    work._seal = seal
    convert = {"to_megatron": to_megatron.convert, "to_hf": to_hf.convert}[direction]
    convert(source, target, options=work.Options(max_shard_bytes=60_000))
    return written


def test_a_killed_conversion_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source, middle, target = tmp_path / "source", tmp_path / "megatron", tmp_path / "target"
    convert_grid.write_hf(source, SMALL)
    for direction, one, other in (("to_megatron", source, middle), ("to_hf", middle, target)):
        arguments = {"source": str(one), "target": str(other), "direction": direction}
        with pytest.raises(RanksFailed, match="-9"):
            run_ranks(__file__, "killed_once", 1, arguments | {"stop": 2}, tmp_path / f"{direction} kill")
        assert not other.exists()
        (written,) = run_ranks(__file__, "killed_once", 1, arguments | {"stop": -1}, tmp_path / f"{direction} again")
        total = len(list(other.glob("__0_*.distcp"))) + len(list(other.glob("*.safetensors")))
        assert len(written) == total - 2
        assert not (other.parent / (other.name + manifests.PARTIAL)).exists()
    expected, found = read_all(source), read_all(target)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    manifest = manifests.read(middle)
    assert manifest.sha256.keys() == manifest.files.keys()


def within_memory(root: str, extra_bytes: int) -> dict[str, str]:
    """In one process that may allocate so much more than it has: both directions, and the whole checkpoint at once."""
    from megatron_gcpo.convert import to_hf, to_megatron
    from megatron_gcpo.convert.work import Options
    from tools.bench_convert import private_bytes

    folder, options = Path(root), Options(max_shard_bytes=16 << 20)
    limit = private_bytes() + extra_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    to_megatron.convert(folder / "source", folder / "megatron", options=options)
    to_hf.convert(folder / "megatron", folder / "back", options=options)
    try:
        return {"whole": str({name: tensor.clone() for name, tensor in read_all(folder / "source").items()}.keys())}
    except (RuntimeError, MemoryError) as error:
        return {"refused": type(error).__name__}


def test_memory_is_a_layer_not_the_model(tmp_path: Path) -> None:
    """420 MB both ways, largest fused parameter 50 MB, in a process that may take 200 MB more than it has."""
    from tools.bench_convert import config_of, write_source

    write_source(tmp_path / "source", config_of(0.4, vocabulary=4000))
    total = sum(file.stat().st_size for file in (tmp_path / "source").glob("*.safetensors"))
    assert total > 400_000_000
    arguments = {"root": str(tmp_path), "extra_bytes": 200_000_000}
    (found,) = run_ranks(__file__, "within_memory", 1, arguments, tmp_path / "work")
    assert "refused" in found
