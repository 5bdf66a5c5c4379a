"""The page: template, style, program and plotting library in one file that needs no network."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

ASSETS = "megatron_gcpo.report.assets"


def render(content: dict[str, Any], *, refresh_s: float | None = None) -> str:
    """The HTML of a payload. refresh_s: the page asks for itself again this often.

    Raises:
        ValueError: plotly is not installed.
    """
    try:
        plotly = import_module("plotly.offline").get_plotlyjs()
    except ImportError:
        raise ValueError("the report needs the package plotly: pip install 'megatron-gcpo[report]'") from None
    asset = files(ASSETS)
    parts = {
        "STYLE": (asset / "page.css").read_text(encoding="utf-8"),
        "PLOTLY": plotly,
        "DATA": _as_script_data({**content, "refresh_s": refresh_s}),
        "PROGRAM": (asset / "curves.js").read_text(encoding="utf-8")
        + (asset / "groups.js").read_text(encoding="utf-8"),
    }
    page = (asset / "page.html").read_text(encoding="utf-8")
    before, *rest = page.split("{{")
    pieces = [before]
    for piece in rest:  # not str.replace: model text must not be able to name a placeholder
        name, _, tail = piece.partition("}}")
        pieces += [parts[name], tail]
    return "".join(pieces)


def write(path: Path, content: dict[str, Any]) -> None:
    """The page as a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(render(content), encoding="utf-8", errors="replace")
    unfinished.replace(path)


def _as_script_data(content: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in, whatever the model wrote."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
