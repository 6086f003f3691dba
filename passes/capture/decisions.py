"""Questions that a model's Python code asks of values that weights decide, as one trace answers them.

``if torch.equal(student, teacher): …`` has no answer that holds for every step. A trace takes one of the branches and
notes what was asked; another trace takes the other one (``other_branches``), and the program selects.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from passes.ir.errors import CaptureError

#: A loop that runs until weights are such and such asks for ever.
_MOST_QUESTIONS = 16


@dataclass(frozen=True)
class Question:
    """A flag that Python reads.

    Attributes:
        condition: the flag, a tensor without dims.
        answer: what the trace answers.
        place: module and line of code that asked.
    """

    condition: torch.Tensor
    answer: bool
    place: str


class Decisions:
    """The questions of one trace.

    Attributes:
        questions: those asked so far.

    Args:
        flipped: numbers of the questions that get the other answer.
    """

    def __init__(self, flipped: Collection[int] = ()) -> None:
        self.questions: list[Question] = []
        self._flipped = frozenset(flipped)

    def begin(self) -> None:
        """The trace begins."""
        self.questions = []

    def answer(self, condition: torch.Tensor, usual: bool, place: str) -> bool:
        """The answer to another question, which is noted.

        Args:
            usual: the answer if the question is not flipped.

        Raises:
            CaptureError: if there are too many.
        """
        if len(self.questions) == _MOST_QUESTIONS:
            raise CaptureError(
                f"control flow depends on a value more than {_MOST_QUESTIONS} times: choose with torch.where"
            )
        answer = usual != (len(self.questions) in self._flipped)
        self.questions.append(Question(condition.detach().reshape(()), answer, place))
        return answer

    def marked(self, output: torch.Tensor) -> torch.Tensor:
        """``output``, with the questions on its way (``meshwright.decided``)."""
        for number, question in enumerate(self.questions):
            output = torch.ops.meshwright.decided(output, question.condition, number, question.answer, question.place)
        return output
