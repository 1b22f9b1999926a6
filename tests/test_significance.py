"""Intervals hold the truth as often as they say, and chance is called chance."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from gemma_trainer.metrics import mean, ratio
from gemma_trainer.significance import compare, interval


def right(*values):
    """Rows that are right or wrong, as `mean` takes them."""
    return np.array([(value, 1) for value in values], float)


def some(count, total):
    return right(*[1] * count, *[0] * (total - count))


@pytest.mark.parametrize(("count", "total"), [(20, 20), (0, 20), (7, 20), (29, 30), (1, 1), (0, 1)])
def test_a_share_has_wilsons_interval_which_never_claims_certainty(count, total):
    found = interval(some(count, total), mean)
    wanted = scipy_stats.binomtest(count, total).proportion_ci(0.95, method="wilson")
    assert found == pytest.approx((wanted.low, wanted.high))
    assert found[1] - found[0] > 0.05


@pytest.mark.parametrize(("rows", "finish", "ends"), [
    ([(0.5, 1)], mean, (0, 1)), ([(0.5, 1)] * 9, mean, (0, 1)), ([(0, 7), (0, 3)], ratio, (1, 0)),
    ([(5, 5), (3, 3)], ratio, (1, 0)), ([(9, 3)], ratio, (1, 0)),
    ([(1, 1)] * 3, lambda sums: 100 * mean(sums), (0, 100)),
])  # fmt: skip
def test_rows_that_are_all_alike_have_an_interval_with_a_width(rows, finish, ends):
    figure = finish(np.array(rows, float).sum(0))
    low, high = interval(rows, finish, ends=ends)
    assert low <= figure <= high and high - low > 0.2 * abs(ends[0] - ends[1])


def test_one_row_tells_nothing_of_a_figure_without_bounds():
    assert interval([(2.0, 1)], mean, ends=None) == (-np.inf, np.inf)
    found = compare([(2.0, 1)], [(3.0, 1)], mean, ends=None)
    assert (found["low"], found["high"], found["difference"]) == (-np.inf, np.inf, 1) and found["p"] == 1


@pytest.mark.parametrize(("draw", "finish", "ends", "truth"), [
    (lambda random, n: np.column_stack([random.gamma(1.0, size=n), np.ones(n)]), mean, None, 1.0),
    (lambda random, n: np.column_stack([random.beta(2, 1, n), np.ones(n)]), mean, (0, 1), 2 / 3),
    (lambda random, n: np.column_stack([random.random(n) < 0.8, np.ones(n)]), mean, (0, 1), 0.8),
    (lambda random, n: (lambda size: np.column_stack([random.binomial(size, 0.1), size]))(random.integers(1, 20, n)),
     ratio, (1, 0), 0.1),
])  # fmt: skip
def test_the_interval_holds_the_truth_some_95_times_of_100(draw, finish, ends, truth):
    random, times = np.random.default_rng(1), 400
    found = [interval(draw(random, 30), finish, resamples=500, ends=ends) for _ in range(times)]
    held = sum(low <= truth <= high for low, high in found)
    assert 0.92 * times <= held <= 0.985 * times


def test_the_interval_of_many_rows_is_scipys_bca():
    values = np.random.default_rng(4).lognormal(0, 1.5, 200)  # so skewed that plain percentiles are far off
    low, high = interval(np.column_stack([values, np.ones(200)]), mean, resamples=10_000, ends=None)
    options = {"n_resamples": 10_000, "vectorized": True, "rng": 0}
    found = scipy_stats.bootstrap((values,), np.mean, method="BCa", **options).confidence_interval
    assert (low, high) == pytest.approx((found.low, found.high), rel=0.012)
    plain = scipy_stats.bootstrap((values,), np.mean, method="percentile", **options).confidence_interval
    assert abs(plain.low / found.low - 1) > 0.02 < abs(plain.high / found.high - 1)


def test_no_p_is_zero():
    random = np.random.default_rng(5)
    values = np.column_stack([random.random(400), np.ones(400)])
    found = compare(values, values + np.column_stack([1 + random.random(400), np.zeros(400)]), mean, resamples=99)
    assert found["p"] == 1 / 100


@pytest.mark.parametrize("kind", ["shares", "values"])
def test_no_difference_has_a_uniform_p_and_its_interval_holds_zero(kind):
    random, times, n = np.random.default_rng(2), 400, 40
    found = []
    for _ in range(times):
        hard = random.random(n)  # the same rows are hard for both
        values = [random.random(n) < hard if kind == "shares" else random.beta(1 + hard, 1) for _ in range(2)]
        found.append(compare(*(np.column_stack([side, np.ones(n)]) for side in values), mean, resamples=500))
    for bound in (0.05, 0.2, 0.5):
        share, spread = sum(one["p"] <= bound for one in found) / times, 3 * np.sqrt(bound * (1 - bound) / times)
        assert share <= bound + spread
        assert kind == "shares" or share >= bound - spread  # an exact test of few outcomes errs to the safe side
    assert 0.92 <= sum(one["low"] <= 0 <= one["high"] for one in found) / times <= 0.99


def test_a_difference_is_found_and_its_interval_holds_its_size():
    random, times, n = np.random.default_rng(3), 200, 100
    held = found = 0
    for _ in range(times):
        before, after = random.random(n) < 0.5, random.random(n) < 0.75
        one = compare(*(np.column_stack([side, np.ones(n)]) for side in (before, after)), mean, resamples=300)
        held += one["low"] <= 0.25 <= one["high"]
        found += one["p"] < 0.05
    assert 0.92 * times <= held <= 0.99 * times
    assert found > 0.85 * times  # power of McNemar's test there: some 0.95


@pytest.mark.parametrize(("gained", "lost", "same"), [(8, 1, 11), (3, 3, 0), (0, 5, 20), (1, 0, 0), (12, 4, 300)])
def test_p_of_right_and_wrong_rows_is_mcnemars_exact_one(gained, lost, same):
    before, after = right(*[0] * gained, *[1] * lost, *[1] * same), right(*[1] * gained, *[0] * lost, *[1] * same)
    wanted = scipy_stats.binomtest(gained, gained + lost).pvalue
    assert compare(before, after, mean)["p"] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("n", [8, 60])
def test_p_of_values_is_that_of_all_exchanges(n):
    random = np.random.default_rng(n)
    a, b = (np.column_stack([random.random(n), np.ones(n)]) for _ in range(2))
    b[:, 0] += 0.1
    wanted = scipy_stats.permutation_test(
        (b[:, 0], a[:, 0]), lambda x, y, axis: (x - y).mean(axis), permutation_type="samples", vectorized=True,
        n_resamples=20_000, rng=0,
    ).pvalue  # fmt: skip
    found = compare(a, b, mean, resamples=20_000, ends=None)["p"]
    assert found == pytest.approx(wanted, abs=1e-9 if n == 8 else 0.012)


def test_twenty_gained_of_twenty_are_significant_but_not_certain_and_none_of_any_are_neither():
    found = compare(some(0, 20), some(20, 20), mean)
    assert found["difference"] == 1 and found["high"] == 1 and 0.5 < found["low"] < 0.95
    assert found["p"] == pytest.approx(2 * 0.5**20)
    found = compare(some(20, 20), some(20, 20), mean)
    assert (found["difference"], found["p"]) == (0, 1) and found["low"] == -found["high"] < -0.05
    found = compare([(0.5, 1)] * 20, [(0.6, 1)] * 20, mean)
    assert found["low"] < 0.1 < found["high"] < 0.5
    values = np.column_stack([np.arange(20) / 40, np.ones(20)])
    alike = compare(values, values + (0.1, 0), mean)
    assert (alike["low"], alike["high"]) == pytest.approx((found["low"], found["high"]))


@pytest.mark.parametrize("ends", [None, (0, 1)])
@pytest.mark.parametrize("n", [1, 2, 5, 40, 300])
def test_exchanged_sides_change_the_sign_and_nothing_else(n, ends):
    random = np.random.default_rng(n)
    a, b = (np.column_stack([random.random(n), np.ones(n)]) for _ in range(2))
    one, other = compare(a, b, mean, resamples=200, ends=ends), compare(b, a, mean, resamples=200, ends=ends)
    assert one == {"difference": -other["difference"], "low": -other["high"], "high": -other["low"], "p": other["p"]}
    assert one == compare(a, b, mean, resamples=200, ends=ends)  # nothing is left to chance
    assert not any(np.isnan(value) for value in one.values()) and 0 < one["p"] <= 1
    assert one["low"] <= one["difference"] <= one["high"]


def test_the_order_of_rows_does_not_matter_where_they_are_few_kinds():
    random = np.random.default_rng(0)
    a, b = some(30, 100), some(60, 100)
    order = random.permutation(100)
    assert compare(a, b, ratio, ends=None) == compare(a[order], b[order], ratio, ends=None)


def test_a_hundred_thousand_rows_stay_within_memory_and_have_the_normal_interval():
    import tracemalloc

    random = np.random.default_rng(0)
    stats = np.column_stack([random.random(100_000), np.ones(100_000)])
    tracemalloc.start()
    low, high = interval(stats, mean, resamples=300)
    found = compare(stats, stats[::-1].copy(), mean, resamples=300)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    half = 1.96 * stats[:, 0].std() / np.sqrt(len(stats))
    assert high - low == pytest.approx(2 * half, rel=0.15)
    assert found["difference"] == pytest.approx(0, abs=1e-9) and found["p"] == 1
    assert peak < 150e6


@pytest.mark.parametrize("stats", [[], [1.0, 2.0], np.zeros((0, 2)), [(np.nan, 1)], [(np.inf, 1)]])
def test_numbers_that_are_none_are_refused(stats):
    with pytest.raises(ValueError, match="one row|finite"):
        interval(stats, mean)
    with pytest.raises(ValueError, match="one row|finite|same"):
        compare(some(1, 2), stats, mean)


def test_other_rows_are_refused():
    with pytest.raises(ValueError, match="the same"):
        compare(some(1, 2), some(1, 3), mean)
