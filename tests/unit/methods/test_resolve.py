"""From the method section of a configuration to a method; the documented defaults; the errors."""

from __future__ import annotations

from importlib import import_module

import pytest
from pydantic import ValidationError

from megatron_gcpo.credit import CreditOptions
from megatron_gcpo.credit.options import CREDIT_FIELDS
from megatron_gcpo.methods import METHODS, resolve

DEFAULTS = {
    "gcpo": ("2605.11461", {"embeddings"}, 0.2, "token_mean", True, 0),
    "grpo": ("2402.03300", set(), 0.2, "sequence_mean_token_mean", False, 0),
    "dapo": ("2503.14476", set(), 0.28, "token_mean", True, 3),
    "dr_grpo": ("2503.20783", set(), 0.2, "sequence_mean_fixed_length", False, 0),
    "rloo": ("2402.14740", set(), 0.2, "sequence_mean_fixed_length", False, 0),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_documented_ones(name):
    method, options = resolve({"name": name})
    assert method.name == name
    loss = options.loss
    found = (method.arxiv, set(method.needs), loss.clip_high, loss.reduce, options.group_filter, options.refill)
    assert found == DEFAULTS[name]
    assert (loss.clip_low, loss.dual_clip, loss.kl_coef, options.overlong) == (0.2, None, 0.0, None)
    assert method.arxiv in (import_module(f"megatron_gcpo.methods.{name}").__doc__ or "")


@pytest.mark.parametrize("name", METHODS)
def test_a_partial_loss_section_keeps_the_methods_own_defaults(name):
    _, plain = resolve({"name": name})
    _, options = resolve({"name": name, "loss": {"clip_low": 0.1}})
    assert options.loss.model_dump() == plain.loss.model_dump() | {"clip_low": 0.1}


def test_gcpo_options_are_the_credit_options():
    _, options = resolve({"name": "gcpo"})
    assert options.credit_options() == CreditOptions()
    changed = {"value": "det", "c": 2.0, "reward_map": "binary", "normalize": "mean", "floor": 0.1, "credit_mix": 0.5}
    changed |= {"exact_limit": 12, "num_permutations": 64, "seed": 9, "cooperation": 2.0}
    assert set(changed) == set(CREDIT_FIELDS)
    _, options = resolve({"name": "gcpo", **changed})
    assert options.credit_options() == CreditOptions(**changed)


def test_records_are_frozen():
    _, options = resolve({"name": "gcpo"})
    with pytest.raises(ValidationError, match="frozen"):
        options.c = 1.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"name": "grppo"},
            r"method\.name 'grppo' is unknown; did you mean grpo\?$",
        ),
        ({"name": "zzz"}, r"method\.name 'zzz' is unknown; known here: bet, cispo, clip_cov, "),
        ({"name": ["gcpo"]}, r"method\.name \['gcpo'\] is unknown"),
        ({}, r"method\.name is missing: set it to one of bet"),
        ({"name": "gcpo", "credit_mixx": 1}, r"method\.credit_mixx is not a field; did you mean method\.credit_mix\?"),
        (
            {"name": "grpo", "c": 1},
            r"method\.c is not a field; known here: group_filter, loss, overlong, refill, sampler",
        ),
        (
            {"name": "dapo", "loss": {"clip_hi": 1}},
            r"method\.loss\.clip_hi is not a field; did you mean method\.loss\.clip_high\?",
        ),
        (
            {"name": "dapo", "overlong": {"max_tokens": 9, "buffer": 3, "penality": 1}},
            r"method\.overlong\.penality is not a field; did you mean method\.overlong\.penalty\?",
        ),
        ({"name": "dapo", "overlong": {"buffer": 3}}, r"method\.overlong\.max_tokens is missing: set it"),
        ({"name": "dapo", "overlong": {"max_tokens": 3, "buffer": 9}}, r"overlong\.buffer 9 is larger .* lower it"),
        ({"name": "gcpo", "c": -1}, r"c = -1\.0 is not usable: set it to a number within \(0"),
        ({"name": "gcpo", "value": "x"}, r"method\.value: input should be 'logdet' or 'det' \(got 'x'\)"),
        ({"name": "gcpo", "exact_limit": 99}, r"method\.exact_limit: .*less than or equal to 24 \(got 99\)"),
        ({"name": "grpo", "refill": 2}, "set group_filter: true, or refill: 0"),
        ({"name": "grpo", "loss": {"kl_coef": 0.1, "kl_estimator": "k1"}}, "use k2 or k3"),
        ({"name": "grpo", "loss": {"clip_low": 1.5}}, r"method\.loss\.clip_low: .*less than 1 \(got 1\.5\)"),
        ({"name": "grpo", "loss": {"reduce": "mean"}}, r"method\.loss\.reduce: .*'token_mean'"),
        ({"name": "grpo", "loss": 3}, r"method\.loss must be a section with fields of its own \(got 3\)"),
        (
            {"name": "grpo", "token_credit": ["cww"]},
            r"method\.token_credit\.0\.name 'cww' is unknown; did you mean cw\?",
        ),
        ({"name": "grpo", "token_credit": [{"strength": 1}]}, r"method\.token_credit\.0 has no name"),
        ({"name": "grpo", "token_credit": ["cw", "cw"]}, "token_credit names cw twice"),
        (
            {"name": "grpo", "token_credit": [{"name": "papo", "strenth": 0.1}]},
            r"method\.token_credit\.0\.strenth is not a field; did you mean method\.token_credit\.0\.strength\?",
        ),
        (
            {"name": "grpo", "loss": {"kl_coef": 0.1, "kl_controller": {"name": "adaptive", "target": -1}}},
            r"method\.loss\.kl_controller\.target: .*greater than 0 \(got -1\)",
        ),
        ({"name": "grpo", "loss": {"kl_controller": "expo"}}, r"has nothing to steer: set kl_coef above 0"),
        (
            {"name": "grpo", "sampler": {"name": "gaussian", "sigam": 1}},
            r"method\.sampler\.sigam is not a field; did you mean method\.sampler\.sigma\?",
        ),
        ({"name": "conspo", "loss": {"reduce": "token_mean"}}, r"method\.loss\.reduce: .*'sequence_mean_token_mean'"),
        ({"name": "conspo", "token_credit": ["cw"]}, "reads labels, not advantages"),
        (
            {"name": "conspo", "loss": {"kl_coef": 0.1, "kl_in": "reward"}},
            r"method\.loss\.kl_in: conspo replaces advantages",
        ),
        ({"name": "holderpo", "token_credit": ["papo"]}, "one ratio for a whole answer, over which papo"),
        ({"name": "gspo", "loss": {"kl_coef": 0.1, "kl_in": "reward"}}, "one advantage for a whole answer"),
        ({"name": "reinforce_pp", "group_filter": True}, "normalized over the step: set group_filter: false"),
    ],
)
def test_one_line_says_what_is_valid(section, message):
    with pytest.raises(ValueError, match=message) as caught:
        resolve(section)
    assert "\n" not in str(caught.value)
