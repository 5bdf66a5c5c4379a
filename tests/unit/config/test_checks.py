"""Mistakes that span sections: each is found before anything starts and names the field to change."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from megatron_gcpo.config import megatron_names, validate

SOUND: dict[str, Any] = {
    "run": {"steps": 10},
    "model": {"hf_config": {"model_type": "qwen3"}, "tokenizer": "task", "dtype": "fp32"},
    "data": {
        "train": {"kind": "task", "name": "addition"},
        "heldout": {"kind": "task", "name": "addition", "split": "heldout"},
        "max_prompt_tokens": 24,
    },
    "rollout": {"max_new_tokens": 64},
    "train": {"optimizer": {"lr": 1e-3}, "max_tokens_per_micro_batch": 256},
    "cluster": {"platform": "cpu", "processes_per_node": 2, "tensor_model_parallel_size": 2},
}


def changed(**fields: Any) -> dict[str, Any]:
    """The sound configuration with dotted fields (``a__b=1``) replaced; ``...`` removes one."""
    values = deepcopy(SOUND)
    for dotted, value in fields.items():
        *sections, name = dotted.split("__")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        if value is ...:
            del section[name]
        else:
            section[name] = value
    return values


def test_the_sound_one_is_sound() -> None:
    validate(changed(), origin="r")


CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"model__hf_config": ...}, ["set exactly one of model.path", "model.hf_config"]),
    ({"model__path": "x"}, ["set exactly one of model.path", "model.hf_config"]),
    ({"model__hf_config": {"hidden_size": 8}}, ["model.hf_config has no model_type"]),
    ({"model__tokenizer": ...}, ["model.tokenizer is missing"]),
    (
        {"data__train": {"kind": "jsonl", "path": "x"}, "data__heldout": ...},
        ['model.tokenizer: "task" needs data.train.kind: task'],
    ),
    ({"data__train": {"kind": "task"}}, ["data.train.name is missing: kind task needs it"]),
    ({"data__heldout": {"kind": "reasoning_gym"}}, ["data.heldout.name is missing: kind reasoning_gym needs it"]),
    ({"data__heldout": {"kind": "jsonl", "name": "x"}}, ["data.heldout.path is missing: kind jsonl needs it"]),
    ({"data__heldout": {"kind": "parquet"}}, ["data.heldout.path is missing"]),
    ({"data__heldout": {"kind": "hf"}}, ["data.heldout.path is missing"]),
    ({"cluster__processes_per_node": 3}, ["3 processes", "start a multiple of 2 processes"]),
    ({"cluster__sequence_parallel": True, "cluster__tensor_model_parallel_size": 1}, ["cluster.sequence_parallel"]),
    ({"cluster__context_parallel_size": 2, "cluster__processes_per_node": 4}, ["cluster.context_parallel_size 2"]),
    ({"cluster__virtual_pipeline_model_parallel_size": 2}, ["cluster.virtual_pipeline_model_parallel_size 2"]),
    (
        {"cluster__processes_per_node": 4, "rollout__prompts_per_step": 9},
        ["rollout.prompts_per_step 9", "use 8 or 10"],
    ),
    (
        {"cluster__processes_per_node": 4, "run__stage": "sft", "train__sft_rows_per_step": 9},
        ["train.sft_rows_per_step 9", "use 8 or 10"],
    ),
    ({"train__mini_batches": 3}, ["train.mini_batches 3 does not divide the 16 groups"]),
    (
        {"train__max_tokens_per_micro_batch": 64},
        ["88 tokens", "train.max_tokens_per_micro_batch 64: raise it to at least 88"],
    ),
    ({"evaluate__ks": [1, 16]}, ["evaluate.ks [16]", "evaluate.samples: raise it from 8 to 16"]),
    ({"evaluate__every": 5, "data__heldout": ...}, ["there is no data.heldout", "evaluate.every=0"]),
    ({"run__output_dir": "runs/{nme}"}, ["run.output_dir", "{name} and {seed}"]),
    ({"run__output_dir": "runs/{"}, ["run.output_dir", "{name} and {seed}"]),
    ({"train__optimizer": {}}, ["train.optimizer.lr is missing"]),
    ({"train__optimizer": {"lr": "fast"}}, ["train.optimizer.lr is 'fast'"]),
    ({"train__scheduler": {"lr_warmup_steps": 10}}, ["train.scheduler.lr_warmup_steps 10", "10 optimizer updates"]),
    ({"train__scheduler": {"lr_warmup_steps": "all"}}, ["train.scheduler.lr_warmup_steps is 'all'"]),
    ({"train__optimizer": {"lr": 1e-3, "adam_beta3": 1}}, ["train.optimizer.adam_beta3", "did you mean adam_beta"]),
    ({"train__scheduler": {"lr_warmup": 1}}, ["train.scheduler.lr_warmup is not an option"]),
    ({"train__ddp": {"bucket_sise": 1}}, ["train.ddp.bucket_sise", "did you mean bucket_size?"]),
    ({"observe__mlflow": {"uri": "x"}}, ["observe.mlflow knows tracking_uri and experiment, not uri"]),
]


@pytest.mark.parametrize(("fields", "said"), CASES, ids=[" ".join(fields) for fields, _ in CASES])
def test_a_mistake_names_the_field_to_set(fields: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        validate(changed(**fields), origin="recipe.yaml")
    lines = [line for line in str(error.value).splitlines() if all(part in line for part in said)]
    assert len(lines) == 1, str(error.value)
    assert lines[0].startswith("recipe.yaml: ")


def test_warm_up_may_be_as_long_as_the_updates_allow() -> None:
    """Ten steps of two updates: nineteen of warm-up still leave one; in stage sft a step has one update."""
    fields = {"train__mini_batches": 2, "train__scheduler": {"lr_warmup_steps": 19}}
    assert validate(changed(**fields), origin="r").total_updates == 20
    with pytest.raises(ValueError, match="lr_warmup_steps 19 is not below the run's 10"):
        validate(changed(run__stage="sft", **fields), origin="r")


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_trackers_that_are_not_installed_are_refused_early(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    megatron_names.option_names.cache_clear()
    with pytest.raises(ValueError, match=f"observe.{package} needs the package {package}: pip install {package}"):
        validate(changed(**{f"observe__{package}": {}}), origin="r")
    megatron_names.option_names.cache_clear()


def test_names_of_megatron_options_are_those_of_its_source() -> None:
    """Spot checks; tests/dist compares them with the classes themselves, which take ten seconds to import."""
    assert {"lr", "min_lr", "weight_decay", "adam_beta2", "clip_grad"} <= megatron_names.option_names(
        *megatron_names.OPTIMIZER
    )
    assert {"optimizer", "lr_decay_style", "wd_incr_steps"} <= megatron_names.option_names(*megatron_names.SCHEDULER)
    assert {"overlap_grad_reduce", "bucket_size"} <= megatron_names.option_names(*megatron_names.DDP)
