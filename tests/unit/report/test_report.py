"""What the page holds, that it cannot be broken out of, and, in a real browser, that it works."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from socket import AF_INET
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from megatron_gcpo.observe.rollouts import SCHEMA
from megatron_gcpo.observe.summary import Summary
from megatron_gcpo.report.follow import Page, make_server
from megatron_gcpo.report.page import render, write
from megatron_gcpo.report.payload import Sampled, payload
from tools import report

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{DATA}} \u2028 &lt;"
)
AXES = {"a": [1.0, 0.0, 0.0], "b": [0.0, 1.0, 0.0], "<": [0.0, 0.0, 1.0]}


class Axes:
    """Encodes a text by its first letter; c is almost a."""

    def encode(self, texts) -> torch.Tensor:
        rows = [AXES[t[0]] if t[0] != "c" else [0.99, 0.1411, 0.0] for t in texts]
        return torch.tensor(rows)


def make_run(folder: Path, steps: int = 6, prompts: int = 3, name: str = "gcpo_seed0", old: bool = False) -> Path:
    """old: with the columns of an earlier version."""
    begin_run(folder, steps, name)
    for step in range(1, steps + 1):
        write_step(folder, step, steps, prompts, old)
    Summary(step=steps, before={"pass@1": 0.25}, after={"pass@1": 0.75}).write(folder)
    return folder


def begin_run(folder: Path, steps: int, name: str) -> None:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": name, "steps": steps}, "method": {"name": "gcpo"}})
    )
    (folder / "metrics.jsonl").touch()


def write_step(folder: Path, step: int, steps: int, prompts: int, old: bool = False) -> None:
    rows = [
        {
            "step": step,
            "prompt_id": f"p{p}",
            "sample": i,
            "prompt": f"question {p}",
            "answer": "4",
            "text": text,
            "token_ids": [1, 2, 3],
            "logprobs": [-0.5, -3.0, float("nan")],
            "finish_reason": "stop",
            "verdict": "ok",
            "reward": float(i != 3),
            "credit": 1.0,
            "advantage": 0.5 - (i == 3),
            "trained": True,
            "policy_version": step,
            "versions": [step, step, step + 1],
            "token_advantages": [0.5, -1.0, 0.0] if i == 1 else None,
            "entropies": [0.25, 1.0, 0.0],
        }
        for p in range(prompts)
        for i, text in enumerate(("a one", "a one", "c other words", EVIL))
    ]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    path = folder / "rollouts" / f"step_{step:06d}_replica_000.parquet"
    pq.write_table(table.drop_columns(["entropies", "token_advantages"]) if old else table, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
    row = {"step": step, "time": 0, "reward/mean": step / steps, "time/generate_s": 1.0, "time/total_s": 2.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found.group(1))


def test_the_page_says_how_much_of_a_run_it_holds(tmp_path: Path) -> None:
    (run,) = payload([make_run(tmp_path / "r")], Sampled(steps=3, prompts=2), Axes(), "completion")["runs"]
    assert sorted({group["step"] for group in run["groups"]}) == [1, 3, 6]
    assert run["sampled"] == "6 of the 9 groups of 3 of 6 saved steps"
    assert run["series"]["eval/pass@1"] == ([0], [0.25])
    assert (run["label"], run["finished"]) == ("gcpo", True)
    group = run["groups"][0]
    assert group["same_text"] == [[0, 1]]
    assert group["same_meaning"] == [[0, 2]]
    assert group["cosine"][0][3] == 0.0
    assert group["rollouts"][0]["logprobs"] == [-0.5, -3.0, None]
    assert group["rollouts"][1]["token_advantages"] == [0.5, -1.0, 0.0]
    assert group["rollouts"][0]["entropies"] == [0.25, 1.0, 0.0]
    assert group["rollouts"][0]["versions"] == [1, 1, 2]


def test_groups_are_taken_from_all_replicas(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", steps=1, prompts=5)
    first = folder / "rollouts" / "step_000001_replica_000.parquet"
    table = pq.read_table(first)
    elsewhere = pa.array([f"other {name}" for name in table["prompt_id"].to_pylist()])
    pq.write_table(table.set_column(1, "prompt_id", elsewhere), first.with_name("step_000001_replica_001.parquet"))
    (run,) = payload([folder], Sampled(prompts=4), None, "completion")["runs"]
    assert [group["prompt_id"] for group in run["groups"]] == ["p0", "p4", "other p0", "other p4"]
    assert all(len(group["rollouts"]) == 4 for group in run["groups"])
    assert run["sampled"] == "4 of the 10 groups of 1 of 1 saved steps"


def test_model_text_cannot_become_markup(tmp_path: Path) -> None:
    content = payload([make_run(tmp_path / "r")], Sampled(), None, "completion")
    page = render(content)
    assert "owned" in page
    assert "<script>document.title" not in page
    assert "<img src=x" not in page
    assert data_of(page)["runs"][0]["groups"][0]["rollouts"][3]["text"] == EVIL
    assert not re.search(r'(src|href)="https?://', page.split('<script id="data"')[0].split("<script>")[0])


def test_a_torn_run_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    (folder / "rollouts" / "step_000006_replica_000.parquet").write_bytes(b"torn")
    (folder / "metrics.jsonl").open("a").write('{"step": 7, "rew')
    (run,) = payload([folder], Sampled(), None, "completion")["runs"]
    assert any("cut off" in line for line in run["skipped"])
    assert any("step_000006_replica_000.parquet: not readable" in line for line in run["skipped"])
    assert {group["step"] for group in run["groups"]} == {1, 2, 3, 4, 5}


def test_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(tmp_path / "no")]) == 2
    assert "there is no run folder" in capsys.readouterr().err
    assert report.main([str(make_run(tmp_path / "r")), "--no-embed"]) == 0
    assert (tmp_path / "r" / "report.html").stat().st_size > 1e6


def test_command_shows_the_runs_it_can_read_and_names_the_others(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Beside a sound run: no folder, an empty one, and one in which nothing but the metrics can be shown."""
    sound, torn, empty = make_run(tmp_path / "r"), make_run(tmp_path / "torn"), tmp_path / "empty"
    empty.mkdir()
    for path in (torn / "rollouts").iterdir():
        path.write_bytes(b"PAR1")
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "reward/mean": NaN}\n{"step": 8, "rew')
    (torn / "replay").mkdir()
    (torn / "replay" / "credit.json").write_text('[{"label": "grpo", "mean_advantage": {"wrong": NaN}, "movers": []}]')
    page = tmp_path / "page.html"
    folders = [str(folder) for folder in (sound, empty, torn, tmp_path / "no")]
    assert report.main([*folders, "--no-embed", "--output", str(page)]) == 0
    said = capsys.readouterr().out
    assert f"left out: {empty} holds nothing of a run" in said
    assert "left out: there is no run folder" in said
    assert f"{torn}: skipped step_000001_replica_000.parquet and 5 more: not readable" in said
    first, second = data_of(page.read_text())["runs"]
    assert len(first["groups"]) == 18
    assert second["groups"] == []
    assert second["series"]["reward/mean"][0] == [1, 2, 3, 4, 5, 6]


def test_follow_serves_this_machine_only_and_renews_the_page() -> None:
    state, made = [0], []

    def make() -> str:
        made.append(state[0])
        return f"page {state[0]}"

    with make_server(Page(lambda: state[0], make), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"

        def get(**headers: str) -> str:
            return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10).read().decode()

        assert server.server_address[0] == "127.0.0.1"
        assert [get(), get()] == ["page 0", "page 0"]
        state[0] = 1
        assert get() == "page 1"
        assert made == [0, 1]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(Host="evil.example")
        server.shutdown()
        thread.join(10)


def test_an_older_run_is_named_once_for_what_it_lacks(tmp_path: Path) -> None:
    (run,) = payload([make_run(tmp_path / "r", old=True)], Sampled(), None, "completion")["runs"]
    assert run["skipped"] == ["step_000001_replica_000.parquet lacks column token_advantages, entropies"]
    assert {r["entropies"] for group in run["groups"] for r in group["rollouts"]} == {None}


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a Chromium browser (Debian: apt-get install chromium)"
)


