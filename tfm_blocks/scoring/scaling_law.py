"""Scaling laws: the loss as a function of parameters and tokens, and what each model needs of another one's compute.

The law of Hoffmann et al. (2022), L = E + A / N^alpha + B / D^beta, has the same constants for all models. A model has
one factor r on compute: it reaches with N parameters and D tokens the loss that the baseline reaches with N / sqrt(r)
and D / sqrt(r). Reasons and simulations: docs/decisions/41-one-law-and-a-factor.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, variance

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

from tfm_blocks.errors import config_error
from tfm_blocks.scoring.significance import quantile, two_sided

HUBER = 0.01  # residual of log L above which it counts linearly
EXPONENTS = np.arange(0.1, 1.01, 0.1)  # of the grid on which the fit begins
BOUNDS = 0.01, 2.0  # of the exponents
SIZES, LENGTHS = 3, 2  # fewest numbers of parameters of each model, and of tokens of one of its sizes
ALIKE = 1.02  # ratio of tokens below which results have the same length
TERMS = "size", "number of tokens", "irreducible loss"  # of the law
UNSEEN = 1e-3  # fraction of a loss below which a term of the law is not seen in it
LEAST_TERM = 1e-3  # of the largest term at the start of a fit: a term of 0 has no slope, so it would stay 0
LARGEST_LOG = 100.0  # of a factor: losses that hardly depend on size and tokens do not determine it
TINY = 1e-300  # of a term, whose logarithm is taken
POWER = 0.8  # with which the smallest visible difference is found
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LadderPoint:
    """The loss of a model with `parameters`, without embeddings, after `tokens`.

    The law does not read `with_embeddings`, the number of all parameters; None if it is not known.
    """

    model: str
    parameters: float
    tokens: float
    loss: float
    with_embeddings: float | None = None

    @property
    def compute(self) -> float:
        """Return the operations of the training, 6 N D (Kaplan et al. 2020)."""
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class ScalingLaw:
    """The constants of a law, and for each model the logarithm of its factor on compute.

    With `trends` the factor changes with compute: its logarithm is `log_factors` plus `trends` times log(C / `centre`).
    With `splits` the factors on parameters and on tokens differ: each is the root of the factor on compute, times or
    divided by the exponential of half the split.
    """

    irreducible: float
    parameter_coefficient: float
    token_coefficient: float
    alpha: float
    beta: float
    log_factors: Sequence[float]
    trends: Sequence[float]
    splits: Sequence[float]
    centre: float

    @property
    def at_bounds(self) -> list[str]:
        """Return what the losses hardly depend on, or depend on more than a law can say: sizes, tokens or both."""
        low, high = BOUNDS[0] * 1.01, BOUNDS[1] / 1.01
        return [name for name, value in zip(TERMS[:2], (self.alpha, self.beta), strict=True) if not low < value < high]

    def log_factor(self, model: int, compute: float) -> float:
        """Return the logarithm of the factor of a model at a compute, at most LARGEST_LOG from 0."""
        log = self.log_factors[model] + self.trends[model] * math.log(compute / self.centre)
        return max(-LARGEST_LOG, min(LARGEST_LOG, log))

    def terms(self, parameters: float, tokens: float, model: int) -> Sequence[float]:
        """Return the terms of TERMS in the loss of a model, by its index."""
        log, split = self.log_factor(model, 6 * parameters * tokens), self.splits[model]
        parameters, tokens = parameters / math.exp((log + split) / 2), tokens / math.exp((log - split) / 2)
        of_size, of_tokens = self.parameter_coefficient, self.token_coefficient
        return of_size * parameters**-self.alpha, of_tokens * tokens**-self.beta, self.irreducible

    def loss(self, parameters: float, tokens: float, model: int = 0) -> float:
        """Return the loss of a model, by its index."""
        return sum(self.terms(parameters, tokens, model))

    def lowest_loss(self, compute: float, model: int) -> float:
        """Return the loss at a compute with the best number of parameters (Hoffmann et al. 2022, eq. 4)."""
        compute /= math.exp(self.log_factor(model, compute))  # the baseline's compute for the same loss
        both = self.alpha + self.beta
        of_size, of_tokens = self.alpha * self.parameter_coefficient, self.beta * self.token_coefficient
        ratio, most = math.log(max(of_size, TINY)) - math.log(max(of_tokens, TINY)), math.log(compute / 6)
        parameters = math.exp(min(most, max(0.0, (ratio + self.beta * most) / both)))  # from 1, for at least one token
        return self.loss(parameters, compute / 6 / parameters)


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error over sizes of models, and Student's degrees of freedom."""

    value: float
    error: float
    freedom: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval; None without an error."""
        if not self.error:
            return None
        half = quantile(self.freedom) * self.error
        return self.value - half, self.value + half

    @property
    def p(self) -> float:
        """Return the two-sided p-value of the hypothesis that the value is 0.

        It is 1 without an error: estimates that are all equal, such as factors at LARGEST_LOG, show nothing about it.
        """
        return two_sided(self.value / self.error, self.freedom) if self.error else 1.0


@dataclass(frozen=True)
class LadderFit:
    """A law, and the laws without each size of each model, from which intervals follow by the jackknife.

    All seeds and lengths of a size share its deviation from the law, and branches of a run a part of its training, so
    single runs are not independent.
    """

    models: Sequence[str]
    points: Sequence[LadderPoint]
    law: ScalingLaw
    laws_without: Sequence[ScalingLaw]

    def estimate(self, statistic: Callable[[ScalingLaw], float]) -> Estimate:
        """Return a function of the law with its error over sizes of models (Efron and Stein 1981)."""
        values = [statistic(law) for law in self.laws_without]
        sizes = len(values)
        return Estimate(statistic(self.law), math.sqrt((sizes - 1) ** 2 / sizes * variance(values)), sizes - 1)

    def unseen(self, model: int | None = None) -> list[str]:
        """Return which of TERMS has less than a fraction UNSEEN of each loss of a model, by its index, or of all."""
        points = [one for one in self.points if model is None or one.model == self.models[model]]
        terms_N3 = [self.law.terms(one.parameters, one.tokens, self.models.index(one.model)) for one in points]
        shares_3 = (np.array(terms_N3) / [[one.loss] for one in points]).max(0)
        return [name for name, share in zip(TERMS, shares_3, strict=True) if share < UNSEEN]

    def factor(self, model: int, compute: float | None = None) -> Estimate:
        """Return the logarithm of the factor of a model on the compute of the baseline, the model of index 0."""
        return self.estimate(lambda law: law.log_factor(model, compute or law.centre))

    def trend(self, model: int) -> Estimate:
        """Return the change of the logarithm of a factor with the logarithm of compute."""
        return self.estimate(lambda law: law.trends[model])

    def parameter_factor(self, model: int) -> Estimate:
        """Return the logarithm of the factor of a model on the parameters of the baseline."""
        return self.estimate(lambda law: (law.log_factors[model] + law.splits[model]) / 2)

    def token_factor(self, model: int) -> Estimate:
        """Return the logarithm of the factor of a model on the tokens of the baseline."""
        return self.estimate(lambda law: (law.log_factors[model] - law.splits[model]) / 2)

    def smallest_visible(self, model: int) -> float | None:
        """Return the factor below 1 that has p < 0.05, corrected for all models, in 80 % of ladders, or None."""
        estimate = self.factor(model)
        if not estimate.error:
            return None
        needed = quantile(estimate.freedom, 0.05 / (len(self.models) - 1)) + quantile(estimate.freedom, 2 * (1 - POWER))
        return math.exp(-needed * estimate.error)


def fit_ladder(
    points: Sequence[LadderPoint], models: Sequence[str], *, trend: bool = False, split: bool = False
) -> LadderFit:
    """Fit one law to the points of all models. The first of `models` is the baseline.

    The sum of Huber's losses of the residuals of log L is minimised, from the best non-negative linear fit of E, A and
    B over a grid of exponents. With `trend` the factor of each model may change with compute, and with `split` it has
    one factor on parameters and one on tokens. Raises ConfigError if the points do not determine the law.
    """
    _expect_determined(points, models, constants=5 + (1 + trend + split) * (len(models) - 1))
    size_N, token_N, loss_N = np.log([(point.parameters, point.tokens, point.loss) for point in points]).T
    centre = float(size_N.mean()), float(token_N.mean())
    size_N, token_N = size_N - centre[0], token_N - centre[1]
    is_model_NM = np.array([[point.model == model for model in models[1:]] for point in points], float)
    trends_NM = is_model_NM * (size_N + token_N)[:, None]
    # the halves of log N and of log D that a coefficient moves: a factor on compute, its trend, and its split
    moved_2NF = np.stack(
        [np.hstack([is_model_NM, *[trends_NM] * trend, *[sign * is_model_NM] * split]) / 2 for sign in (1, -1)]
    )
    sizes = list(dict.fromkeys((point.model, point.parameters) for point in points))
    size_index_N = np.array([sizes.index((point.model, point.parameters)) for point in points])

    def fit(kept_N: npt.NDArray[np.bool_], theta: Floats | None = None) -> Floats:
        return _minimise(size_N[kept_N], token_N[kept_N], loss_N[kept_N], moved_2NF[:, kept_N], theta)

    whole = fit(np.ones(len(points), bool))
    without = [fit(size_index_N != index, whole) for index in range(len(sizes))]
    law, *laws_without = (_law(theta, centre, len(models) - 1, trend, split) for theta in (whole, *without))
    ladder = LadderFit(models, points, law, laws_without)
    for name in law.at_bounds:
        if name not in ladder.unseen():  # the exponent of a term that is almost 0 can have any value
            rule = f"these runs do not determine how the loss depends on the {name}"
            raise config_error("scaling law", rule, f"add runs that differ more in their {name}")
    return ladder


def _minimise(size_N: Floats, token_N: Floats, loss_N: Floats, moved_2NF: Floats, theta: Floats | None) -> Floats:
    """Return log E, log A, log B, alpha, beta, and the coefficients that move log N and log D."""

    def terms(theta: Floats) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Return log L, the shares of the terms of A and B in L, and log N and log D of the baseline."""
        irreducible, of_size, of_tokens, alpha, beta, *coefficients = theta
        base_size_N, base_token_N = np.stack([size_N, token_N]) - moved_2NF @ np.array(coefficients)
        size_term_N = of_size - alpha * base_size_N
        token_term_N = of_tokens - beta * base_token_N
        total_N = np.logaddexp(irreducible, np.logaddexp(size_term_N, token_term_N))
        return total_N, np.exp(size_term_N - total_N), np.exp(token_term_N - total_N), base_size_N, base_token_N

    def residuals(theta: Floats) -> Floats:
        return terms(theta)[0] - loss_N

    def slopes(theta: Floats) -> Floats:
        _, sized_N, read_N, base_size_N, base_token_N = terms(theta)
        constants = [1 - sized_N - read_N, sized_N, read_N, -sized_N * base_size_N, -read_N * base_token_N]
        pulls_2N1 = np.stack([theta[3] * sized_N, theta[4] * read_N])[:, :, None]
        return np.column_stack([*constants, (moved_2NF * pulls_2N1).sum(0)])

    start = (_first_guess(size_N, token_N, loss_N, moved_2NF.shape[2]) if theta is None else theta).copy()
    start[:3] = np.maximum(start[:3], start[:3].max() + math.log(LEAST_TERM))
    low, high = np.full_like(start, -np.inf), np.full_like(start, np.inf)
    low[3:5], high[3:5] = BOUNDS
    options = {"loss": _huber, "f_scale": HUBER, "x_scale": "jac", "max_nfev": 1000}
    found: Floats = least_squares(residuals, start, slopes, bounds=(low, high), **options).x
    return found


