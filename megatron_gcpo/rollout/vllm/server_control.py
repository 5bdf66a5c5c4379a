"""How a push reaches the workers behind rollout servers: vLLM's weight-transfer calls over HTTP, to all servers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from megatron_gcpo.rollout.vllm.http import BadAnswer, Loop, NoAnswer, Rejected
from megatron_gcpo.rollout.vllm.local import is_this_machine
from megatron_gcpo.rollout.vllm.replica import Replica
from megatron_gcpo.rollout.vllm.replicas import Replicas


class HttpControl:
    """A WeightControl over the servers that were alive when it was made; these very processes, not their successors.

    Args:
        begin: called before a push changes weights; raises ValueError when it must not begin.
        timeout_s: of each call, on each server.
    """

    def __init__(
        self, loop: Loop, replicas: Replicas, members: Sequence[Replica], *, begin: Callable[[], None], timeout_s: float
    ) -> None:
        self.members = tuple(members)
        self._loop, self._replicas, self._begin, self._timeout_s = loop, replicas, begin, timeout_s
        self._same_host = all(is_this_machine(urlsplit(replica.url).hostname or "") for replica in members)

    @property
    def num_workers(self) -> int:
        return sum(replica.num_workers for replica in self.members)

    @property
    def same_host(self) -> bool:
        return self._same_host

    def rpc(self, method: str, arguments: Mapping[str, Any] | None = None) -> list[Any]:
        body = {"method": method, "kwargs": dict(arguments or {}), "timeout": self._timeout_s}
        answers = self._everywhere(method, lambda replica: self._post(replica, "/collective_rpc", body))
        results = []
        for replica, answer in zip(self.members, answers, strict=True):
            if not isinstance(answer, dict) or len(answer.get("results", ())) != replica.num_workers:
                raise ValueError(
                    f"{replica.url} answered {method} with {str(answer)[:200]!r}: not one result per worker"
                )
            results += answer["results"]
        return results

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self._tell("/init_weight_transfer_engine", {"init_info": dict(init_info)})

    def start_weight_update(self) -> None:
        self._begin()
        self._tell("/start_weight_update", {})

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._tell("/update_weights", {"update_info": dict(update_info)})

    def finish_weight_update(self, version: int) -> None:
        self._everywhere("finish_weight_update", lambda replica: replica.finish_update(version, self._timeout_s))

    def _tell(self, path: str, body: Mapping[str, Any]) -> None:
        self._everywhere(path.removeprefix("/"), lambda replica: self._post(replica, path, body))

    async def _post(self, replica: Replica, path: str, body: Mapping[str, Any]) -> Any:
        return await replica.call(path, body, timeout_s=self._timeout_s)

    def _everywhere(self, what: str, ask: Callable[[Replica], Awaitable[Any]]) -> list[Any]:
        """Every server's answer; as soon as one fails, ValueError: the others may wait for it."""

        async def one(replica: Replica) -> Any:
            if replica.state == "out":
                raise ValueError(f"the rollout server {replica.url} is out: {replica.out_because}")
            try:
                return await ask(replica)
            except NoAnswer as error:
                await self._replicas.leave(replica, str(error))
                raise ValueError(f"a rollout server was lost in {what}: {error}") from None
            except (BadAnswer, Rejected) as error:
                raise ValueError(f"a rollout server failed in {what}: {error}") from None

        async def all_of_them() -> list[Any]:
            return list(await asyncio.gather(*(one(replica) for replica in self.members)))

        return self._loop.run(all_of_them())
