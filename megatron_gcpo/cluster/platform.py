"""CPU or CUDA: the only file that adapts Megatron-Core to a machine without a GPU.

On a CUDA machine :func:`install` changes nothing. Without CUDA (or when ``platform=cpu`` is asked) it gives
Megatron-Core a ``torch.cuda`` whose device is the CPU, once per process. What is changed is as narrow as the sources of
megatron-core 0.19.2 allow: functions of ``torch.cuda`` that only raise without a GPU, two methods that move to the GPU,
and, inside the few Megatron modules that spell out ``device="cuda"`` or ``"torch.cuda.FloatTensor"``, that spelling
alone. Nothing is put between the model and torch while it runs.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.util
import logging
import resource
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

CPU = torch.device("cpu")

MODULES_SPELLING_CUDA = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.mapping",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
"""Modules on our path that allocate with a literal ``device="cuda"``."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What the processes of a run compute on."""

    name: Literal["cpu", "cuda"]
    device: torch.device
    """Where tensors live; for cuda the current device of the process."""
    backend: Literal["gloo", "nccl"]
    """torch.distributed backend of the parallel groups."""

    def memory_peak_bytes(self) -> int:
        """Largest memory held so far: allocated on the GPU, or resident in this process."""
        if self.name == "cuda":
            return torch.cuda.max_memory_allocated()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def synchronize(self) -> None:
        """Wait until the device has finished what was queued, so that a clock read next is honest."""
        if self.name == "cuda":
            torch.cuda.synchronize()


def install(platform: Literal["auto", "cpu", "cuda"] = "auto") -> Platform:
    """The platform of this process, with Megatron-Core made to work on it; call before building anything of Megatron.

    Raises ValueError when ``cuda`` is asked and no device is visible.
    """
    _silence()
    if platform == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "cluster.platform is cuda, but torch sees no CUDA device: set cluster.platform=cpu (or auto), "
            "or make a device visible (CUDA_VISIBLE_DEVICES, driver, a CUDA build of torch)"
        )
    if platform == "cuda" or (platform == "auto" and torch.cuda.is_available()):
        return Platform(name="cuda", device=torch.device("cuda"), backend="nccl")
    _adapt_megatron_to_cpu()
    return Platform(name="cpu", device=CPU, backend="gloo")


def import_megatron_bridge(platform: Platform) -> types.ModuleType:
    """``megatron.bridge``, which imports Transformer Engine unconditionally in one file.

    On the CPU that one import is answered by an inert stand-in. It never enters ``sys.modules``: found there, it would
    make Megatron-Core believe that Transformer Engine exists.
    """
    if "megatron.bridge" in sys.modules:
        return sys.modules["megatron.bridge"]
    if importlib.util.find_spec("transformer_engine") is not None:
        return importlib.import_module("megatron.bridge")
    if platform.name == "cuda":
        raise ValueError(
            "megatron.bridge needs Transformer Engine on CUDA machines: pip install 'transformer-engine[pytorch]'"
        )
    logging.disable(logging.CRITICAL)  # it logs every fused kernel that it misses, with tracebacks
    try:
        with warnings.catch_warnings(action="ignore"), _transformer_engine_stand_in("megatron.bridge.peft.lora_layers"):
            bridge = importlib.import_module("megatron.bridge")
    finally:
        logging.disable(logging.NOTSET)
    # Its "is Transformer Engine there" test imports names that Megatron-Core defines as None without it, and says yes.
    vars(importlib.import_module("megatron.bridge.peft.utils"))["HAVE_TE"] = False
    return bridge


def _silence() -> None:
    """Megatron-Core and its bridge explain at length, tensor by tensor, what they set up and which kernels are missing."""
    warnings.filterwarnings("ignore", module=r"megatron\.(core|bridge)\b")
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint\b")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    importlib.import_module("transformers").utils.logging.set_verbosity_error()  # the bridge uses its old names
    for name in ("megatron.bridge.utils.import_utils", "megatron.bridge.utils.fusions"):  # these set their own level
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)


@functools.cache
def _adapt_megatron_to_cpu() -> None:
    """Every adaptation, once per process."""
    _adapt_torch_cuda()
    # It asks torch's extension builder for a CUDA toolkit, which logs that there is none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Megatron-Core says on import, file by file, that fused kernels are missing: known, and of no use on a CPU.
    with warnings.catch_warnings(action="ignore"):
        _adapt_random_states()
        _adapt_device_literals()
        _adapt_type_checks()
        _adapt_token_dispatcher()


