"""How recipes compose, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gcpo.config import Config, load, validate
from megatron_gcpo.methods import resolve

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs" / "recipe").glob("*.yaml"))
METHODS = sorted((ROOT / "configs" / "method").glob("*.yaml"))

BASE = """
model: {hf_config: {model_type: qwen3}, tokenizer: task, dtype: fp32}
data:
  train: {kind: task, name: addition}
  max_prompt_tokens: 20
train: {optimizer: {lr: 1.0e-3}}
"""


@pytest.fixture
def write(tmp_path: Path):
    """Writes files of a configuration folder; the last one is the recipe."""

    def write(**files: str) -> Path:
        for name, text in {"base/plain": BASE, **{n.replace("__", "/"): t for n, t in files.items()}}.items():
            path = tmp_path / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return path

    return write


def message(recipe: Path | str, *overrides: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load(recipe, overrides)
    return str(error.value)


def test_later_pieces_win_then_the_recipe_then_the_command_line(write) -> None:
    recipe = write(
        a__one="rollout: {temperature: 0.1, top_k: 1, group_size: 3, max_new_tokens: 10}",
        b__two="rollout: {top_k: 2, group_size: 4, max_new_tokens: 11}",
        recipe__r="defaults: [base/plain, a/one, b/two]\nrollout: {group_size: 5, max_new_tokens: 12}",
    )
    rollout = load(recipe, ["rollout.max_new_tokens=13"]).rollout
    assert (rollout.temperature, rollout.top_k, rollout.group_size, rollout.max_new_tokens) == (0.1, 2, 5, 13)


def test_a_piece_on_the_command_line_takes_the_place_of_its_folder_s_piece(write) -> None:
    """In its place, not after the others: a later piece still wins over it."""
    recipe = write(
        a__one="run: {name: one, steps: 1}",
        a__other="run: {name: other}\nrollout: {top_k: 7}",
        b__last="rollout: {top_k: 9}",
        recipe__r="defaults: [base/plain, a/one, b/last]",
    )
    config = load(recipe, ["a/other"])
    assert (config.run.name, config.run.steps, config.rollout.top_k) == ("other", 100, 9)


def test_a_piece_of_a_new_folder_comes_last(write) -> None:
    recipe = write(
        a__one="rollout: {top_k: 1}", b__two="rollout: {top_k: 2}", recipe__r="defaults: [base/plain, a/one]"
    )
    assert load(recipe, ["b/two"]).rollout.top_k == 2


def test_pieces_have_defaults_of_their_own_and_are_found_in_the_folders_above(write) -> None:
    recipe = write(
        a__inner="run: {steps: 5}",
        a__outer="defaults: [a/inner]\nrun: {name: outer}",
        recipe__r="defaults: [base/plain, a/outer]",
    )
    config = load(recipe)
    assert (config.run.steps, config.run.name) == (5, "outer")


def test_lists_are_replaced_and_null_unsets(write) -> None:
    recipe = write(recipe__r="defaults: [base/plain]\nevaluate: {ks: [1, 2, 4]}\nrollout: {dtype: bf16}")
    config = load(recipe, ["evaluate.ks=[3]", "rollout.dtype=null"])
    assert config.evaluate.ks == (3,)
    assert config.rollout.dtype is None


def test_numbers_like_1e_4_are_numbers(write) -> None:
    recipe = write(recipe__r="defaults: [base/plain]\ntrain: {optimizer: {lr: 1e-4, min_lr: 0}}")
    assert load(recipe).train.optimizer["lr"] == 1e-4
    assert load(recipe, ["train.optimizer.lr=2e-5"]).train.optimizer["lr"] == 2e-5


def test_a_piece_takes_its_place_in_a_recipe_made_of_another(write) -> None:
    recipe = write(
        method__gcpo="method: {name: gcpo, normalize: split}",
        method__grpo="method: {name: grpo}",
        recipe__base="defaults: [base/plain, method/gcpo]\nmethod: {group_filter: true}",
        recipe__r="defaults: [recipe/base]\nrun: {steps: 3}",
    )
    assert load(recipe).method == {"name": "gcpo", "normalize": "split", "group_filter": True}
    assert load(recipe, ["method/grpo"]).method == {"name": "grpo", "group_filter": True}


OWN = {
    "conspo": ("loss.reduce", "sequence_mean_token_mean"),
    "ed_idpo": ("loss.reduce", "sequence_mean_token_mean"),
    "reinforce_pp": ("group_filter", "false"),
    "lead": ("group_filter", "false"),
}
"""Settings without which a method would be another one."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_work_with_every_shipped_method(recipe: Path) -> None:
    """What a recipe sets for all methods and one of them cannot take is refused by its name, and then overridden."""
    for method in METHODS:
        piece = f"method/{method.stem}"
        own = []
        if method.stem in OWN:
            field, value = OWN[method.stem]
            if field.split(".")[-1] in str(load(recipe).method):
                with pytest.raises(ValueError, match=field):
                    resolve(load(recipe, [piece]).method)
            own = [f"method.{field}={value}"]
        assert resolve(load(recipe, [piece, *own]).method)[0].name == method.stem


