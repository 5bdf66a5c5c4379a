"""The runs that several files look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import whole_runs
from tests.dist.harness import run_ranks
from tests.dist.tiny import write_recipe


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="session")
def recipe(runs_folder: Path) -> Path:
    return write_recipe(
        runs_folder,
        run={"steps": whole_runs.STEPS, "output_dir": str(runs_folder / "run")},
        checkpoint={"every": whole_runs.EVERY, "keep_last": 2},
        # So short that texts come back after a checkpoint: the encoder's memory must not make a difference.
        rollout={"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 3},
        evaluate={"samples": 2, "ks": [1, 2], "every": whole_runs.EVERY},
        train={
            "mini_batches": whole_runs.MINI_BATCHES,
            "max_tokens_per_micro_batch": 64,
            "optimizer": {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0},
            "scheduler": {"lr_decay_style": "linear", "lr_warmup_steps": 2},
        },
    )


@pytest.fixture(scope="session")
def runs(recipe: Path, runs_folder: Path) -> list[dict[str, Any]]:
    arguments = {"recipe": str(recipe), "folder": str(runs_folder)}
    return run_ranks(whole_runs.__file__, "work", 2, arguments, runs_folder / "ranks", timeout_s=400)