@pytest.fixture
def browser_page() -> Iterator[tuple[Any, list[str]]]:
    """(an empty page of a real browser, what its console said of errors and warnings so far)."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        yield page, said
        browser.close()


@needs_browser
def test_the_page_works_in_a_browser(tmp_path: Path, browser_page: tuple[Any, list[str]]) -> None:
    page, said = browser_page
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", name="gcpo_seed1", old=True)]
    write(tmp_path / "page.html", payload(runs, Sampled(steps=3, prompts=2), Axes(), "completion"))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("#plots .plot .main-svg").count() > 0
    assert page.locator("#runs tr").count() == 3
    page.select_option("#step", "1")
    page.select_option("#prompt", "p2")
    assert "step 1, p2" in page.locator("#group h3").first.inner_text()
    page.locator("#rollouts tr[data-rollout='3']").click()
    assert "Tokens of rollout 3" in page.locator("#tokens").inner_text()
    assert page.locator("#tokens .token").count() == 3
    assert page.locator("#heat .main-svg").count() > 0
    assert "document.title='owned'" in page.locator("#rollouts").inner_text(), "shown as the text it is"
    assert page.title() == "Runs"
    page.locator("#rollouts tr[data-rollout='1']").click()
    second = page.locator("#tokens .token").nth(1)
    for part in ("log-prob -3.0000", "entropy 1.000", "advantage -1.000", "policy version 1"):
        assert part in second.get_attribute("title")
    pale = second.evaluate("token => token.style.background")
    page.select_option("#shade", "entropy")
    assert second.evaluate("token => token.style.background") != pale
    assert page.locator("#entropy").inner_text() == ""
    page.select_option("#run", "1")
    assert page.locator("#entropy").inner_text() == "entropy: not stored in this run"
    page.uncheck("#bands")
    page.select_option("#metric", "reward/mean")
    page.reload()
    assert page.locator("#metric").input_value() == "reward/mean", "the address remembers what is looked at"
    assert not page.locator("#bands").is_checked()
    assert said == []


@needs_browser
def test_follow_shows_a_run_while_it_is_written(tmp_path: Path, browser_page: tuple[Any, list[str]]) -> None:
    """The command itself: the page comes again by itself, with what was written since, and what was picked stays picked."""
    page, said = browser_page
    folder, steps = tmp_path / "going", 5
    begin_run(folder, steps, "going")
    write_step(folder, 1, steps, prompts=2)
    command = [sys.executable, "-m", "tools.report", str(folder), "--follow", "--port", "0"]
    with subprocess.Popen(
        [*command, "--refresh-s", "1", "--no-embed"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        port = int(url.rstrip("/").rsplit(":", 1)[1])
        try:
            page.goto(url)
            page.get_by_text("1 of 5 (not finished)").wait_for(timeout=60_000)
            page.select_option("#step", "1")
            page.select_option("#prompt", "p1")
            writer = threading.Thread(
                target=lambda: [write_step(folder, step, steps, prompts=2) for step in range(2, steps + 1)]
            )
            writer.start()
            page.locator("#step option[value='5']").wait_for(state="attached", timeout=60_000)
            writer.join()
            page.get_by_text("5 of 5 (not finished)").wait_for(timeout=60_000)
            picked = "document.getElementById('step').value + document.getElementById('prompt').value == '1p1'"
            page.wait_for_function(picked, timeout=60_000)
            Summary(step=steps, after={"pass@1": 0.75}).write(folder)
            page.get_by_text("5 of 5", exact=True).wait_for(timeout=60_000)
            for address in {a.address for own in psutil.net_if_addrs().values() for a in own if a.family == AF_INET}:
                with socket.socket() as visitor:
                    assert (visitor.connect_ex((address, port)) == 0) == (address == "127.0.0.1"), address
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert said == []