def _huber(square_N: Floats) -> Floats:
    """Return Huber's loss of squared residuals in units of the threshold, its slope, and 0 in place of its curvature.

    With the curvature, `least_squares` gives residuals above the threshold no weight in its steps, and it stops far
    from the minimum if a factor is far from 1. Without it, its steps are those of reweighted least squares.
    """
    root_N = np.sqrt(np.maximum(square_N, 1))
    return np.stack([np.minimum(square_N, 2 * root_N - 1), 1 / root_N, np.zeros_like(square_N)])


def _first_guess(size_N: Floats, token_N: Floats, loss_N: Floats, coefficients: int) -> Floats:
    """Return the best relative fit over a grid of exponents; given these, E, A and B are linear."""
    best, guess = math.inf, np.zeros(0)
    for alpha, beta in product(EXPONENTS, EXPONENTS):
        columns_N3 = np.exp(np.stack([0 * size_N, -alpha * size_N, -beta * token_N], 1) - loss_N[:, None])
        constants, distance = nnls(columns_N3, np.ones_like(loss_N))
        if distance < best:
            logs = np.log(np.maximum(constants, TINY))
            best, guess = distance, np.array([*logs, alpha, beta, *np.zeros(coefficients)])
    return guess


def _law(theta: Floats, centre: tuple[float, float], others: int, trend: bool, split: bool) -> ScalingLaw:
    """Return the law of a solution for the baseline and a number of other models."""
    irreducible, of_size, of_tokens, alpha, beta, *coefficients = map(float, theta)
    parts = iter(coefficients)
    factors, trends, splits = (
        (0.0, *(next(parts) if fitted else 0.0 for _ in range(others))) for fitted in (True, trend, split)
    )
    return ScalingLaw(
        irreducible=math.exp(irreducible),
        parameter_coefficient=math.exp(of_size + alpha * centre[0]),
        token_coefficient=math.exp(of_tokens + beta * centre[1]),
        alpha=alpha,
        beta=beta,
        log_factors=factors,
        trends=trends,
        splits=splits,
        centre=6 * math.exp(sum(centre)),
    )


