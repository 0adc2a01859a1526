"""The right values are numpy's own percentiles of the same numbers."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.host import map_shared, memfd
from seedrl.metrics import NUM_BUCKETS, Histogram, bucket_of

SAMPLES = st.lists(st.integers(0, 10**12), min_size=1, max_size=200)
QUANTILES = st.sampled_from([0, 1, 25, 50, 90, 99, 99.9, 100])


@settings(deadline=None)
@given(SAMPLES, QUANTILES)
def test_percentile_is_within_one_percent_of_numpys(values: list[int], q: float) -> None:
    histogram = Histogram()
    histogram.add_many(np.array(values))
    right = float(np.percentile(np.array(values), q, method="inverted_cdf"))
    assert abs(histogram.percentile(q) - right) <= 0.01 * right


@settings(deadline=None)
@given(SAMPLES)
def test_adding_one_by_one_equals_adding_an_array(values: list[int]) -> None:
    one, many = np.zeros(Histogram.words(), np.int64), np.zeros(Histogram.words(), np.int64)
    single = Histogram(one)
    for value in values:
        single.add(value)
    Histogram(many).add_many(np.array(values))
    assert (one == many).all()
    assert (single.count, single.max, single.min) == (len(values), max(values), min(values))
    assert single.mean == pytest.approx(np.mean(values))


@settings(deadline=None)
@given(SAMPLES, SAMPLES)
def test_merge_equals_counting_both_in_one(left: list[int], right: list[int]) -> None:
    both, merged, other = (np.zeros(Histogram.words(), np.int64) for _ in range(3))
    Histogram(both).add_many(left + right)
    Histogram(merged).add_many(left)
    Histogram(other).add_many(right)
    Histogram(merged).merge(Histogram(other))
    assert (both == merged).all()


@settings(deadline=None)
@given(SAMPLES, SAMPLES, QUANTILES)
def test_since_leaves_out_what_was_counted_before(
    early: list[int], late: list[int], q: float
) -> None:
    histogram = Histogram()
    histogram.add_many(early)
    before = histogram.copy()
    histogram.add_many(late)
    recent = histogram.since(before)
    right = float(np.percentile(np.array(late), q, method="inverted_cdf"))
    assert recent.count == len(late)
    assert abs(recent.percentile(q) - right) <= 0.01 * right


def test_long_and_heavy_tailed_samples_match_numpy() -> None:
    values = np.random.default_rng(1).lognormal(12, 3, 50_000).astype(np.int64)
    histogram = Histogram()
    histogram.add_many(values.reshape(50, 1000))
    for q in (50, 99, 99.9):
        assert histogram.percentile(q) == pytest.approx(
            np.percentile(values, q, method="inverted_cdf"), rel=0.01
        )


def test_buckets_follow_each_other_without_gap_or_overlap() -> None:
    edges = [bucket_of(value) for value in range(5000)]
    assert set(np.diff(edges)) == {0, 1}
    assert edges[:128] == list(range(128))
    assert bucket_of(2**40 - 1) == NUM_BUCKETS - 1


def test_the_smallest_and_largest_times_keep_their_accuracy() -> None:
    for value in (1, 1000, 10**9, 10**12):  # 1 us in us and in ns, 1000 s in us and in ns
        histogram = Histogram()
        histogram.add_many([value, 2**39])
        assert histogram.percentile(50) == pytest.approx(min(value, 2**39), rel=0.01)


def test_what_is_out_of_range_is_counted_at_the_ends_and_max_stays_exact() -> None:
    histogram = Histogram()
    histogram.add(-5)
    histogram.add(2**50)
    histogram.add_many(np.array([-1, 2**51]))
    assert (histogram.count, histogram.min, histogram.max) == (4, 0, 2**51)
    assert histogram.percentile(100) == 2**51


def test_an_empty_histogram_has_no_percentile() -> None:
    histogram = Histogram()
    histogram.add_many(np.array([], np.int64))
    assert math.isnan(histogram.percentile(50)) and math.isnan(histogram.mean)
    assert (histogram.count, histogram.max, histogram.min) == (0, 0, 0)


def test_a_reader_of_the_same_shared_memory_sees_what_was_added() -> None:
    nbytes = Histogram.words() * 8
    memory = memfd("test", nbytes)
    writer, reader = (np.frombuffer(map_shared(memory, nbytes), np.int64) for _ in range(2))
    Histogram(writer).add_many([10, 20, 30])
    assert Histogram(reader).percentile(50) == 20


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    histogram = Histogram()
    values = np.arange(100_000)
    histogram.add_many(values)
    tracemalloc.start()
    histogram.add_many(values)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 32_768


def test_words_of_another_size_or_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        Histogram(np.zeros(10, np.int64))
    with pytest.raises(ValueError, match="int64"):
        Histogram(np.zeros(Histogram.words()))  # type: ignore[arg-type]
