"""The meetings of a recorded start-up in an order that every rank kept, or where the ranks differ.

Each rank's calls are taken one after the other, as cards from a pile: a meeting is complete when all its members have
it on top. Where nobody can go on, the ranks did not meet in one order, and what lies on top says who met what.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from initopt.hooks import STORE, WORLD
from initopt.rank_numbers import ranks_in_short
from initopt.record import FIRST_STEP, Begun, Span
from initopt.runs import Run

MAKES_GROUP = frozenset({"new_group", "split_group", "_new_group_with_tag"})
_WHERE = "(no call site)"
_NOT_COMPLETE = "a meeting was not complete"
_DID_NOT_COME = "did not come: it made no further call"
_HELPER = "torchrec/distributed/collective_utils.py:"


@dataclass(frozen=True, slots=True)
class Met:
    """One meeting, with the call of every rank that was recorded in it, by rank.

    For a new group that all ranks must ask for, those that are no members are in it as well.
    """

    spans: tuple[Span, ...]

    @property
    def call(self) -> Span:
        """The call of the lowest rank."""
        return self.spans[0]

    @property
    def site(self) -> str:
        """Where it was called from, as `file:line`: of a helper that meets for others, where that was called from."""
        callers = self.call.callers
        if self.call.call_site.startswith(_HELPER) and len(callers) > 1:
            return callers[1].rpartition(" ")[0]
        return self.call.call_site

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who met: of a new group its members, as asked for."""
        return self.call.ranks or tuple(span.rank for span in self.spans)

    @property
    def made(self) -> str:
        """The name of the group that was made here, empty if none was."""
        return next((s.group for s in self.spans if s.op in MAKES_GROUP and s.sequence >= 0), "")

    def same_digest(self) -> str:
        """The checksum of what each rank put in, if it is the same on all and was read; else empty."""
        digests = {span.digest for span in self.spans}
        return digests.pop() if len(digests) == 1 and "unknown" not in digests else ""


@dataclass(frozen=True, slots=True)
class Differing:
    """Ranks that did the same when `what` says they should not have differed: one of a `Problem`'s parties.

    `number` counts the calls of each of these ranks, from 1; 0 where there was no such call.
    """

    ranks: tuple[int, ...]
    what: str
    call_site: str
    number: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A place from which on the ranks did not meet in one order. `parties` have the most ranks first."""

    text: str
    parties: tuple[Differing, ...]


@dataclass(frozen=True)
class Timeline:
    """The `meetings` up to the first training step in an order that every rank kept; up to the first of `problems`."""

    meetings: tuple[Met, ...]
    problems: tuple[Problem, ...]


def timeline(run: Run, *, training: bool = False) -> Timeline:
    """Put the meetings of `run` in order. With `training` those of the first training step, and later, count."""
    calls = {rank: _calls(run, rank, training) for rank in run.headers}
    problems = list(_groups_made(calls))
    keys = {rank: _keyed(spans) for rank, spans in calls.items()}
    meetings, stuck = _dealt(keys, _members(run, keys), run, training)
    problems += _mixed(meetings)
    if stuck and not problems:
        problems.append(stuck)
    return Timeline(tuple(meetings), tuple(problems))


_Key = tuple[str, int]


def _calls(run: Run, rank: int, training: bool) -> list[Span]:
    """The meetings of one rank by start, up to its first training step."""
    spans = run.of_rank(rank)
    until = min((s.start for s in spans if s.kind == "step" and s.name == FIRST_STEP), default=None)
    found = (s for s in spans if s.kind == "collective" and s.op != "destroy_process_group")
    return [s for s in found if training or until is None or s.start < until]


def _keyed(spans: Iterable[Span]) -> deque[tuple[_Key, Span]]:
    """The calls with what makes them one meeting: the group and the number on it, or which of the new groups it is."""
    made = 0
    found: deque[tuple[_Key, Span]] = deque()
    for span in spans:
        if span.op in MAKES_GROUP and span.ranks:
            found.append((("", made), span))
            made += 1
        elif span.sequence >= 0:
            found.append(((span.group, span.sequence), span))
    return found


def _members(run: Run, keys: Mapping[int, deque[tuple[_Key, Span]]]) -> dict[_Key, set[int]]:
    """Who must come to each meeting: the members of its group, as far as there are records of them."""
    recorded = set(run.headers)
    members: defaultdict[_Key, set[int]] = defaultdict(set)
    for rank, found in keys.items():
        for key, _ in found:
            members[key].add(rank)
    for key in members:
        group = key[0]
        if not group or (group == WORLD and WORLD not in run.groups):
            members[key] |= recorded
        elif not group.startswith(STORE):
            members[key] |= recorded & set(run.groups.get(group, ()))
    return members


def _dealt(
    keys: Mapping[int, deque[tuple[_Key, Span]]], members: Mapping[_Key, set[int]], run: Run, training: bool
) -> tuple[list[Met], Problem | None]:
    """The complete meetings in a common order, and what kept the rest from being complete."""
    left = {rank: deque(found) for rank, found in keys.items()}
    done: Counter[int] = Counter()
    meetings = []
    waiting: defaultdict[_Key, int] = defaultdict(int)
    for found in left.values():
        if found:
            waiting[found[0][0]] += 1
    ready = deque(key for key, count in waiting.items() if count == len(members[key]))
    while ready:
        key = ready.popleft()
        spans = []
        for rank in sorted(members[key]):
            spans.append(left[rank].popleft()[1])
            done[rank] += 1
            if left[rank]:
                after = left[rank][0][0]
                waiting[after] += 1
                if waiting[after] == len(members[after]):
                    ready.append(after)
        meetings.append(Met(tuple(spans)))
    # Where the first training step cut the record of one rank off, the others may have more.
    stuck = {begun.rank: begun for begun in run.stuck}
    if any(left.values()):
        return meetings, _stuck(left, members, done, stuck, cut=not training)
    return meetings, _stopped(run, done) if training and stuck else None


def _stopped(run: Run, done: Counter[int]) -> Problem:
    """Ranks that were stopped in a meeting, where no other rank's record has a call that did not come to its end."""
    stuck = {begun.rank: begun for begun in run.stuck}
    wanted = {rank for begun in run.stuck for rank in run.groups.get(begun.group, tuple(run.headers))}
    at: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
    for rank in sorted(wanted & set(run.headers)):
        if rank in stuck:
            at[_still_in(stuck[rank]), stuck[rank].call_site or _WHERE, done[rank] + 1].append(rank)
        else:
            at[_DID_NOT_COME, "", 0].append(rank)
    parties = [Differing(tuple(ranks), what, site, number) for (what, site, number), ranks in at.items()]
    return Problem(_NOT_COMPLETE, tuple(sorted(parties, key=lambda party: (-len(party.ranks), party.ranks))))