def test_the_configuration_a_run_leaves_behind_is_a_recipe(tmp_path: Path) -> None:
    config = load(RECIPES[0], ["run.steps=77"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load(tmp_path / "config.yaml") == config


def test_records_are_frozen() -> None:
    config = load(RECIPES[0])
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("rolout.temperature=1", "rolout is not a field; did you mean rollout?"),
        ("rollout.temprature=1", "rollout.temprature is not a field; did you mean rollout.temperature?"),
        ("data.train.kimd=x", "data.train.kimd is not a field; did you mean data.train.kind?"),
        ("data.heldout={kind: task, nam: x}", "data.heldout.nam is not a field; did you mean data.heldout.name?"),
        ("train.optimiser.lr=1", "train.optimiser is not a field; did you mean train.optimizer?"),
        ("train.optimizer.weight_dacay=1", "did you mean weight_decay?"),
        ("train.scheduler.lr_warmup_step=1", "OptimizerParamScheduler: did you mean lr_warmup_steps?"),
        ("train.ddp.overlap_grad_reduse=true", "DistributedDataParallelConfig: did you mean overlap_grad_reduce?"),
        ("zzz=1", "zzz is not a field; known here: checkpoint, cluster, correction, data,"),
    ],
)
def test_unknown_keys_name_the_nearest_valid_one(write, override: str, nearest: str) -> None:
    recipe = write(recipe__r="defaults: [base/plain]")
    text = message(recipe, override)
    assert text.startswith(f"{recipe}: ")
    assert nearest in text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.steps=abc", "run.steps: input should be a valid integer"),
        ("run.steps=0", "run.steps: input should be greater than 0 (got 0)"),
        ("rollout.group_size=1", "rollout.group_size: input should be greater than or equal to 2 (got 1)"),
        ("data.template=chta", "data.template: input should be 'chat' or 'plain' (got 'chta')"),
        ("run=5", "run must be a section with fields of its own (got 5)"),
        ("method=gcpo", "method must be a section with fields of its own (got 'gcpo')"),
        ("data.train={name: addition, kind: null}", "data.train.kind: input should be"),
        ("run.name=${nothing}", "Interpolation key 'nothing' not found"),
        ("run.steps", "override 'run.steps' has no '='"),
        ("=5", "override '=5' has no name"),
        ("run.steps=[1", "cannot read the overrides run.steps=[1"),
    ],
)
def test_wrong_values_are_said_in_one_line(write, override: str, said: str) -> None:
    text = message(write(recipe__r="defaults: [base/plain]"), override)
    assert said in text
    assert "\n" not in text


def test_every_problem_has_a_line_of_its_own(write) -> None:
    text = message(write(recipe__r="defaults: [base/plain]"), "run.steps=0", "rollout.temprature=1")
    assert len(text.splitlines()) == 2


def test_missing_sections_are_named(write) -> None:
    text = message(write(recipe__r="run: {steps: 1}"))
    assert "model is missing: set it" in text
    assert "data is missing: set it" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "is not valid YAML: while parsing a flow sequence"),
        ("\tx: 1", "is not valid YAML: while scanning"),
        ("a: 1\na: 2", "found duplicate key a"),
        ("- a", "must hold a mapping of sections"),
        ("defaults: model/x", "defaults must be a list of pieces"),
        ("defaults: [recipe/r]", "is among its own defaults: "),
    ],
)
def test_files_that_are_no_configuration(write, text: str, said: str) -> None:
    recipe = write(recipe__r=text)
    got = message(recipe)
    assert said in got
    assert str(recipe) in got
    assert "\n" not in got


def test_a_file_that_is_not_text(write) -> None:
    recipe = write(recipe__r="")
    recipe.write_bytes(b"\xff\xfe\x00")
    assert "is not valid YAML" in message(recipe)


def test_missing_files_name_the_nearest(write) -> None:
    recipe = write(method__grpo="{}", recipe__quick="defaults: [base/plain]", recipe__r="defaults: [base/plian]")
    missing = recipe.parent / "quik.yaml"
    assert message(missing) == f"there is no recipe {missing}; did you mean {recipe.parent / 'quick.yaml'}?"
    assert (
        message(recipe)
        == f"{recipe}: there is no piece base/plian.yaml in the folders above it; did you mean base/plain?"
    )
    assert "did you mean method/grpo?" in message(recipe.parent / "quick.yaml", "method/gpro")
    assert "is a folder: name a recipe file in it" in message(recipe.parent)
    assert message(recipe.parent / "no" / "such.yaml") == f"there is no recipe {recipe.parent / 'no' / 'such.yaml'}"


def test_validate_takes_a_plain_mapping() -> None:
    config = validate(yaml.safe_load(BASE), origin="here")
    assert isinstance(config, Config)
    assert config.data.train.name == "addition"
