"""Where a shard of ours is found in a checkpoint whose names, layers and vocabulary padding are another program's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gcpo.cluster import platform

platform.install("cpu")  # before anything of Megatron

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

from megatron_gcpo.convert import torch_dist  # noqa: E402
from megatron_gcpo.policy import foreign  # noqa: E402

LAYERS, OUT, IN, TRUE_VOCAB = 3, 4, 5, 7
NORMS = (
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
)
"""As Megatron-Core's own layers name them, and as Transformer Engine's do."""


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch_dist.GlobalTensor]:
    """A torch_dist folder with each tensor cut into two chunks, and what its table says."""
    folder.mkdir()
    written = []
    with (folder / "__0_0.distcp").open("wb") as stream:
        for key, tensor in tensors.items():
            for chunk, start in zip(tensor.tensor_split(2), (0, -(-len(tensor) // 2)), strict=True):
                begin, length = torch_dist.write_chunk(stream, chunk)
                written.append(
                    torch_dist.Written(
                        key=key,
                        dtype="float32",
                        shape=tuple(tensor.shape),
                        offset=(start, *[0] * (tensor.dim() - 1)),
                        size=tuple(chunk.shape),
                        file="__0_0.distcp",
                        begin=begin,
                        length=length,
                    )
                )
    torch_dist.write_table(folder, written, [])
    return torch_dist.read_tensors(folder)


def shard(key: str, own: torch.Tensor, *offsets: tuple[int, int, int], stacked: int = 0, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, own, *offsets, prepend_axis_num=stacked, **more)


def read(piece: ShardedTensor, found: dict[str, torch_dist.GlobalTensor]) -> torch.Tensor:
    place = foreign._place(piece, found)
    assert foreign._problem(piece, place, TRUE_VOCAB) is None
    assert place is not None
    return foreign._read(piece, place)


@pytest.mark.parametrize("ours", ["stacked", "apart"])
@pytest.mark.parametrize("theirs", ["stacked", "apart"])
def test_a_layer_is_found_whether_layers_are_stacked_or_apart(ours: str, theirs: str, tmp_path: Path) -> None:
    """Rows 2 and 3 of layer 1, in a checkpoint of either kind."""
    whole = torch.randn(LAYERS, OUT, IN)
    tensors = {"decoder.layers.mlp.linear_fc2.weight": whole}
    if theirs == "apart":
        tensors = {f"decoder.layers.{n}.mlp.linear_fc2.weight": layer for n, layer in enumerate(whole)}
    own = torch.empty(OUT // 2, IN)
    piece = (
        shard("decoder.layers.mlp.linear_fc2.weight", own, (0, 1, LAYERS), (1, 1, 2), stacked=1)
        if ours == "stacked"
        else shard("decoder.layers.1.mlp.linear_fc2.weight", own, (0, 1, 2))
    )
    assert torch.equal(read(piece, stored(tmp_path / "c", tensors)), whole[1, 2:])


@pytest.mark.parametrize("stacked", [False, True])
def test_a_norm_is_found_under_either_name(stacked: bool, tmp_path: Path) -> None:
    whole = torch.randn(LAYERS, IN)
    for ours, theirs in NORMS:
        for mine, other in ((ours, theirs), (theirs, ours)):
            tensors = (
                {f"decoder.layers.{other}": whole}
                if stacked
                else {f"decoder.layers.{n}.{other}": row for n, row in enumerate(whole)}
            )
            piece = shard(f"decoder.layers.{mine}", torch.empty(IN), (0, 2, LAYERS), stacked=1)
            found = stored(tmp_path / mine, tensors)
            assert torch.equal(read(piece, found), whole[2])


@pytest.mark.parametrize("rows", [TRUE_VOCAB, 8, 12])
def test_another_padding_of_the_vocabulary_gives_the_same_rows(rows: int, tmp_path: Path) -> None:
    """Ours has 10 rows over two ranks; whatever theirs are, the true seven are right and the rest is zero or theirs."""
    whole = torch.randn(rows, IN)
    key = "embedding.word_embeddings.weight"
    found = stored(tmp_path / "c", {key: whole})
    parts = [shard(key, torch.empty(5, IN), (0, rank, 2), allow_shape_mismatch=True) for rank in range(2)]
    got = torch.cat([read(part, found) for part in parts])
    assert torch.equal(got[:TRUE_VOCAB], whole[:TRUE_VOCAB])
    assert torch.equal(got[rows:], torch.zeros(max(0, 10 - rows), IN))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    found = stored(
        tmp_path / "c",
        {
            "decoder.layers.mlp.linear_fc2.weight": torch.randn(LAYERS, OUT, IN),
            "embedding.word_embeddings.weight": torch.randn(6, IN),
        },
    )
    cases = {
        "x.weight is not in it": shard("x.weight", torch.empty(2)),
        "linear_fc2.weight is [4, 5] there and [4, 9] here": shard(
            "decoder.layers.mlp.linear_fc2.weight", torch.empty(OUT, 9), (0, 0, LAYERS), stacked=1
        ),
        # a model with more layers than the checkpoint
        "layers.5.mlp.linear_fc2.weight is not in it": shard(
            "decoder.layers.5.mlp.linear_fc2.weight", torch.empty(OUT, IN)
        ),
        # fewer rows than the true vocabulary
        "is [6, 5] there": shard("embedding.word_embeddings.weight", torch.empty(8, IN), allow_shape_mismatch=True),
    }
    for said, piece in cases.items():
        problem = foreign._problem(piece, foreign._place(piece, found), TRUE_VOCAB)
        assert problem is not None
        assert said in problem