def _stuck(
    left: Mapping[int, deque[tuple[_Key, Span]]],
    members: Mapping[_Key, set[int]],
    done: Counter[int],
    began: Mapping[int, Begun],
    *,
    cut: bool,
) -> Problem | None:
    """The ranks that keep each other from going on, and what each of them was at: of the meeting that began first."""
    heads = {rank: found[0] for rank, found in left.items() if found}
    first = min(heads.values(), key=lambda head: head[1].start)[0]
    at: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
    chain, seen = [first], {first}
    missing = False
    while chain:
        key = chain.pop()
        for rank in sorted(members[key]):
            if rank in heads:
                other, span = heads[rank]
                at[_named(span), span.call_site or _WHERE, done[rank] + 1].append(rank)
                if other not in seen:
                    seen.add(other)
                    chain.append(other)
            else:
                missing = True
                begun = began.get(rank)
                if begun is not None:
                    at[_still_in(begun), begun.call_site or _WHERE, done[rank] + 1].append(rank)
                else:
                    at[_DID_NOT_COME, "", 0].append(rank)
    if missing and cut and not any(rank in began for ranks in at.values() for rank in ranks):
        # It may have come in the training step, which was not asked for.
        return None
    parties = [Differing(tuple(sorted(set(ranks))), what, site, number) for (what, site, number), ranks in at.items()]
    text = _NOT_COMPLETE if missing else "the ranks did not meet in one order"
    return Problem(text, tuple(sorted(parties, key=lambda party: (-len(party.ranks), party.ranks))))


def _groups_made(calls: Mapping[int, list[Span]]) -> Iterable[Problem]:
    """The first new group for which the ranks asked differently: each of them must ask for each, in one order."""
    made = {rank: [s for s in spans if s.op in MAKES_GROUP and s.ranks] for rank, spans in calls.items()}
    for number in range(max((len(found) for found in made.values()), default=0)):
        asked: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, found in made.items():
            if number < len(found):
                span = found[number]
                backend = span.options.partition(",")[0]
                what = f"asked for one of ranks {ranks_in_short(span.ranks)} ({backend})"
                asked[what, span.call_site or _WHERE].append(rank)
            else:
                asked["asked for no further one", ""].append(rank)
        if len({what for what, _ in asked}) > 1:
            parties = [Differing(tuple(r), what, site, number + 1) for (what, site), r in asked.items()]
            text = f"new group {number + 1} is not the same for all ranks"
            yield Problem(text, tuple(sorted(parties, key=lambda party: (-len(party.ranks), party.ranks))))
            return


def _mixed(meetings: Iterable[Met]) -> Iterable[Problem]:
    """The first meeting to which the ranks came with different calls."""
    for met in meetings:
        if met.call.op in MAKES_GROUP:
            continue
        at: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for span in met.spans:
            at[_named(span, root=True), span.call_site or _WHERE].append(span.rank)
        if len({what for what, _ in at}) > 1:
            number = met.call.sequence + 1
            parties = [Differing(tuple(ranks), what, site, number) for (what, site), ranks in at.items()]
            text = f"call {number} on {met.call.group or 'a new group'} is not the same for all ranks"
            yield Problem(text, tuple(sorted(parties, key=lambda party: (-len(party.ranks), party.ranks))))
            return


def _named(span: Span, *, root: bool = False) -> str:
    if span.op in MAKES_GROUP:
        return f"asked for a group of ranks {ranks_in_short(span.ranks)}" if span.ranks else "made a group"
    from_rank = f" with root {span.root}" if root and span.root >= 0 else ""
    return f"met in {_of(span.op, span.group)}{from_rank}"


def _still_in(begun: Begun) -> str:
    return f"was still in {_of(begun.op, begun.group)} when its record ends"


def _of(op: str, group: str) -> str:
    where = group if group == WORLD or group.startswith(STORE) else f"group {group}"
    return f"{op} on {where}" if group else op
