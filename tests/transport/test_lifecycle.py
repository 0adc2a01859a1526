import itertools

from seedrl.transport.lifecycle import NEXT, Mover, State, state_of


def _words(leased, generation, drained, asked, answered, in_batch):
    return {
        "leased": leased,
        "generation": generation,
        "drained": drained,
        "base": 100,
        "asked": asked,
        "answered": answered,
        "in_batch": in_batch,
    }


def test_every_single_write_moves_a_group_as_the_table_says_and_by_its_mover() -> None:
    """Exhaustive over small values of the control words: whatever one party may write leads along an arrow of the table."""
    seen = set()
    for leased, generation, drained, asked, answered, in_batch in itertools.product(
        (False, True), (1, 2), (0, 1, 2), (100, 101, 102), (100, 101, 102), (False, True)
    ):
        if (
            drained > generation
            or (leased and drained == generation)
            or not 0 <= asked - answered <= 1
        ):
            continue
        if in_batch and asked == answered:
            continue
        words = _words(leased, generation, drained, asked, answered, in_batch)
        before = state_of(**words)
        writes: list[tuple[Mover, dict]] = []
        if leased:
            writes.append((Mover.DOOR, {"leased": False}))
            if asked == answered:
                writes.append((Mover.WORKER, {"asked": asked + 1}))
            elif in_batch:
                writes.append((Mover.ENGINE, {"answered": asked, "in_batch": False}))
            else:
                writes.append((Mover.ENGINE, {"in_batch": True}))
        elif drained == generation:
            writes.append(
                (
                    Mover.DOOR,
                    {
                        "leased": True,
                        "generation": generation + 1,
                        "asked": 100,
                        "answered": 100,
                        "in_batch": False,
                    },
                )
            )
        else:
            writes.append((Mover.ENGINE, {"drained": generation}))
        for mover, change in writes:
            after = state_of(**{**words, **change})
            assert NEXT[before].get(after) == mover, (words, change, before, after)
            seen.add((before, after))
    assert seen == {(a, b) for a, row in NEXT.items() for b in row}


def test_every_state_can_be_reached_and_left() -> None:
    assert set(NEXT) == set(State)
    assert {b for row in NEXT.values() for b in row} == set(State)
