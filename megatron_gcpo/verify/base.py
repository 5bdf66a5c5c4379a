"""What a verifier is: a frozen record whose fields are its options and whose ``judge`` looks at one completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple


class Rejected(Exception):
    """The verifier refuses to look at this completion (reward 0, status "rejected")."""


class Sample(NamedTuple):
    """One thing to judge."""

    prompt_text: str
    """The raw problem."""
    answer: str
    """The reference answer."""
    extras: Mapping[str, Any]
    """Prompt.extras."""
    completion: str
    """What the model wrote. Hostile."""


@dataclass(frozen=True, kw_only=True)
class Verifier(ABC):
    """Judges completions. Heavy packages are imported inside methods: the trainer imports the class for its options."""

    warm: ClassVar[tuple[Sample, ...]] = ()
    """Harmless samples judged once before confinement, so that whatever is imported lazily is loaded by then."""

    @abstractmethod
    def judge(self, sample: Sample) -> float:
        """The reward, in [0, 1]; anything else, or an exception, is status "error". Runs confined.

        Raises:
            Rejected: the completion is not worth judging or too dangerous to.
        """

    def prepare(self, sample: Sample) -> None:  # noqa: B027 - most verifiers have nothing to prepare
        """Trusted work before the judge is confined: check that the prompt has what ``judge`` needs, load data files.

        It may look at everything but the completion.

        Raises:
            ValueError: the prompt does not fit this verifier. Ends the run, so say what to set.
        """
