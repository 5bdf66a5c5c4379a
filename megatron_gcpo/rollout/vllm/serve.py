"""``megatron-gcpo serve``: the rollout servers that a configuration asks of this machine, as commands to run."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from rich.console import Console

from megatron_gcpo.config.records import Config
from megatron_gcpo.data import load_tokenizer
from megatron_gcpo.policy.hf_config import complete_model, read_hf_config
from megatron_gcpo.rollout.build import engine_dtype
from megatron_gcpo.rollout.build import max_positions as longest_sequence
from megatron_gcpo.rollout.vllm import arguments, capabilities, settings
from megatron_gcpo.rollout.vllm.keeper import ServerCommand, keep
from megatron_gcpo.rollout.vllm.local import is_loopback, is_this_machine, read_api_key

SERVER_PACKAGES = ("uvicorn", "fastapi", "prometheus_fastapi_instrumentator", "aiohttp")
GUARD = "megatron_gcpo.rollout.vllm.guard.KeyGuard"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the command line says beyond the configuration."""

    host: str | None = None
    """Address to listen on; None: the loopback."""
    port: int | None = None
    """Of the first server, with ``replicas``; None: the ports of rollout.vllm.urls."""
    replicas: int | None = None
    """How many servers; None: those of rollout.vllm.urls that are on this machine."""
    insecure: bool = False
    """Listen beyond this machine without a key."""


def serve(config: Config, folder: Path, wish: Wish, environment: Mapping[str, str], *, dry_run: bool) -> int:
    """Start the servers and keep them alive until told to stop; returns the exit code.

    Args:
        folder: of the run; logs and the model's config go to ``servers`` in it.
        environment: what servers inherit.
        dry_run: print what would be started.

    Raises:
        ValueError: something does not fit, and which field or option to change.
    """
    if config.rollout.engine != "vllm_server":
        raise ValueError(f"rollout.engine is {config.rollout.engine}: set it to vllm_server to train with servers")
    places = listening_places(config.rollout.vllm.urls, wish)
    api_key = read_api_key(config.rollout.vllm.api_key_file)
    check_exposure([host for host, _ in places], api_key, insecure=wish.insecure)
    cpu = config.cluster.platform == "cpu" or (config.cluster.platform == "auto" and not torch.cuda.is_available())
    model_arguments = _model_arguments(config, folder / "servers" / "model", cpu=cpu)
    base = settings.child_environment(environment, cpu=cpu, threads=config.cluster.threads_per_process)
    if api_key is not None:
        base["VLLM_API_KEY"] = api_key
    tp = config.rollout.vllm.tensor_parallel_size
    devices = None if cpu else share_devices(environment.get("CUDA_VISIBLE_DEVICES"), len(places), tp)
    commands = []
    for index, (host, port) in enumerate(places):
        own = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices[index]}
        commands.append(
            ServerCommand(
                index=index,
                host=host,
                port=port,
                argv=server_argv(model_arguments, host=host, port=port, guarded=api_key is not None),
                env={**base, **own, "VLLM_SERVER_DEV_MODE": "1"},
                log_path=folder / "servers" / f"server{index}.log",
            )
        )
    console = Console(soft_wrap=True, highlight=False)
    if dry_run:
        for command in commands:
            where = "" if devices is None else f" on GPUs {devices[command.index]}"
            console.print(f"server {command.index}{where}: {shlex.join(command.argv)}", markup=False)
        return 0
    return keep(commands, start_timeout_s=config.rollout.vllm.start_timeout_s, console=console)


