"""tools/compare_runs.py: what it overrides, and the table it prints."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "configs/recipe/quickstart.yaml")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compare_runs", ROOT / "tools/compare_runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", ["grpo", "gcpo", "darling", "dqo", "passk", "opefo", "gspo"])
def test_shared_settings_stay_shared(tool, method):
    assert tool.fitting(RECIPE, method) == []


def test_a_method_that_would_be_another_one_keeps_its_own(tool):
    assert tool.fitting(RECIPE, "conspo") == ["method.loss.reduce=sequence_mean_token_mean"]
    assert tool.fitting(RECIPE, "kl_cov") == ["train.mini_batches=2"]
    assert tool.fitting(RECIPE, "reinforce_pp") == ["method.group_filter=false"]


def test_every_shipped_method_can_be_compared(tool):
    for piece in sorted((ROOT / "configs/method").glob("*.yaml")):
        assert isinstance(tool.fitting(RECIPE, piece.stem), list)


def test_an_unknown_method_is_named(tool):
    with pytest.raises(ValueError, match=r"method/grpp"):
        tool.fitting(RECIPE, "grpp")


def test_one_seed_has_a_difference_and_no_interval(tool):
    file = io.StringIO()
    Console(file=file, width=200).print(
        tool.table([{"pass@1": 0.3}] * 2, {"grpo": [{"pass@1": 0.5}], "gcpo": [{"pass@1": 0.6}]}, 1)
    )
    assert "+0.100" in file.getvalue()
    assert "[" not in file.getvalue()


def test_the_table_has_paired_differences(tool):
    grpo = [{"pass@1": 0.5, "entropy": 1.0}, {"pass@1": 0.7, "entropy": 0.8}]
    gcpo = [{"pass@1": 0.6, "entropy": 1.5}, {"pass@1": 0.8, "entropy": 1.3}]
    file = io.StringIO()
    Console(file=file, width=200).print(tool.table([{"pass@1": 0.3}] * 4, {"grpo": grpo, "gcpo": gcpo}, 2))
    text = file.getvalue()
    assert "0.600 ± 0.141" in text
    assert "+0.100 [+0.100, +0.100]" in text
    assert "+0.500 [+0.500, +0.500]" in text
    assert "difference to grpo" in text
