"""vLLM colocated with the trainer: in the leader's process, or, tensor-parallel, in workers beside it on the same devices."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PretrainedConfig

from megatron_gcpo.config.records import LoraConfig, RolloutConfig
from megatron_gcpo.reshard import deliver
from megatron_gcpo.rollout.engine import Sample, SampleRequest, Sampling, WeightControl, check_fits
from megatron_gcpo.rollout.vllm import arguments, capabilities, settings
from megatron_gcpo.rollout.vllm.adapters import adapter_request
from megatron_gcpo.rollout.vllm.driver import Driver
from megatron_gcpo.rollout.vllm.isolation import (
    draw_apart,
    kept_globals,
    leave_uncompiled,
    own_process_groups,
    quiet_start,
)
from megatron_gcpo.rollout.vllm.quantize import quantized
from megatron_gcpo.rollout.vllm.requests import padded_experts, sample_of, sampling_params, scoring_params


class LlmControl:
    """The WeightControl of a colocated engine: vLLM's calls on its LLM object."""

    same_host = True

    def __init__(self, llm: Any, num_workers: int, timeout_s: float, begin: Callable[[], None]) -> None:
        self._llm, self._num_workers, self._timeout_s, self._begin = llm, num_workers, timeout_s, begin

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def rpc(self, method: str, arguments: Mapping[str, Any] | None = None) -> list[Any]:
        return self._call(method, **(arguments or {}))

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info=dict(init_info))

    def start_weight_update(self) -> None:
        self._begin()
        self._call("start_weight_update")

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._call("update_weights", update_info=dict(update_info))

    def finish_weight_update(self, version: int) -> None:
        self._call("finish_weight_update")
        self._llm.update_weight_version(str(version))

    def _call(self, method: str, **kwargs: Any) -> list[Any]:
        try:
            return self._llm.collective_rpc(method, timeout=self._timeout_s, kwargs=kwargs)
        except Exception as error:  # whatever a worker raises comes out here, or that it is gone
            raise ValueError(f"a vLLM worker failed in {method}: {type(error).__name__}: {error}") from error


