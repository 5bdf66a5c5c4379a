"""Names of Megatron-Core's options, read from its source text: importing it takes ten seconds, finding a typo should not."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

OPTIMIZER = ("optimizer/optimizer_config.py", "OptimizerConfig")
SCHEDULER = ("optimizer_param_scheduler.py", "OptimizerParamScheduler")
DDP = ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig")


@cache
def option_names(file: str, kind: str) -> frozenset[str]:
    """Parameters of a class's constructor, or fields of a dataclass without a base, in a file of ``megatron.core``.

    Empty where Megatron-Core is not installed.
    """
    spec = importlib.util.find_spec("megatron.core")  # imports the namespace package ``megatron`` only
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return frozenset(a.arg for a in (*node.args.args, *node.args.kwonlyargs)) - {"self"}
    names = {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return frozenset(name for name in names if not name.startswith("_"))
