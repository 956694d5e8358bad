"""A batch taken apart: who makes it fail, whose input is known to, how much of it fits into memory. Generators; nothing runs here.

They yield groups of members to be run, are sent what came of each, and return the outcome; so the same search serves threads and
awaited functions. One that is run is a *rerun* if its members have been run before. Knows no model, clock or thread.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias

from shoal.core.ticket import Ticket
from shoal.engine.outcome import End, Outcome, Result, Run, ends_of, is_out_of_memory, model_error, rows_of, runs_of

__all__ = ["Search", "isolate", "set_apart"]

Search: TypeAlias = Generator[Sequence[Ticket], Result | BaseException, Outcome]


def isolate(members: Sequence[Ticket], cause: BaseException) -> Search:
    """Find the members that make a batch fail, which it did with `cause`.

    Halves are tried, and the halves of those that fail; a member that fails alone is a culprit and gets its own exception. One
    culprit among n costs at most 2⌈log₂ n⌉ reruns. Where culprits turn out to be many, what is left is run one by one: never more
    than 1.5 n + 2⌈log₂ n⌉ + 5 reruns in all. If the first 2⌈log₂ n⌉ + 2 reruns and three single members from other places all fail,
    the model itself is taken to be broken, and whoever was not tried alone fails with the exception of the group it was in.

    Where memory did not suffice the same is done, but groups are halved without being tried as long as they have as many rows as
    one that did not fit, and no other of that size did.
    """
    return _Search(members).isolate(cause)


def set_apart(members: Sequence[Ticket], suspects: Sequence[int]) -> Search:
    """Run each suspect (by index) alone, and the others together before them; if those fail, they are taken apart as above.

    The suspects' runs are no reruns. One that fails again counts as a culprit, whatever became of the others.
    """
    known = set(suspects)
    order = [index for index in range(len(members)) if index not in known]
    rest = len(order)
    order += suspects
    outcome = yield from _Search([members[index] for index in order]).set_apart(rest)
    ends = outcome.ends or []
    by_index = dict(zip(order, ends, strict=True))
    outcome.ends = [by_index[index] for index in range(len(members))]
    outcome.culprits = [order[place] for place in outcome.culprits]
    outcome.apart = len(suspects)
    return outcome


class _Search:
    """One batch being taken apart. `_fitted` is the largest run, in rows, that memory sufficed for, `_unfitted` all others."""

    def __init__(self, members: Sequence[Ticket]) -> None:
        count = len(members)
        self._members = members
        self._ends: list[End | None] = [None] * count
        self._reruns = 0
        self._runs: list[Run] = []
        self._alone: dict[int, BaseException] = {}  # members that were run alone and failed
        self._cause: BaseException | None = None
        self._fitted = 0
        self._unfitted: list[int] = []
        self._patience = 2 * (count - 1).bit_length() + 2

    def isolate(self, cause: BaseException) -> Search:
        count = len(self._members)
        self._failed(range(count), cause)
        if count > 1:
            yield from self._divide([(0, count, cause)])
        return self._outcome(known=count)

    def set_apart(self, rest: int) -> Search:
        count = len(self._members)
        groups = [(0, rest)] if rest else []
        groups += [(place, place + 1) for place in range(rest, count)]
        failing: list[tuple[int, int, BaseException]] = []
        for first, last in groups:
            raised = yield from self._try(first, last)
            if raised is not None and last - first > 1:
                failing.append((first, last, raised))
        self._reruns = 0
        yield from self._divide(failing)
        return self._outcome(known=rest)

    def _outcome(self, known: int) -> Outcome:
        """`known`: from here on members had been culprits before."""
        outcome = Outcome(None, [end for end in self._ends if end is not None], self._runs, 0)
        outcome.cause = self._cause
        outcome.reruns = self._reruns
        outcome.culprits = [place for place in self._alone if self._runs or place >= known]
        outcome.oom_runs = len(self._unfitted)
        own_fault = any(
            self._members[place].rows <= self._fitted and is_out_of_memory(error) for place, error in self._alone.items()
        )
        outcome.oom_rows = 0 if own_fault else self._too_many()
        return outcome

    def _divide(self, failing: list[tuple[int, int, BaseException]]) -> Generator[Sequence[Ticket], Result | BaseException, None]:
        """Take groups of several members apart that failed."""
        count = len(self._members)
        broken: bool | None = None
        while failing:
            first, last, error = failing.pop()
            if broken is None and not self._runs and self._reruns >= self._patience:
                broken = yield from self._is_broken()
            if broken:
                shared = model_error(error)
                self._ends[first:last] = [shared if end is None else end for end in self._ends[first:last]]
                continue
            half = (first + last) // 2
            parts = [(first, half), (half, last)]
            if self._reruns > count // 2 + self._patience:
                parts = [(place, place + 1) for place in range(first, last)]
            for start, stop in parts:
                too_many = self._too_many()
                if too_many and stop - start > 1 and rows_of(self._members[start:stop]) >= too_many:
                    failing.append((start, stop, error))
                    continue
                raised = yield from self._try(start, stop)
                if raised is not None and stop - start > 1:
                    failing.append((start, stop, raised))

    def _is_broken(self) -> Generator[Sequence[Ticket], Result | BaseException, bool]:
        """Nothing has worked so far: does any of three members from other places work alone?"""
        count = len(self._members)
        for place in (0, count // 4, count // 2):  # the search begins at the other end
            if self._ends[place] is None:
                raised = yield from self._try(place, place + 1)
                if raised is None:
                    return False
        return True

    def _try(self, first: int, last: int) -> Generator[Sequence[Ticket], Result | BaseException, BaseException | None]:
        """Run those of members `first` to `last` that have not ended; the exception if that failed.

        Else, or if it was one member, their ends are known.
        """
        places = [place for place in range(first, last) if self._ends[place] is None]
        if not places:
            return None
        group = [self._members[place] for place in places]
        self._reruns += 1
        tried = yield group
        if isinstance(tried, BaseException):
            self._failed(places, tried)
            return tried
        self._fitted = max(self._fitted, rows_of(group))
        self._runs += runs_of(group, tried)
        for place, end in zip(places, ends_of(group, tried), strict=True):
            self._ends[place] = end
        return None

    def _failed(self, places: Sequence[int], error: BaseException) -> None:
        if self._cause is None:
            self._cause = error
        if is_out_of_memory(error):
            self._unfitted.append(rows_of([self._members[place] for place in places]))
        if len(places) == 1:
            self._alone[places[0]] = error
            self._ends[places[0]] = model_error(error)

    def _too_many(self) -> int:
        """The fewest rows that memory did not suffice for, and for no other run of so many; 0 if there are none."""
        return min([rows for rows in self._unfitted if rows > self._fitted], default=0)
