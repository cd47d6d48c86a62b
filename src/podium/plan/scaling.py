"""How a table of times goes on at further counts of devices: several laws, fitted and weighed, with an interval.

    work(n) = n · seconds(n), constant where scaling is perfect. Its terms, none of them negative:

    term       weak scaling              strong scaling       what it stands for
    once       1                         1                    the passes themselves
    joined     1 if n > 1                n if n > 1           what begins with a second device
    log        log2 n                    n log2 n             rounds of a reduction, one for each doubling
    ring       1 - 1/n                   n - 1                bytes of a reduction limited by bandwidth
    slowest    sqrt(2 ln n)              n sqrt(2 ln n)       waiting for the slowest of n
    power      n^p                       n^(1 + p)            congestion
    fixed      n                         n                    what every epoch costs however many devices share it

Which terms a machine has cannot be read from a few rows, so every law of `LAWS` is fitted. Laws are weighed by how well
they would have predicted the last rows from the ones before; each is fitted again to resampled rows; and what laws of
this kind miss for every doubling, as the same hindcasts show, is added to the spread. Pure; numpy only.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from podium.plan.intervals import COVERAGE, Interval
from podium.plan.tables import Kind, Scaling, ScalingTable

Floats = NDArray[np.float64]

_POWERS = (0.25, 0.5, 0.75)
_RATE_LAWS: tuple[tuple[str, ...], ...] = (
    ("once", "fixed"),
    ("once", "log"),
    ("once", "log", "fixed"),
    ("once", "ring", "fixed"),
    ("once", "slowest", "fixed"),
    ("once", "joined", "fixed"),
    ("once", "joined", "log", "fixed"),
    *((("once", f"power {power}")) for power in _POWERS),
    *((("once", "joined", f"power {power}")) for power in _POWERS),
)
#: An epoch that somebody has timed has a beginning, an end and mostly a validation, which more devices do not shorten:
#: every law of seconds per epoch has this part. A rate is of updates alone.
LAWS: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "rate": _RATE_LAWS,
    "seconds": tuple(dict.fromkeys(law if "fixed" in law else (*law, "fixed") for law in _RATE_LAWS)),
}
#: spread of one measurement, and of a law at every doubling beyond the table, at least
_MIN_NOISE, _MIN_DRIFT = 0.02, 0.04
#: rows that a hindcast needs to fit
_MIN_ROWS = 3
_DRAWS = 4000
_BOOTSTRAPS = 60


def predict(table: ScalingTable, counts: Sequence[int], scaling: Scaling = "weak", seed: int = 0) -> list[Interval]:
    """Return seconds per epoch at each of `counts`."""
    n, work = np.array(table.devices, float), np.array(table.devices, float) * np.array(table.seconds)
    rng = np.random.default_rng(seed)
    misses = {law: _hindcasts(law, n, work, scaling) for law in LAWS[table.kind]}
    weights = _weights(misses, n, work, scaling)
    drift = _drift(misses, weights)
    laws = [law for law, weight in weights.items() if weight > 1e-3]
    share = np.array([weights[law] for law in laws]) / sum(weights[law] for law in laws)
    at = np.array(counts, float)
    predicted = [_bootstrapped(law, n, work, at, scaling, rng) for law in laws]  # (bootstraps, counts) each
    chosen = rng.choice(len(laws), size=_DRAWS, p=share)
    row = rng.integers(_BOOTSTRAPS, size=_DRAWS)
    draws = np.array([predicted[law][which] for law, which in zip(chosen, row, strict=True)])
    doublings = np.maximum(0.0, np.log2(at / n.max()))
    # Laws are wrong together, not each on its own, and the further from the table the more.
    shift = rng.standard_normal(_DRAWS)[:, None] * drift * np.sqrt(doublings)[None, :] * _spread_of(doublings)
    noise = rng.standard_normal(draws.shape) * _MIN_NOISE
    logs = np.log(draws) + shift + noise
    centre = np.exp(np.median(np.log(draws), axis=0))
    low, high = np.exp(np.quantile(logs, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], axis=0))
    return [
        Interval(float(c / m), float(min(lo, c) / m), float(max(hi, c) / m))
        for c, lo, hi, m in zip(centre, low, high, at, strict=True)
    ]


def _spread_of(doublings: Floats) -> Floats:
    """Return how errors grow beyond the root of the doublings: a wrong slope keeps being wrong."""
    return np.sqrt(np.maximum(1.0, doublings))[None, :]


def _terms(law: Sequence[str], n: Floats, scaling: Scaling) -> Floats:
    return np.stack([_term(name, n) * (n if _grows(name, scaling) else 1.0) for name in law], axis=1)


def _grows(name: str, scaling: Scaling) -> bool:
    """Return whether a term is multiplied by n in strong scaling, where updates get shorter but no fewer."""
    return scaling == "strong" and name not in ("once", "fixed")


def _term(name: str, n: Floats) -> Floats:
    if name.startswith("power"):
        return np.asarray(n ** float(name.split()[1]))
    terms: dict[str, Callable[[], Floats]] = {
        "once": lambda: np.ones_like(n),
        "joined": lambda: (n > 1).astype(float),
        "log": lambda: np.log2(n),
        "ring": lambda: 1 - 1 / n,
        "slowest": lambda: np.sqrt(2 * np.log(n)),
        "fixed": lambda: n.copy(),
    }
    return terms[name]()


def _fit(law: Sequence[str], n: Floats, work: Floats, scaling: Scaling) -> Floats:
    """Return the coefficients, none below 0, with the least squared relative errors.

    Every subset of at most four terms is tried, which is quicker than an iteration and cannot fail to end.
    """
    terms = _terms(law, n, scaling) / work[:, None]
    best, best_error = np.zeros(len(law)), math.inf
    for size in range(1, len(law) + 1):
        for subset in itertools.combinations(range(len(law)), size):
            found, *_ = np.linalg.lstsq(terms[:, subset], np.ones(len(n)), rcond=None)
            if (found >= 0).all():
                error = float(((terms[:, subset] @ found - 1) ** 2).sum())
                if error < best_error - 1e-15:
                    best, best_error = np.zeros(len(law)), error
                    best[list(subset)] = found
    return best


def _value(law: Sequence[str], coefficients: Floats, n: Floats, scaling: Scaling) -> Floats:
    return np.maximum(_terms(law, n, scaling) @ coefficients, 1e-300)


def _hindcasts(law: Sequence[str], n: Floats, work: Floats, scaling: Scaling) -> list[tuple[float, float]]:
    """Return (doublings beyond the rows fitted to, logarithm of measured / predicted) of rows left out at the end."""
    found = []
    for known in range(max(_MIN_ROWS, len(law)), len(n)):
        coefficients = _fit(law, n[:known], work[:known], scaling)
        ahead = np.log(work[known:] / _value(law, coefficients, n[known:], scaling))
        found += [(float(np.log2(m / n[known - 1])), float(miss)) for m, miss in zip(n[known:], ahead, strict=True)]
    return found


def _weights(
    misses: dict[tuple[str, ...], list[tuple[float, float]]], n: Floats, work: Floats, scaling: Scaling
) -> dict[tuple[str, ...], float]:
    """Weigh laws by their hindcasts, and by how closely they follow the rows; equally where neither tells."""
    scores = {}
    for law in misses:
        if len(law) >= len(n):  # it would go through every row and say nothing
            continue
        coefficients = _fit(law, n, work, scaling)
        within = np.log(work / _value(law, coefficients, n, scaling))
        # The same spread for all laws: what a row scatters by, and what a law drifts by.
        score = float(np.sum((within / (2 * _MIN_NOISE)) ** 2)) + 2 * len(law)
        score += sum((miss / (2 * _MIN_DRIFT)) ** 2 / max(1.0, d) ** 2 for d, miss in misses[law])
        scores[law] = score
    least = min(scores.values())
    return {law: math.exp(-min(700.0, (scores[law] - least) / 2)) if law in scores else 0.0 for law in misses}


def _drift(misses: dict[tuple[str, ...], list[tuple[float, float]]], weights: dict[tuple[str, ...], float]) -> float:
    """Return how far the laws in use went astray for each doubling when they were tried on rows left out.

    Few hindcasts show little: a prior of a tenth per doubling counts as two of them.
    """
    total, count = 2 * 0.1**2, 2.0
    for law, found in misses.items():
        for doublings, miss in found:
            total += weights[law] * (miss / max(1.0, doublings)) ** 2
            count += weights[law]
    return max(_MIN_DRIFT, math.sqrt(total / count))


def _bootstrapped(
    law: Sequence[str], n: Floats, work: Floats, at: Floats, scaling: Scaling, rng: np.random.Generator
) -> Floats:
    """Return predictions at `at` of fits to rows disturbed by what they scatter: (bootstraps, counts)."""
    fitted = _value(law, _fit(law, n, work, scaling), n, scaling)
    residuals = np.log(work / fitted)
    free = max(1, len(n) - len(law))
    scatter = max(_MIN_NOISE, math.sqrt(float((residuals**2).sum()) / free))
    rows = [work * np.exp(rng.standard_normal(len(n)) * scatter) for _ in range(_BOOTSTRAPS - 1)]
    return np.stack([_value(law, _fit(law, n, row, scaling), at, scaling) for row in (work, *rows)])
