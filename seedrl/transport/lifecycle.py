"""The life of a group of slots, as one table: who may move it, from where to where.

A group's state is not a word that several parties write. It follows from words that have one writer each
(`slab.py`): the door leases and revokes, the worker asks, the engine answers and acknowledges a revocation.
`state_of` reads them; `NEXT` says what may follow what.
"""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    FREE = 0  # nobody sits here
    LEASED = 1  # a worker was given the seats and has not asked yet
    READY = 2  # its rows are published and wait for a batch
    IN_BATCH = 3  # the engine is at work on them
    ANSWERED = 4  # actions are published; the worker steps its environments
    DRAINING = 5  # the lease was revoked; the engine has not let go of the rows yet


class Mover(IntEnum):
    DOOR = 0
    WORKER = 1
    ENGINE = 2


NEXT: dict[State, dict[State, Mover]] = {
    State.FREE: {State.LEASED: Mover.DOOR},
    State.LEASED: {State.READY: Mover.WORKER, State.DRAINING: Mover.DOOR},
    State.READY: {State.IN_BATCH: Mover.ENGINE, State.DRAINING: Mover.DOOR},
    State.IN_BATCH: {State.ANSWERED: Mover.ENGINE, State.DRAINING: Mover.DOOR},
    State.ANSWERED: {State.READY: Mover.WORKER, State.DRAINING: Mover.DOOR},
    State.DRAINING: {State.FREE: Mover.ENGINE},
}


def state_of(
    *,
    leased: bool,
    generation: int,
    drained: int,
    base: int,
    asked: int,
    answered: int,
    in_batch: bool,
) -> State:
    """The state that the control words of one group spell.

    Args:
        leased: the door's word says that a worker holds the group.
        generation: number of the newest lease; 0 when there never was one.
        drained: newest generation whose end the engine has acknowledged.
        base: the sequence number from which this lease counts.
        asked, answered: the worker's and the engine's sequence numbers; those below `base` are another lease's.
        in_batch: the engine has taken the rows into the batch it is working on.
    """
    if not leased:
        return State.FREE if drained >= generation else State.DRAINING
    if asked <= base:
        return State.LEASED
    if asked <= answered:
        return State.ANSWERED
    return State.IN_BATCH if in_batch else State.READY
