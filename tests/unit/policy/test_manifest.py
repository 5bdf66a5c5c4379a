"""Which checkpoint folders are trusted: a whole one by its manifest, and nothing else, whatever was killed when."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from megatron_gcpo.policy import manifest as manifests
from megatron_gcpo.policy.manifest import Manifest

SIZES = {"hidden_size": 64, "num_hidden_layers": 4}
LAYOUT = {"tensor": 2, "pipeline": 1}


def make(run: Path, step: int, config: PretrainedConfig | None = None) -> Path:
    """A complete checkpoint with two files of data."""
    path = manifests.folder(run, step)
    (path / "shards").mkdir(parents=True)
    (path / "common.pt").write_bytes(b"c" * 7)
    (path / "shards" / "0.distcp").write_bytes(b"s" * 11)
    manifests.write_extra(path, {"step": step})
    files = {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if p.is_file()}
    model = manifests._config(config or PretrainedConfig(**SIZES))
    manifests.write(
        path,
        Manifest(
            format=manifests.FORMAT,
            step=step,
            versions={},
            layout=LAYOUT,
            dtype="bf16",
            model=model,
            model_hash=manifests._hash(model),
            files=files,
        ),
    )
    return path


def lose_a_file(path: Path) -> None:
    (path / "shards" / "0.distcp").unlink()


def cut_a_file(path: Path) -> None:
    (path / "common.pt").write_bytes(b"c")


def lose_the_manifest(path: Path) -> None:
    (path / manifests.NAME).unlink()


def tear_the_manifest(path: Path) -> None:
    text = (path / manifests.NAME).read_text()
    (path / manifests.NAME).write_text(text[: len(text) // 2])


def forget_a_field(path: Path) -> None:
    (path / manifests.NAME).write_text(json.dumps({"format": 1, "step": 3}))


def make_it_newer(path: Path) -> None:
    values = json.loads((path / manifests.NAME).read_text())
    (path / manifests.NAME).write_text(json.dumps(values | {"format": manifests.FORMAT + 1}))


DAMAGES = {
    lose_a_file: r"0\.distcp is missing",
    cut_a_file: r"common\.pt has 1 bytes instead of 7",
    lose_the_manifest: "not a complete checkpoint",
    tear_the_manifest: "cannot be read",
    forget_a_field: "cannot be read",
    make_it_newer: "format 2, this version reads 1",
}


def test_a_manifest_says_what_was_written(tmp_path: Path) -> None:
    path = make(tmp_path, 50)
    assert path == tmp_path / "checkpoints" / "step_00000050"
    manifest = manifests.read(path)
    assert (manifest.step, manifest.layout, manifest.dtype) == (50, LAYOUT, "bf16")
    assert manifest.files["shards/0.distcp"] == 11
    assert manifests.read_extra(path) == {"step": 50}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_newest(damage, tmp_path: Path) -> None:
    older, newer = make(tmp_path, 9), make(tmp_path, 10)
    assert manifests.newest(tmp_path) == newer
    damage(newer)
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        manifests.read(newer)
    assert manifests.newest(tmp_path) == manifests.resolve(tmp_path) == older


def test_a_whole_checkpoint_that_never_got_its_name_is_torn(tmp_path: Path) -> None:
    older, path = make(tmp_path, 1), make(tmp_path, 2)
    unnamed = path.rename(path.with_name(path.name + manifests.PARTIAL))
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        manifests.read(unnamed)
    assert manifests.newest(tmp_path) == older
    assert manifests.torn(tmp_path) == [unnamed]
    manifests.rename(unnamed, path)
    assert manifests.newest(tmp_path) == path
    assert manifests.torn(tmp_path) == []


@pytest.mark.parametrize(("keep", "left"), [(0, [5]), (1, [5]), (2, [4, 5]), (9, [1, 4, 5])])
def test_pruning_keeps_the_newest_complete_ones(keep: int, left: list[int], tmp_path: Path) -> None:
    """A damaged one does not count as kept, however new it is, nor is it taken for one that may go."""
    for step in (1, 4, 5):
        make(tmp_path, step)
    cut_a_file(damaged := make(tmp_path, 6))
    manifests.prune(tmp_path, keep)
    assert manifests.complete(tmp_path) == [manifests.folder(tmp_path, step) for step in left]
    assert damaged.is_dir()


def test_a_removal_that_is_killed_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, 3)

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        manifests.remove(path)
    monkeypatch.undo()
    assert manifests.newest(tmp_path) is None
    (torn,) = manifests.torn(tmp_path)
    manifests.remove(torn)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    manifests.remove(torn)


def test_a_run_or_one_of_its_checkpoints_can_be_named(tmp_path: Path) -> None:
    older, newer = make(tmp_path, 1), make(tmp_path, 2)
    assert manifests.resolve(tmp_path) == manifests.resolve_start(str(tmp_path)) == newer
    assert manifests.resolve(older) == older
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*nowhere"):
        manifests.resolve(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"^model.start_from: there is no complete checkpoint .* train it first"):
        manifests.resolve_start(tmp_path / "nowhere")


def test_the_same_model_under_another_name_is_the_same(tmp_path: Path) -> None:
    manifest = manifests.read(make(tmp_path, 1, PretrainedConfig(**SIZES, name_or_path="here", dtype="float32")))
    moved = PretrainedConfig(**SIZES, name_or_path="there", dtype="bfloat16", architectures=["X"], use_cache=False)
    manifests.check_model(manifest, moved, tmp_path)


def test_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    manifest = manifests.read(make(tmp_path, 1))
    other = PretrainedConfig(hidden_size=64, num_hidden_layers=8, rope_theta=5.0)
    with pytest.raises(ValueError, match=r"num_hidden_layers is 4 there and 8 here, rope_theta is None there and 5\.0"):
        manifests.check_model(manifest, other, tmp_path)
    many = PretrainedConfig(**{f"size_{n}": n for n in range(9)})
    with pytest.raises(ValueError, match=r" and 5 more\. Set model\.path or model\.hf_config"):
        manifests.check_model(manifest, many, tmp_path)
