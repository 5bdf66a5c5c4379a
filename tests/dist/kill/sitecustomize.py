"""On PYTHONPATH, this kills one rank with SIGKILL at a chosen call: KILL_AT="rank module attribute call"."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import sys
from types import ModuleType
from typing import Any


class _Finder:
    """Lets a module load as usual and then replaces one of its functions."""

    def __init__(self, module: str, attribute: str, call: int) -> None:
        self._module, self._path, self._calls_left = module, attribute.split("."), call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        load = loader.exec_module

        def load_and_arm(module: ModuleType) -> None:
            load(module)
            self._arm(module)

        loader.exec_module = load_and_arm
        return spec

    def _arm(self, module: ModuleType) -> None:
        owner: Any = module
        for name in self._path[:-1]:
            owner = getattr(owner, name)
        function = getattr(owner, self._path[-1])

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls_left -= 1
            if self._calls_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        setattr(owner, self._path[-1], counted)


if "KILL_AT" in os.environ:
    _rank, _module, _attribute, _call = os.environ["KILL_AT"].split()
    if os.environ.get("RANK") == _rank:
        sys.meta_path.insert(0, _Finder(_module, _attribute, int(_call)))
