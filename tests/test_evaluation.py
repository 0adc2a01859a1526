import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seedrl.evaluation import Round


def ended(*episodes: tuple[int, bool, float]) -> np.ndarray:
    return np.array(
        [(slot, evaluation, value, 1, 0) for slot, evaluation, value in episodes], float
    )


def test_the_first_episodes_of_each_seat_count_so_short_ones_are_no_more() -> None:
    played = Round(4, 2)
    played.hold([7, 8])
    played.take(ended((7, True, 1), (7, True, 2), (7, True, 99), (8, True, 3), (3, True, 99)))
    assert not played.complete and played.played == 3
    played.take(ended((8, False, 99), (8, True, 4)))
    assert played.complete
    assert played.result().returns.tolist() == [1, 3, 2, 4]
    assert played.result().summary() == {
        "episodes": 4, "mean_return": 2.5, "std_return": np.std([1, 2, 3, 4]), "min_return": 1, "max_return": 4,
        "mean_length": 1,
    }  # fmt: skip


def test_a_round_begins_anew_when_its_worker_was_replaced() -> None:
    played = Round(2, 2)
    assert not played.complete
    played.hold([7, 8])
    played.take(ended((7, True, 1), (8, True, 1)))
    played.hold([])
    assert not played.complete
    played.hold([4, 5])
    played.take(ended((7, True, 1), (4, True, 2), (5, True, 3)))
    assert played.complete and played.result().returns.tolist() == [2, 3]


@given(st.integers(1, 30), st.integers(1, 30))
def test_a_round_has_as_many_episodes_as_asked_for(episodes: int, seats: int) -> None:
    played = Round(episodes, seats)
    assert played.seats <= episodes
    played.hold(range(played.seats))
    while not played.complete:
        played.take(ended(*((slot, True, 1.0) for slot in range(played.seats))))
    assert played.result().returns.size == episodes
