"""Groups to score, and a look at the processes a pool leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_gcpo.types import Group, Prompt, Rollout
from megatron_gcpo.verify.table import Row

PAYLOADS = str(Path(__file__).with_name("payloads.py"))
TABLE = {
    "payload": Row(module=PAYLOADS, attribute="Payload", evaluates=True),
    "lasting": Row(module=PAYLOADS, attribute="Payload", evaluates=False),
    "broken": Row(module=PAYLOADS, attribute="Broken", evaluates=True),
    "late": Row(module=PAYLOADS, attribute="Late", evaluates=True),
    "optioned": Row(module=PAYLOADS, attribute="Optioned", evaluates=True),
    "absent": Row(
        module=PAYLOADS, attribute="Payload", evaluates=True, package="surely_not_here", install="pip install it"
    ),
}


def group(texts: Sequence[str], *, answer: str = "", extras: Mapping[str, Any] | None = None) -> Group:
    """A group of completions of one prompt."""
    prompt = Prompt(id="p", token_ids=(1,), text="question", answer=answer, extras=extras or {})
    rollouts = tuple(
        Rollout(
            token_ids=np.zeros(1, np.int64),
            logprobs=np.zeros(1, np.float32),
            text=text,
            finish_reason="stop",
            versions_T=np.zeros(1, np.int32),
        )
        for text in texts
    )
    return Group(prompt=prompt, rollouts=rollouts)


def session_members(leader: int) -> list[int]:
    """Processes of the session that this process leads or led, dead but unreaped ones included."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader:
            found.append(int(stat.parent.name))
    return found
