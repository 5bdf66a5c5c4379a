"""Problems for the method stepcode: programs with trace points whose printed values have to be predicted.

    python tools/trace_code.py programs.jsonl problems.jsonl

Each line of the input has "code" (Python, with at least one function) and "call" (an expression that calls it). Nothing is
executed here: the verifier "trace" runs the programs, in its sandbox, when answers are judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_gcpo.data.trace import check_call, instrument, question


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=Path)
    parser.add_argument("problems", type=Path)
    arguments = parser.parse_args(argv)
    try:
        rows = list(_problems(arguments.programs))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [json.dumps(row) + "\n" for row in rows if "prompt" in row]
    arguments.problems.write_text("".join(lines), encoding="utf-8")
    for row in rows:
        if "why" in row:
            print(f"skipped: {arguments.programs}:{row['line']}: {row['why']}", file=sys.stderr)
    print(f"{len(lines)} problems in {arguments.problems}")
    return 0


def _problems(path: Path) -> Iterator[dict[str, object]]:
    """A problem for each program, or why there is none. ValueError for a file that holds something else."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            code, call = row["code"], row["call"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}:{number} is no JSON object with code and call") from None
        try:
            traced = instrument(code)
            check_call(traced, call)
        except ValueError as error:
            yield {"line": number, "why": str(error)}
            continue
        name = str(row.get("id", f"{path.stem}-{number}"))
        yield {"id": name, "prompt": question(traced, call), "answer": call, "code": code, "call": call}


if __name__ == "__main__":
    sys.exit(main())