def _expect_determined(points: Sequence[LadderPoint], models: Sequence[str], constants: int) -> None:
    for point in points:
        if not 0 < point.loss < math.inf:
            rule = f"has a loss of {point.loss}, but a law needs losses above 0"
            raise config_error(point.model, rule, "leave out the run with this loss")
    for model in models:
        own = [point for point in points if point.model == model]
        sizes = Counter(round(math.log(rung[0].parameters), 2) for rung in rungs(own))  # with their numbers of lengths
        if len(sizes) < SIZES:
            rule = f"a scaling law needs at least {SIZES} sizes of each model, but this one has {len(sizes)}"
            raise config_error(model, rule, "train it at more sizes, each about twice as large")
        if max(sizes.values()) < LENGTHS:
            rule = f"a scaling law needs at least {LENGTHS} numbers of tokens at a size, but each of this model has 1"
            help = "train it for other numbers of steps too, or branch off cooldowns with cooldown=RUN@STEP"
            raise config_error(model, rule, help)
    if (count := len(rungs(points))) <= constants:
        rule = f"{count} sizes and lengths do not determine the {constants} constants of the law"
        raise config_error("scaling law", rule, "train more sizes, or for more numbers of steps")


def rungs(points: Iterable[LadderPoint]) -> list[list[LadderPoint]]:
    """Return the points of each model, size and length; lengths that differ by less than 2 % are the same."""
    found: list[list[LadderPoint]] = []
    for point in sorted(points, key=lambda point: (point.model, point.parameters, point.tokens)):
        first = found[-1][0] if found else None
        same = first and (first.model, first.parameters) == (point.model, point.parameters)
        if first and same and point.tokens < ALIKE * first.tokens:
            found[-1].append(point)
        else:
            found.append([point])
    return found


