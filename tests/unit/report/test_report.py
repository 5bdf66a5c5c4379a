"""What the page holds, that it cannot be broken out of, and, in a real browser, that it works."""

from __future__ import annotations

import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

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


def make_run(folder: Path, steps: int = 6, prompts: int = 3, name: str = "gcpo_seed0") -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": name, "steps": steps}, "method": {"name": "gcpo"}})
    )
    lines = [
        json.dumps({"step": s, "time": 0, "reward/mean": s / steps, "time/generate_s": 1.0, "time/total_s": 2.0})
        for s in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    Summary(step=steps, before={"pass@1": 0.25}, after={"pass@1": 0.75}).write(folder)
    for step in range(1, steps + 1):
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
            }
            for p in range(prompts)
            for i, text in enumerate(("a one", "a one", "c other words", EVIL))
        ]
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        pq.write_table(table, folder / "rollouts" / f"step_{step:06d}_replica_000.parquet")
    return folder


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


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser (Debian: apt-get install chromium)")
def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", name="gcpo_seed1")]
    write(tmp_path / "page.html", payload(runs, Sampled(steps=3, prompts=2), Axes(), "completion"))
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        assert page.locator("#plots .plot .main-svg").count() > 0
        assert page.locator("#runs tr").count() == 3
        page.select_option("#step", "1")
        page.select_option("#prompt", "p1")
        assert "step 1, p1" in page.locator("#group h3").first.inner_text()
        page.locator("#rollouts tr[data-rollout='3']").click()
        assert "Tokens of rollout 3" in page.locator("#tokens").inner_text()
        assert page.locator("#tokens .token").count() == 3
        assert page.locator("#heat .main-svg").count() > 0
        assert "document.title='owned'" in page.locator("#rollouts").inner_text(), "shown as the text it is"
        assert page.title() == "Runs"
        page.uncheck("#bands")
        page.select_option("#metric", "reward/mean")
        assert said == []
        browser.close()
