"""reasoning-gym's own scorers, some of which evaluate what the model wrote: the real door, and a real break-out."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sympy import parse_expr

from megatron_gcpo.config.records import VerifyConfig
from megatron_gcpo.verify.base import Rejected, Sample
from megatron_gcpo.verify.pool import VerifierPool
from megatron_gcpo.verify.table import create

from .support import group

COUNTDOWN = {
    "question": "Use 2, 3, 4 to make 10",
    "answer": "2*3 + 4",
    "metadata": {"source_dataset": "countdown", "numbers": [2, 3, 4], "target": 10},
}
CHAIN_SUM = {"question": "1 + 2", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    """Unscreened on purpose: what an attacker finds who has got around the screen."""
    config = VerifyConfig(name="reasoning_gym", options={"screen": False}, num_workers=1, timeout_s=4, memory_mb=512)
    with VerifierPool(config) as pool:
        yield pool


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that anybody may write to."""
    folder = Path(tempfile.mkdtemp(prefix="victim-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_right_wrong_and_half_right(pool: VerifierPool) -> None:
    texts = ["<answer>4 + 3*2</answer>", "thinking\nThe answer is 2*3+4", "<answer>2+3+4</answer>", "4 + 2*3", "no"]
    countdown = group(texts, answer="2*3 + 4", extras={"entry": COUNTDOWN})
    chain_sum = group(["<answer>3</answer>", "<answer>33</answer>", "<answer>4</answer>"], extras={"entry": CHAIN_SUM})
    first, second = pool.score([countdown, chain_sum])
    assert first.rewards_G.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert second.rewards_G.tolist() == [1.0, 0.0, 0.0]
    assert {*first.statuses_G, *second.statuses_G} == {"ok"}


def test_a_break_out_through_countdown_fails(pool: VerifierPool, open_folder: Path) -> None:
    """The payload does what it says when evaluated unconfined; in the pool it leaves no trace, and others get theirs."""
    target = open_folder / "pwned"
    payload = f"__import__('pathlib').Path('{target}').touch() or 10"
    parse_expr(payload)
    assert target.exists(), "the payload must work where nothing holds it"
    target.unlink()
    shell = f"__import__('os').system('touch {target}') or 10"
    spawn = f"__import__('subprocess').run(['touch', '{target}']) and 10"
    texts = [payload, shell, spawn, "9**9**9**9", "__import__('os')._exit(0)", "__import__('os').kill(-1, 9)", "2*3+4"]
    verdict = pool.score([group([f"<answer>{text}</answer>" for text in texts], extras={"entry": COUNTDOWN})])[0]
    assert not any(open_folder.iterdir())
    assert verdict.rewards_G.tolist() == [0.0] * 6 + [1.0]
    assert verdict.statuses_G == ("ok", "ok", "ok", "timeout", "killed", "ok", "ok")


def test_forging_a_right_answer_needs_to_get_past_the_screen(pool: VerifierPool) -> None:
    """Code in the scorer's process can rewrite the scorer. With the screen off that pays; by default it is on."""
    patch = "import reasoning_gym.games.countdown as c; c._extract_ints = lambda a: [2, 3, 4]"
    forgery = f'exec("{patch}") or 10'
    text = f"<answer>{forgery}</answer>"
    cheated, honest = pool.score(
        [group([text], extras={"entry": COUNTDOWN}), group(["2+3+4"], extras={"entry": COUNTDOWN})]
    )
    assert cheated.rewards_G.tolist() == [1.0]
    assert honest.rewards_G.tolist() == [0.0]
    with pytest.raises(Rejected):
        create("reasoning_gym", {}).judge(Sample("", "", {"entry": COUNTDOWN}, text))


def test_prompts_without_an_entry_are_refused(pool: VerifierPool) -> None:
    with pytest.raises(ValueError, match=r"set data\.train\.kind to reasoning_gym"):
        pool.score([group(["1"], answer="1")])
    with pytest.raises(ValueError, match="no_such_set"):
        pool.score([group(["1"], extras={"entry": {"metadata": {"source_dataset": "no_such_set"}}})])


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="extract 'tags' is unknown: use auto, tag, boxed, whole"):
        create("reasoning_gym", {"extract": "tags"})
    with pytest.raises(ValueError, match="threshold 0"):
        create("reasoning_gym", {"threshold": 0})