def listening_places(urls: Sequence[str], wish: Wish) -> list[tuple[str, int]]:
    """(address to listen on, port) of each server to start here."""
    host = wish.host or "127.0.0.1"
    if wish.port is not None or wish.replicas is not None:
        count = wish.replicas or 1
        first = wish.port or next((port for _, port in _here(urls)), 8000)
        if first + count - 1 > 65535:
            raise ValueError(f"--port {first} with --replicas {count} ends above 65535: lower it")
        return [(host, first + index) for index in range(count)]
    here = _here(urls)
    if not here:
        names = ", ".join(urls) or "empty"
        raise ValueError(
            f"none of rollout.vllm.urls ({names}) is on this machine: name it there, or say --port PORT --replicas NUMBER"
        )
    reachable = [(name, port) for name, port in here if wish.host is None and not is_loopback(name)]
    if reachable:
        name, port = reachable[0]
        raise ValueError(
            f"rollout.vllm.urls reaches this machine by http://{name}:{port}, but servers listen on the loopback only: "
            f"say --host {name} (and read what that exposes in `megatron-gcpo serve --help`)"
        )
    ports = [port for _, port in here]
    if len(set(ports)) < len(ports):
        raise ValueError(f"rollout.vllm.urls names a port of this machine twice: {ports}")
    return [(host, port) for port in ports]


def _here(urls: Sequence[str]) -> list[tuple[str, int]]:
    """(host, port) of the URLs of this machine."""
    parts = [urlsplit(url) for url in urls]
    return [(p.hostname, p.port or 80) for p in parts if p.hostname and is_this_machine(p.hostname)]


def check_exposure(hosts: Sequence[str], api_key: str | None, *, insecure: bool) -> None:
    """ValueError when servers would take commands from other machines unasked.

    A rollout server replaces its weights, pauses and runs functions of its workers for whoever may talk to it.
    """
    exposed = [host for host in hosts if not is_loopback(host)]
    if exposed and api_key is None and not insecure:
        raise ValueError(
            f"--host {exposed[0]} lets other machines replace weights and run functions in the servers: set "
            "rollout.vllm.api_key_file (a file with a secret word, the same for servers and trainers), or say --insecure if "
            "only machines that you trust can reach it"
        )


def share_devices(visible: str | None, count: int, tensor_parallel_size: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each server: the GPUs this command may see, shared out in order.

    visible: CUDA_VISIBLE_DEVICES of this command; None: all of the machine.
    """
    if visible is None:
        known = [str(index) for index in range(torch.cuda.device_count())]
    else:
        known = [name.strip() for name in visible.split(",") if name.strip()]
    if len(known) < count * tensor_parallel_size:
        raise ValueError(
            f"{count} servers of rollout.vllm.tensor_parallel_size {tensor_parallel_size} need {count * tensor_parallel_size} "
            f"GPUs, and {len(known)} are visible: start fewer (--replicas), or show more (CUDA_VISIBLE_DEVICES)"
        )
    starts = range(0, count * tensor_parallel_size, tensor_parallel_size)
    return [",".join(known[start : start + tensor_parallel_size]) for start in starts]


def _model_arguments(config: Config, folder: Path, *, cpu: bool) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs; writes the model's config into ``folder``."""
    rollout, dtype = config.rollout, engine_dtype(config)
    found = capabilities.installed()
    capabilities.check_build(found, cpu=cpu)
    missing = [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"vLLM's server needs the packages {', '.join(missing)}: {capabilities.INSTALL}")
    hf_config = read_hf_config(complete_model(config.model, load_tokenizer(config.model, config.data.train)))
    max_positions = longest_sequence(config)
    capabilities.check_model(hf_config, rollout, dtype=dtype, max_positions=max_positions, cpu=cpu)
    model = arguments.write_model_folder(
        hf_config, folder, max_positions=max_positions, quantization=rollout.quantization
    )
    return arguments.engine_arguments(
        rollout, model_folder=model, dtype=dtype, max_positions=max_positions, cpu=cpu, sleeps=False
    )


def server_argv(engine: Mapping[str, Any], *, host: str, port: int, guarded: bool) -> list[str]:
    """The command line of one server; ``engine``: fields of vLLM's EngineArgs."""
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port)]
    argv += ["--tokens-only", "--disable-uvicorn-access-log"]
    if guarded:
        argv += ["--middleware", GUARD]
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return argv