class VllmEngine:
    """A RolloutEngine on vLLM's LLM. It starts from random numbers; weights arrive by a push.

    A sample's tokens depend on its seed, prompt, weights and sampling as far as vLLM keeps rows apart: its random numbers
    are the seed's own, but a batch of other rows may change the last bits of the logits.

    Args:
        hf_config: of a decoder that vLLM knows. Not modified.
        rollout: sections ``vllm``, ``push`` and ``quantization`` included.
        dtype: "fp32" or "bf16", of weights, activations and cache.
        max_positions: tokens of the longest sequence, prompt and completion.
        cpu: whether this machine computes without CUDA.
        threads: OMP threads of each worker, on a CPU.
        devices: CUDA devices of the workers, as this process counts them; () on a CPU.
        lora: the policy's adapters, when they are pushed beside its weights (reshard.push_adapters).

    Raises:
        ValueError: vLLM is not installed or not the right build or version, the model or the cache does not fit, or it
            failed to start.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        rollout: RolloutConfig,
        *,
        dtype: str,
        max_positions: int,
        cpu: bool,
        threads: int = 1,
        devices: Sequence[int] = (),
        lora: LoraConfig | None = None,
    ) -> None:
        start_s = time.monotonic()
        found = capabilities.installed()
        capabilities.check_build(found, cpu=cpu)
        capabilities.check_model(hf_config, rollout, dtype=dtype, max_positions=max_positions, cpu=cpu, lora=lora)
        settings.prepare_process(cpu=cpu, threads=threads)
        with quiet_start():
            capabilities.check_interface(found)
        self._rollout, self._max_positions, self._cpu = rollout, max_positions, cpu
        self._vocab_size = hf_config.get_text_config().vocab_size
        self._llm = _start(
            hf_config, rollout, dtype=dtype, max_positions=max_positions, cpu=cpu, devices=devices, lora=lora
        )
        self._takes_adapters, self._adapter = lora is not None, None
        self._driver = Driver(self._llm.llm_engine)
        tp = rollout.vllm.tensor_parallel_size
        self._control = LlmControl(self._llm, tp, rollout.vllm.request_timeout_s, self._begin_update)
        self._score_temperature = 1.0
        self._unfit: str | None = "none were loaded yet"
        self._asleep = self._cache_asleep = False
        self._policy_version = 0
        place = "in this process" if tp == 1 else f"in {tp} workers beside this process"
        seconds = time.monotonic() - start_s
        Console(stderr=True).print(f"rollout engine: vLLM {found.version} {place}, started in {seconds:.1f} s")

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_positions(self) -> int:
        return self._max_positions

    @property
    def control(self) -> WeightControl | None:
        # int8 weights are quantised whole, on their way through load_weights
        return None if self._rollout.quantization == "int8" else self._control

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._require_fit()
        for r, request in enumerate(requests):
            check_fits(len(request.prompt_token_ids), request.max_new_tokens, self._max_positions, f"request {r}")
            self._check_ids(request.prompt_token_ids, f"request {r}")
            if request.max_new_tokens < 1:
                raise ValueError(f"request {r} wants {request.max_new_tokens} tokens; set rollout.max_new_tokens >= 1")
        # flat lists of numbers: an object for each token would cost more than drawing it from a small model
        shape = {"output_kind": RequestOutputKind.FINAL_ONLY, "flat_logprobs": True}
        wanted = [
            (request.prompt_token_ids, SamplingParams(**sampling_params(request, sampling), **shape))
            for request in requests
        ]
        samples = []
        for r, (request, output) in enumerate(zip(requests, self._run(wanted), strict=True)):
            drawn = output.outputs[0]
            samples.append(
                sample_of(
                    drawn.token_ids,
                    drawn.logprobs.logprobs,
                    drawn.finish_reason,
                    [(span.version, span.start, span.end) for span in drawn.weight_versions or ()],
                    f"request {r}",
                    padded_experts(drawn.routed_experts, len(request.prompt_token_ids) + len(drawn.token_ids)),
                )
            )
        return samples

    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """As the protocol says. During a pause, requests under way advance meanwhile: vLLM's steps serve all of them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._require_fit()
        for n, (prompt, completion) in enumerate(sequences):
            check_fits(len(prompt), len(completion), self._max_positions, f"sequence {n}")
            self._check_ids([*prompt, *completion], f"sequence {n}")
        if temperature != self._score_temperature:
            with self._driver.between_steps():
                self._control.rpc("set_score_temperature", {"temperature": temperature})
            self._score_temperature = temperature
        shape = {"output_kind": RequestOutputKind.FINAL_ONLY, "flat_logprobs": True}
        params = [SamplingParams(**scoring_params(), **shape) for _ in sequences]
        wanted = [([*prompt, *completion], p) for (prompt, completion), p in zip(sequences, params, strict=True)]
        outputs = self._run(wanted, also_paused=True)
        return [
            np.asarray(output.prompt_logprobs.logprobs[len(prompt) - 1 :], dtype=np.float32)
            for output, (prompt, _) in zip(outputs, sequences, strict=True)
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> None:
        self._require_awake()
        version = self._policy_version + 1 if version is None else version
        try:
            deliver(
                self._control,
                quantized(weights, self._rollout.quantization),
                version=version,
                push=self._rollout.push,
                device=torch.device("cpu" if self._cpu else "cuda"),
            )
        except ValueError as error:
            self.refuse(f"the last load failed: {error}")
            raise
        self.commit(version)

    def commit(self, version: int) -> None:
        self._wake_cache()
        with self._driver.between_steps():
            self._llm.update_weight_version(str(version))
            self._llm.reset_prefix_cache(reset_running_requests=True)
            if self._takes_adapters:
                adopted = all(worker["adopted"] for worker in self._control.rpc("gcpo_adapters"))
                self._adapter = adapter_request() if adopted else None
            self._policy_version, self._unfit = version, None

    def pause(self) -> None:
        self._driver.pause()

    def resume(self) -> None:
        self._driver.resume()

    def refuse(self, reason: str) -> None:
        self._unfit = reason

    def sleep(self) -> None:
        if self._asleep:
            return
        level = self._rollout.vllm.sleep_level
        with self._driver.between_steps():
            if self._driver.under_way:
                raise ValueError("the rollout engine cannot sleep while it has requests to finish")
            if level and not self._cpu:  # the CPU build keeps its memory
                if level == 2:
                    self._control.rpc("gcpo_forget_base")
                self._llm.sleep(level=level)
                self._cache_asleep = True
            if level == 2:
                self._unfit = "a sleep of level 2 dropped them"
            self._asleep = True

    def wake(self) -> None:
        """The weights first, so that a push finds them; the cache when it is needed, after the push."""
        if self._asleep and self._cache_asleep:
            self._llm.wake_up(tags=["weights"])
        self._asleep = False

    def close(self) -> None:
        """End the workers and free what the engine holds; it serves nothing any more."""
        self._unfit = "the engine was closed"
        with own_process_groups():  # vLLM ends with the default group, which is the trainer's
            self._llm.llm_engine.engine_core.shutdown()

    def _check_ids(self, token_ids: Sequence[int], who: str) -> None:
        """An id outside the vocabulary would end the whole engine, not one request."""
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ValueError(
                f"{who} has token ids from {min(token_ids)} to {max(token_ids)}, but the model's vocabulary is "
                f"0 to {self._vocab_size - 1}: set model.tokenizer to the one the model was made with"
            )

    def _wake_cache(self) -> None:
        if self._cache_asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._cache_asleep = False

    def _begin_update(self) -> None:
        self._require_awake()
        if self._driver.busy:
            raise ValueError("weights were pushed while tokens are being drawn: pause() the rollout engine first")
        self._unfit = "a load of weights did not complete"

    def _run(self, wanted: Sequence[tuple[Sequence[int], Any]], *, also_paused: bool = False) -> list[Any]:
        self._wake_cache()
        try:
            return self._driver.run(wanted, self._require_fit, also_paused=also_paused, adapter=self._adapter)
        except ValueError:
            raise
        except Exception as error:  # a worker died, or vLLM gave up: nothing of its state can be trusted
            self.refuse(f"vLLM failed ({type(error).__name__}: {error}); start the run again, it resumes")
            raise ValueError(f"vLLM failed while serving: {type(error).__name__}: {error}") from error

    def _require_awake(self) -> None:
        if self._asleep:
            raise ValueError("the rollout engine sleeps: call wake() first")

    def _require_fit(self) -> None:
        self._require_awake()
        if self._unfit is not None:
            raise ValueError(
                f"the rollout engine serves nothing, the weights are unfit: {self._unfit}; push them again"
            )


def _start(
    hf_config: PretrainedConfig,
    rollout: RolloutConfig,
    *,
    dtype: str,
    max_positions: int,
    cpu: bool,
    devices: Sequence[int],
    lora: LoraConfig | None,
) -> Any:
    from vllm import LLM

    in_this_process = rollout.vllm.tensor_parallel_size == 1
    if cpu and in_this_process:
        leave_uncompiled()
        draw_apart()
    with (
        tempfile.TemporaryDirectory(prefix="megatron_gcpo_model_") as folder,
        kept_globals(),
        own_process_groups(),
        quiet_start() if in_this_process else contextlib.nullcontext(),
    ):
        model = arguments.write_model_folder(
            hf_config, Path(folder), max_positions=max_positions, quantization=rollout.quantization
        )
        options = arguments.engine_arguments(
            rollout,
            model_folder=model,
            dtype=dtype,
            max_positions=max_positions,
            cpu=cpu,
            sleeps=rollout.vllm.sleep_level > 0,
            devices=devices,
            lora=lora,
        )
        try:
            return LLM(**options)
        except Exception as error:  # vLLM's own checks raise many kinds
            raise ValueError(
                f"vLLM did not start: {type(error).__name__}: {error}; see rollout.vllm and rollout.vllm.options"
            ) from error