def _adapt_torch_cuda() -> None:
    cuda: Any = torch.cuda
    # Megatron-Core asks for its device everywhere; with the CPU as the answer all its allocations land there.
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda device: None
    # Work on a CPU is finished when the call returns: nothing to wait for, no second queue.
    cuda.synchronize = lambda device=None: None
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.current_stream = lambda device=None: _STREAM
    cuda.default_stream = lambda device=None: _STREAM
    cuda.stream = lambda stream: contextlib.nullcontext()
    # The random states that Megatron-Core forks, seeds and checkpoints are those of the generator really drawn from.
    cuda.manual_seed = torch.manual_seed
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device="cpu": torch.get_rng_state()
        module.set_rng_state = lambda new_state, device="cpu": torch.set_rng_state(new_state)
    # Moving to the device is staying: tied embeddings of pipeline stages, rotary sines, checkpoint tensors.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # pyright: ignore[reportAttributeAccessIssue]
    torch.nn.Module.cuda = lambda self, device=None: self  # pyright: ignore[reportAttributeAccessIssue]


def _adapt_random_states() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    # These two reach into torch.cuda.default_generators, which is empty here.
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # Its tracker warns when the CPU generator moves inside a fork: here that generator is the one being forked.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _adapt_device_literals() -> None:
    cpu_torch = _CpuTorch("torch")
    for name in MODULES_SPELLING_CUDA:
        vars(importlib.import_module(name))["torch"] = cpu_torch


def _adapt_type_checks() -> None:
    optimizer: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    # Their constructors sort parameters by the strings "torch.cuda.FloatTensor" and "torch.cuda.BFloat16Tensor".
    for cls in (optimizer.Float16OptimizerWithFloat16Params, distributed.DistributedOptimizer):
        cls.__init__ = _with_cuda_type_names(cls.__init__)
    # Gradient clipping asserts the type string of every gradient; the optimizer holds the function under its own name.
    clip_grads: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = optimizer.clip_grad_by_total_norm_fp32 = clip


def _adapt_token_dispatcher() -> None:
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    move = dispatcher.maybe_move_tensor_to_cpu

    def move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy=as_numpy, record_stream=record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    # The alltoall dispatcher wants split sizes as numpy arrays, and converts only tensors that it finds on a GPU.
    dispatcher.maybe_move_tensor_to_cpu = move_tensor_to_cpu


class _Event:
    """A point in a queue of which everything before is already done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """The one queue of a CPU; all streams are equal, so that Megatron-Core never thinks it left the main one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


_STREAM = _Stream()


class _CpuTorch(types.ModuleType):
    """``torch``, except that its factories answer ``device="cuda"`` with a CPU tensor."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for factory in ("tensor", "zeros", "ones", "empty", "empty_like"):
            setattr(self, factory, _on_cpu(getattr(torch, factory)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = CPU
        return factory(*args, device=device, **kwargs)

    return make


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, during which ``tensor.type()`` names CPU tensors as if they were on a GPU."""

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = torch._C.TensorBase.type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if "type" in vars(torch.Tensor):
            return function(*args, **kwargs)
        torch.Tensor.type = type_name  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return function(*args, **kwargs)
        finally:
            del torch.Tensor.type

    return wrapped


@contextlib.contextmanager
def _transformer_engine_stand_in(importer: str) -> Iterator[None]:
    """Answer ``import transformer_engine.pytorch`` of this one module with classes that nothing is an instance of."""
    engine: Any = types.ModuleType("transformer_engine")
    pytorch: Any = types.ModuleType("transformer_engine.pytorch")
    engine.pytorch = pytorch
    pytorch.ops = types.SimpleNamespace(Sequential=object)
    for name in ("Linear", "LayerNormLinear"):
        setattr(pytorch, name, type(name, (), {}))
    real_import = builtins.__import__

    def answer(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name == "transformer_engine.pytorch" and (globals or {}).get("__name__") == importer:
            # `import a.b as c` (empty fromlist) binds from the top package.
            return pytorch if fromlist else engine
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = answer
    try:
        yield
    finally:
        builtins.__import__ = real_import