def seed_deviation(points: Iterable[LadderPoint]) -> float | None:
    """Return the standard deviation of log L over the runs of a rung, pooled; None if no rung has several runs."""
    losses = [[math.log(point.loss) for point in rung] for rung in rungs(points) if len(rung) > 1]
    freedom = sum(len(rung) - 1 for rung in losses)
    return math.sqrt(sum(variance(rung) * (len(rung) - 1) for rung in losses) / freedom) if freedom else None


def fit_smaller(points: Sequence[LadderPoint], models: Sequence[str]) -> LadderFit:
    """Fit the law to the points without the largest size of each model. Raises ConfigError as `fit_ladder`."""
    largest = {id(point) for point in of_the_largest_size(points)}
    return fit_ladder([point for point in points if id(point) not in largest], models)


def of_the_largest_size(points: Sequence[LadderPoint]) -> list[LadderPoint]:
    """Return the points of the largest size of each model."""
    largest: dict[str, float] = {}
    for point in points:
        largest[point.model] = max(point.parameters, largest.get(point.model, 0))
    return [point for point in points if point.parameters == largest[point.model]]


def held_out_errors(smaller: LadderFit, points: Sequence[LadderPoint]) -> dict[str, float]:
    """Return for each model the root mean square of the relative errors of `smaller` at lengths of its largest size."""
    errors: dict[str, list[float]] = {model: [] for model in smaller.models}
    for rung in rungs(of_the_largest_size(points)):
        tokens, loss = fmean(point.tokens for point in rung), fmean(point.loss for point in rung)
        predicted = smaller.law.loss(rung[0].parameters, tokens, smaller.models.index(rung[0].model))
        errors[rung[0].model].append(predicted / loss - 1)
    return {model: math.sqrt(fmean(error**2 for error in own)) for model, own in errors.items()}
