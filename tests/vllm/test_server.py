"""A real vLLM server, started and kept alive by ``megatron-gcpo serve``, from its first push to its death and return.

One server for all: the tests run in the order of the file, and each leaves it serving.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

pytest.importorskip("aiohttp", reason="aiohttp comes with `make vllm`")

from megatron_gcpo.config.records import RolloutConfig
from megatron_gcpo.rollout.engine import SampleRequest, Sampling
from megatron_gcpo.rollout.vllm.server import ServerEngine
from tests.vllm import tiny

pytestmark = pytest.mark.vllm

KEY = "a-word-that-nobody-guesses"
LIMIT = 1e-3
LONG = 480


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class Served:
    keeper: subprocess.Popen[str]
    url: str
    rollout: RolloutConfig
    lines: list[str]
    """What the command printed so far."""

    def engine(self, **push: Any) -> ServerEngine:
        rollout = RolloutConfig.model_validate({**self.rollout.model_dump(), "push": push})
        return ServerEngine(rollout.vllm.urls, tiny.CONFIGS["tied"], rollout, dtype="fp32", max_positions=24 + LONG)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until the command has printed it so often."""
        until(lambda: sum(text in line for line in self.lines) >= times or self.keeper.poll() is not None)
        assert self.keeper.poll() is None, self.lines


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    port = 8741
    (folder / "key").write_text(KEY)
    rollout = {
        "engine": "vllm_server",
        "max_new_tokens": LONG,
        "max_batch_rows": 16,
        "vllm": {
            "urls": [f"http://127.0.0.1:{port}"],
            "api_key_file": str(folder / "key"),
            "request_timeout_s": 120,
            "start_timeout_s": 240,
        },
    }
    recipe = {
        "run": {"output_dir": str(folder / "run")},
        "model": {
            "hf_config": {"model_type": "qwen3", **tiny.SHAPE, "tie_word_embeddings": True},
            "tokenizer": "task",
            "dtype": "fp32",
        },
        "cluster": {"platform": "cpu"},
        "data": {"train": {"kind": "task", "name": "addition"}, "template": "plain", "max_prompt_tokens": 24},
        "rollout": rollout,
        "train": {"optimizer": {"lr": 0.001}},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-u", "-m", "megatron_gcpo.cli", "serve", str(path)]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    assert keeper.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(keeper.stdout,), daemon=True)
    reader.start()
    served = Served(
        keeper=keeper,
        url=rollout["vllm"]["urls"][0],
        rollout=RolloutConfig.model_validate(rollout),
        lines=lines,
    )
    try:
        served.wait_for("ready: 1 servers")
        yield served
    finally:
        keeper.terminate()
        keeper.wait(60)
        reader.join(10)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return tiny.random_model("tied", 1), tiny.random_model("tied", 2)


@pytest.fixture(scope="module")
def engine(served: Served) -> Iterator[ServerEngine]:
    made = served.engine()
    yield made
    made.close()


def status(url: str, path: str, key: str | None = None, method: str = "POST") -> int:
    headers = {"content-type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + path, b"{}" if method == "POST" else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def drawn(served: Served) -> float:
    """Tokens that the server has drawn since it started."""
    request = urllib.request.Request(served.url + "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read().decode()
    return sum(float(n) for n in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE))


def test_every_path_but_health_wants_the_key(served: Served) -> None:
    assert status(served.url, "/health", method="GET") == 200
    for path in ("/collective_rpc", "/update_weights", "/pause?mode=keep", "/inference/v1/generate", "/sleep"):
        assert status(served.url, path) == 401, path
        assert status(served.url, path, "another-word") == 401, path
    assert status(served.url, "/version", method="GET") == 401
    assert status(served.url, "/version", KEY, method="GET") == 200


def test_random_weights_are_not_served(engine: ServerEngine) -> None:
    with pytest.raises(ValueError, match="none were loaded yet"):
        engine.generate(tiny.requests(), Sampling())


def test_holds_what_was_pushed_after_each_of_three_pushes(engine: ServerEngine, models: tuple[Any, Any]) -> None:
    for version, model in enumerate((models[0], models[1], models[0]), start=1):
        engine.load_weights(tiny.checkpoint(model), version=version)
        assert engine.policy_version == version
        tiny.assert_holds(engine, model, LIMIT)


def test_logprobs_are_of_the_sampling_distribution_and_seeds_decide(
    engine: ServerEngine, models: tuple[Any, Any]
) -> None:
    sampling = Sampling(temperature=0.7, stop_token_ids=(7, 11))
    asked = tiny.requests(tiny.PROMPTS * 4, new=60, first_seed=2**63)
    samples = engine.generate(asked, sampling)
    for request, sample in zip(asked, samples, strict=True):
        truth_TV = tiny.true_logprobs(models[0], request.prompt_token_ids, sample.token_ids, 0.7)
        np.testing.assert_allclose(sample.logprobs, tiny.of_tokens(truth_TV, sample.token_ids), atol=LIMIT)
        stopped = sample.token_ids[-1] in (7, 11)
        assert sample.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(sample.token_ids) == 60
    again = engine.generate(asked[::-1], sampling)[::-1]
    assert [s.token_ids.tolist() for s in again] == [s.token_ids.tolist() for s in samples]
    assert len({tuple(s.token_ids) for s in samples}) == len(samples)


def test_weights_change_in_the_middle_of_sequences(
    served: Served, engine: ServerEngine, models: tuple[Any, Any]
) -> None:
    """The tokens before a pause are the old policy's, those after it the new one's on everything before, to the digit."""
    box: dict[str, Any] = {}
    asked = [SampleRequest(prompt_token_ids=p, seed=i, max_new_tokens=LONG) for i, p in enumerate(tiny.PROMPTS[:4])]
    before = drawn(served)
    thread = threading.Thread(target=lambda: box.update(samples=engine.generate(asked, Sampling())), daemon=True)
    thread.start()
    until(lambda: drawn(served) >= before + 40)
    engine.pause()
    held = drawn(served)
    engine.load_weights(tiny.checkpoint(models[1]), version=4)
    assert drawn(served) == held
    engine.resume()
    thread.join(120)
    for request, sample in zip(asked, box["samples"], strict=True):
        assert len(sample.token_ids) == LONG
        assert set(sample.versions_T.tolist()) == {3, 4}
        assert (np.diff(sample.versions_T) >= 0).all()
        for version, model in ((3, models[0]), (4, models[1])):
            truth_TV = tiny.true_logprobs(model, request.prompt_token_ids, sample.token_ids)
            gap_T = np.abs(sample.logprobs - tiny.of_tokens(truth_TV, sample.token_ids))
            assert gap_T[sample.versions_T == version].max() < LIMIT
            assert gap_T[sample.versions_T != version].max() > 100 * LIMIT


def test_another_trainer_takes_over_and_the_first_one_notices(
    served: Served, engine: ServerEngine, models: tuple[Any, Any]
) -> None:
    """Also by TCP, as from another machine."""
    other = served.engine(transport="gloo")
    try:
        with pytest.raises(ValueError, match="none were loaded yet"):
            other.generate(tiny.requests(), Sampling())
        other.load_weights(tiny.checkpoint(models[1]), version=1)
        tiny.assert_holds(other, models[1], LIMIT)
    finally:
        other.close()
    with pytest.raises(ValueError, match="it was started again, or another trainer uses it"):
        engine.generate(tiny.requests(), Sampling())
    engine.load_weights(tiny.checkpoint(models[0]), version=5)
    tiny.assert_holds(engine, models[0], LIMIT)


def test_death_in_the_middle_of_a_step_and_return(
    served: Served, engine: ServerEngine, models: tuple[Any, Any]
) -> None:
    engine.load_weights(tiny.checkpoint(models[0]))
    errors: list[ValueError] = []

    def generate() -> None:
        try:
            engine.generate(tiny.requests(new=LONG), Sampling())
        except ValueError as error:
            errors.append(error)

    before = drawn(served)
    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    until(lambda: bool(errors) or drawn(served) >= before + 20)
    assert not errors
    (server,) = psutil.Process(served.keeper.pid).children()
    offspring = server.children(recursive=True)
    server.send_signal(signal.SIGKILL)
    thread.join(60)
    (error,) = errors
    assert "none of the 1 rollout servers can serve" in str(error)
    assert served.url in str(error)
    served.wait_for("server 0: was killed by SIGKILL; starting it again in 1 s (1 of 5)")
    _, alive = psutil.wait_procs(offspring, timeout=30)
    assert not alive
    served.wait_for("ready after", times=2)
    with pytest.raises(ValueError, match="none of the 1 rollout servers can serve"):
        engine.generate(tiny.requests(), Sampling())
    engine.load_weights(tiny.checkpoint(models[1]))
    tiny.assert_holds(engine, models[1], LIMIT)


def test_ends_all_of_it(served: Served) -> None:
    (server,) = psutil.Process(served.keeper.pid).children()
    processes = [server, *server.children(recursive=True)]
    served.keeper.terminate()
    assert served.keeper.wait(60) == 0
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    assert "stopped by SIGTERM" in "".join(served.lines)


def test_log_is_in_the_run_folder(served: Served) -> None:
    (line,) = [line for line in served.lines if "starting on" in line][:1]
    path = Path(line.split("(log: ")[1].rstrip().removesuffix(")"))
    assert path.parent.name == "servers"
    assert path.stat().st_size > 0
