"""What figures are worth: their intervals, and whether a difference between two models is more than chance.

Figures are made of sums over rows (see `metrics.Metric`), so that resampling rows is multiplying counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

AT_ONCE = 2_000_000  # numbers in a block of resamples: 16 MB
FEW = 256  # different rows that are drawn by their kind, whatever their number
NO_WIDTH = 1e-9  # of an interval, where all rows are alike but for the order of sums
EXACT = 2**14  # outcomes that are counted one by one

Finish = Callable[[np.ndarray], np.ndarray]


def interval(
    stats, finish: Finish, level: float = 0.95, resamples: int = 2000, seed: int = 0, ends=(0.0, 1.0)
) -> tuple[float, float]:
    """An interval around the figure of these rows, such that `level` of the intervals of so many rows hold that of all.

    It comes from resampled rows: the BCa bootstrap (Efron, 1987), wider for few rows as in Hesterberg, "What Teachers
    Should Know About the Bootstrap" (2015). Where rows are right or wrong it is Wilson's; so is it, of as many rows of
    which that share is right, where all rows are alike: 20 of 20 do not prove 100 %.

    Args:
        stats: [n, k] numbers of each row.
        finish: makes sums [..., k] into figures [...].
        ends: figures of rows that are all wrong and all right, in any order; of an error rate 1 and 0, although it may
            be more. None for a figure without such ends, a loss, say: one row tells nothing of it, and its interval is
            from -inf to inf.

    Raises:
        ValueError: no rows, or numbers that are not finite.
    """
    stats = _checked(stats)
    figure = float(finish(stats.sum(0)))
    if ends is None and len(stats) == 1:
        return -np.inf, np.inf
    if ends is None or not _all_or_nothing(stats, finish, figure, ends):
        low, high = _bootstrap(stats, finish, level, resamples, seed)
        if ends is None or high - low > NO_WIDTH * abs(ends[1] - ends[0]):
            return min(low, figure), max(high, figure)
    start, span = min(ends), abs(ends[1] - ends[0])
    share = float(np.clip((figure - start) / span, 0, 1))
    low, high = (start + bound * span for bound in _wilson(share, len(stats), level))
    return min(low, figure), max(high, figure)


def compare(
    a, b, finish: Finish, level: float = 0.95, resamples: int = 2000, seed: int = 0, ends=(0.0, 1.0)
) -> dict[str, float]:
    """How the figure of `b` differs from that of `a` on the same rows.

    The interval is that of resampled rows as in `interval`; where rows are right or wrong, or all differ alike, it is
    that of Bonett and Price (2012) for paired shares. p is the probability of such a difference, or a larger one to
    either side, if it were chance which of a row's two answers came from which model: exact where outcomes are few
    (for right and wrong rows it is McNemar's exact test), else from `resamples` random exchanges, and then no less than
    1 / (resamples + 1).

    Args:
        a, b: [n, k] numbers of each row, in the same order of rows.

    Returns:
        {"difference": b - a, "low", "high", "p"}; of `compare(b, a)` the same with the signs changed.

    Raises:
        ValueError: no rows, other shapes, or numbers that are not finite.
    """
    a, b = _checked(a), _checked(b)
    if a.shape != b.shape:
        raise ValueError(f"the rows must be the same: shapes {a.shape} and {b.shape}")
    if a.tobytes() > b.tobytes():  # one order, so that the same is drawn whichever comes first
        found = compare(b, a, finish, level, resamples, seed, ends)
        low, high = 0.0 - found["high"], 0.0 - found["low"]  # and no -0.0
        return {"difference": 0.0 - found["difference"], "low": low, "high": high, "p": found["p"]}
    before, after = (float(finish(side.sum(0))) for side in (a, b))
    low, high = _difference_interval(a, b, finish, (before, after), level, resamples, seed, ends)
    difference = after - before
    bounds = {"low": float(min(low, difference)), "high": float(max(high, difference))}
    return {"difference": difference} | bounds | {"p": _p_of_exchange(a, b, finish, difference, resamples, seed)}


def _difference_interval(a, b, finish, figures, level, resamples, seed, ends) -> tuple[float, float]:
    n, k = a.shape
    if ends is None and n == 1:
        return -np.inf, np.inf

    def change(sums):
        return finish(sums[..., k:]) - finish(sums[..., :k])

    both = np.hstack([a, b])
    if ends is None:
        return _bootstrap(both, change, level, resamples, seed)
    span = abs(ends[1] - ends[0])
    if all(_all_or_nothing(side, finish, figure, ends) for side, figure in zip((a, b), figures, strict=True)):
        changed = change(both) / span
        gained, lost = (changed > 0.5).sum(), (changed < -0.5).sum()
    else:
        low, high = _bootstrap(both, change, level, resamples, seed)
        if high - low > NO_WIDTH * span:
            return low, high
        share = float(np.clip((figures[1] - figures[0]) / span, -1, 1))
        gained, lost = max(share, 0.0) * n, max(-share, 0.0) * n
    low, high = _paired_shares(gained, lost, n, level)
    return low * span, high * span


# ---- shares


def _all_or_nothing(stats: np.ndarray, finish: Finish, figure: float, ends) -> bool:
    """Whether each row is wholly right or wholly wrong, and the figure is their share."""
    alone = finish(stats)
    return bool(np.isin(alone, ends).all()) and bool(np.isclose(alone.mean(), figure, rtol=0, atol=1e-9))


def _wilson(share: float, n: int, level: float) -> tuple[float, float]:
    """Wilson's score interval of a share of n rows."""
    from scipy.stats import norm

    z = norm.ppf((1 + level) / 2)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return float(max(0.0, middle - half)), float(min(1.0, middle + half))


def _paired_shares(gained: float, lost: float, n: int, level: float) -> tuple[float, float]:
    """Bonett and Price's interval of a difference of shares: that of n rows `gained` went from wrong to right."""
    from scipy.stats import norm

    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = norm.ppf((1 + level) / 2) * np.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return float(max(-1.0, up - down - half)), float(min(1.0, up - down + half))


# ---- resampling


def _checked(stats) -> np.ndarray:
    stats = np.asarray(stats, np.float64)
    if stats.ndim != 2 or not len(stats):
        raise ValueError(f"numbers of at least one row are needed, [n, k]: shape {stats.shape}")
    if not np.isfinite(stats).all():
        raise ValueError("the numbers of rows must be finite")
    return stats + 0.0  # one kind of zero


def _groups(stats: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The different rows, and how often each occurs; None where they are so many that this saves nothing."""
    rows, counts = np.unique(stats, axis=0, return_counts=True)
    return (rows, counts) if len(rows) <= max(FEW, len(stats) // 8) else None


def _blocks(resamples: int, rows: int) -> Iterator[int]:
    """Sizes of blocks of resamples that fit into memory."""
    at_once = max(1, AT_ONCE // rows)
    yield from (min(at_once, resamples - start) for start in range(0, resamples, at_once))


def _resampled(stats: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Sums [resamples, k] of n rows drawn with replacement."""
    random, n = np.random.default_rng(seed), len(stats)
    if groups := _groups(stats):
        rows, counts = groups
        drawn = (random.multinomial(n, counts / n, size=some) for some in _blocks(resamples, len(rows)))
        return np.concatenate([times @ rows for times in drawn])
    times = (np.bincount(random.integers(n, size=n), minlength=n) for _ in range(resamples))
    return np.array([one @ stats for one in times])


def _bootstrap(stats: np.ndarray, finish: Finish, level: float, resamples: int, seed: int) -> tuple[float, float]:
    """The BCa interval of a figure, its tails those of Student's t and wider for few rows."""
    from scipy.stats import norm, t

    n, total = len(stats), stats.sum(0)
    figure = float(finish(total))
    if n == 1:
        return figure, figure
    drawn = finish(_resampled(stats, resamples, seed))
    below = ((drawn < figure).mean() + (drawn <= figure).mean()) / 2
    bias = norm.ppf(np.clip(below, 1 / (resamples + 1), resamples / (resamples + 1)))
    rows, counts = _groups(stats) or (stats, np.ones(n))
    without = finish(total - rows)  # the figure without one row
    apart = (counts * without).sum() / n - without
    spread = (counts * apart**2).sum()
    skew = (counts * apart**3).sum() / (6 * spread**1.5) if spread > 0 else 0.0
    tails = []
    for side in (-1, 1):
        z = bias - side * np.sqrt(n / (n - 1)) * t.ppf((1 - level) / 2, n - 1)
        bent = 1 - skew * z
        tails.append(norm.cdf(bias + z / bent) if bent > 0 else float(z > 0))
    low, high = np.quantile(drawn, tails)
    return float(low), float(high)


def _p_of_exchange(a, b, finish: Finish, difference: float, resamples: int, seed: int) -> float:
    """The share of the ways to exchange rows between `a` and `b` after which they differ as much or more."""
    unlike = np.hstack([a, b])[(a != b).any(1)]
    if not len(unlike):
        return 1.0
    groups = _groups(unlike)
    rows, counts = groups or (unlike, None)
    moved = rows[:, a.shape[1] :] - rows[:, : a.shape[1]]
    first, second = a.sum(0), b.sum(0)
    enough = abs(difference) * (1 - 1e-9) - 1e-12  # sums in another order differ in their last digits

    def as_large(exchanged: np.ndarray) -> np.ndarray:
        shift = exchanged @ moved
        return np.abs(finish(second - shift) - finish(first + shift)) >= enough

    if groups and np.log(counts + 1.0).sum() <= np.log(EXACT):
        ways, chances = _all_ways(counts)
        return float(min(1.0, chances[as_large(ways)].sum()))
    random, found = np.random.default_rng(seed), 0
    for some in _blocks(resamples, len(rows)):
        size = some, len(rows)
        drawn = random.binomial(counts, 0.5, size) if groups else random.integers(2, size=size, dtype=np.int8)
        found += int(as_large(drawn.astype(np.float64)).sum())
    return (found + 1) / (resamples + 1)


def _all_ways(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many rows of each group may be exchanged [ways, groups], and the chance of each."""
    from scipy.stats import binom

    grids = np.meshgrid(*(np.arange(count + 1) for count in counts), indexing="ij")
    ways = np.stack([grid.ravel() for grid in grids], axis=1)
    return ways, np.prod([binom.pmf(ways[:, g], count, 0.5) for g, count in enumerate(counts)], axis=0)
