"""What planning asks of torch, as questions with plain answers: asked once, and answered without torch from then on.

A question is (kind, text); its answer depends on nothing but the installed torch and this package, and is plain data.
Who keeps a captured graph keeps the facts that planning it asked for beside it (``facts_at_hand``), so that it is
planned again without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

#: Answers of this process, by kind and question.
_answers: dict[tuple[str, str], Any] = {}
#: Questions asked while somebody listens.
_listeners: list[set[tuple[str, str]]] = []
#: Run once before torch is asked: what registers the operators that a question may be about.
_preparations: list[Callable[[], object]] = []


def asked(kind: str, question: str, ask: Callable[[], Any]) -> Any:
    """The answer to a question; ``ask`` gives one that is not known, as plain data."""
    key = (kind, question)
    for listener in _listeners:
        listener.add(key)
    if key not in _answers:
        while _preparations:
            _preparations.pop()()
        _answers[key] = ask()
    return _answers[key]


def before_asking(prepare: Callable[[], object]) -> None:
    """Call ``prepare`` before torch is asked for what is not known."""
    if prepare not in _preparations:
        _preparations.append(prepare)


@contextmanager
def facts_at_hand(facts: dict[str, dict[str, Any]]) -> Iterator[FactsAsked]:
    """Answer from ``facts`` (kind → question → answer) what they say, and listen to what is asked."""
    for kind, answers in facts.items():
        for question, answer in answers.items():
            _answers.setdefault((kind, question), answer)
    keys: set[tuple[str, str]] = set()
    _listeners.append(keys)
    try:
        yield FactsAsked(keys)
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not keys]


class FactsAsked:
    """The questions of a stretch of planning."""

    def __init__(self, keys: set[tuple[str, str]]) -> None:
        self._keys = keys

    def facts(self) -> dict[str, dict[str, Any]]:
        """The answers to them, by kind and question, in a fixed order."""
        return _by_kind(self._keys & _answers.keys())


def known_facts() -> dict[str, dict[str, Any]]:
    """All answers of this process, in the form of ``FactsAsked.facts``.

    What is remembered from planning one model (the rules of its operators) is not asked again for the next.
    """
    return _by_kind(_answers)


def _by_kind(questions: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    by_kind: dict[str, dict[str, Any]] = {}
    for kind, question in sorted(questions):
        by_kind.setdefault(kind, {})[question] = _answers[kind, question]
    return by_kind
