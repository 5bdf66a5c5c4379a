"""A replica keeps its text to itself, and what replicas do together is what the single file does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.dist.whole_runs import MINI_BATCHES

ROOT = Path(__file__).parents[2]


def test_no_text_tokens_or_embeddings_leave_their_replica(runs: list[dict[str, Any]]) -> None:
    """Of two replicas' run, every byte of every collective between them is searched for what is theirs alone."""
    for rank in runs:
        leaks = rank["leaks"]
        assert leaks["secrets"] > 40
        assert leaks["between"] > 100_000  # gradients and weights did travel
        assert leaks["control"]
        assert leaks["between_replicas"] == []


def test_inside_a_replica_only_tensors_travel(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        assert rank["leaks"]["batches"] >= 2 + 1  # two steps, and the push before them
        assert rank["leaks"]["strings_in_batches"] == []
        assert rank["leaks"]["inside"] == []


def test_replicas_hold_the_same_policy_and_different_groups(runs: list[dict[str, Any]]) -> None:
    one, two = (rank["replicas"] for rank in runs)
    assert len(one["updates"]) == len(two["updates"]) == 2 * MINI_BATCHES
    for a, b in zip(one["updates"], two["updates"], strict=True):
        assert all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])
        assert a["stats"] == b["stats"]
    ids = [[g.prompt.id for e in rank["experiences"] for g in e.groups] for rank in (one, two)]
    assert len(set(ids[0] + ids[1])) == 2 * 4


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gcpo_single_file", ROOT / "examples" / "gcpo_single_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_credits_are_those_of_the_single_file(runs: list[dict[str, Any]], example: ModuleType) -> None:
    """From verdicts and embeddings to the advantages in the batch, group by group."""
    paid = 0
    for rank in runs:
        for experience, embeddings in zip(rank["replicas"]["experiences"], rank["replicas"]["embeddings"], strict=True):
            for verdict, credit, embeddings_GD in zip(experience.verdicts, experience.credits, embeddings, strict=True):
                rewards_G = torch.from_numpy(verdict.rewards_G)
                if embeddings_GD is None:  # at most one correct rollout, whose direction makes no difference
                    embeddings_GD = torch.eye(1, 8).repeat(len(rewards_G), 1)
                expected_G = example.gcpo_advantages(embeddings_GD, rewards_G)
                torch.testing.assert_close(credit.advantages_G, expected_G, rtol=1e-7, atol=1e-7)
                paid += int((rewards_G > 0).sum() >= 2)
    assert paid >= 2


def test_updates_are_those_of_the_single_file(runs: list[dict[str, Any]], recipe: Path, example: ModuleType) -> None:
    """Loss and gradient norm of both replicas' rows together, by plain autograd on the Hugging Face model.

    Both updates of a step: the first on-policy, the second against the log-probs from before the first.
    """
    updates = list(zip(*(rank["replicas"]["updates"] for rank in runs), strict=True))
    moved = 0
    for number, parts in enumerate(updates):
        rows = [row for part in parts for row in rows_of(part["batch"])]
        if not rows:
            continue
        model = hugging_face_model(recipe, parts[0]["weights"])
        width = max(len(row["tokens"]) for row in rows)
        tokens_RS, mask_RS, old_RS = (
            torch.stack([padded(row[n], width) for row in rows]) for n in ("tokens", "mask", "old")
        )
        attention_RS = torch.stack([padded(torch.ones_like(row["tokens"]), width) for row in rows])
        new_RS = example.token_logprobs(model, tokens_RS, attention_RS)
        if number % MINI_BATCHES == 0:
            torch.testing.assert_close(new_RS.detach() * mask_RS, old_RS * mask_RS, rtol=0, atol=1e-4)
        advantages_R = torch.stack([row["advantage"] for row in rows])
        loss = example.clipped_loss(new_RS, old_RS, advantages_R, mask_RS)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        stats = parts[0]["stats"]
        assert stats.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
        assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        moved += not torch.allclose(new_RS * mask_RS, old_RS * mask_RS, atol=1e-3)
    assert moved >= 1


def rows_of(batch: Any) -> Iterator[dict[str, torch.Tensor]]:
    for start, end in zip(batch.cu_seqlens_N1[:-1], batch.cu_seqlens_N1[1:], strict=True):
        row = slice(int(start), int(end))
        mask = batch.mask_T[row]
        yield {
            "tokens": batch.tokens_T[row],
            "mask": mask,
            "old": batch.old_logprobs_T[row],
            "advantage": batch.advantages_T[row][mask.bool()][0],
        }


def padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - len(values)))


def hugging_face_model(recipe: Path, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_gcpo.config import load

    shape = dict(load(recipe).model.hf_config or {})
    config = AutoConfig.for_model(
        shape.pop("model_type"), **shape, vocab_size=len(weights["model.embed_tokens.weight"])
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model.eval()
