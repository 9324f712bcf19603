"""Scaling laws: the loss as a function of parameters and tokens, and what each model needs of another one's compute.

The law of Hoffmann et al. (2022), L = E + A / N^alpha + B / D^beta, has the same constants for all models. A model has
one factor r on compute: it reaches with N parameters and D tokens the loss that the baseline reaches with N / sqrt(r)
and D / sqrt(r). Reasons and simulations: docs/decisions/41-one-law-and-a-factor.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, variance

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.scoring.significance import quantile, two_sided

HUBER = 0.01  # residual of log L above which it counts linearly
EXPONENTS = np.arange(0.1, 1.01, 0.1)  # of the grid on which the fit begins
BOUNDS = 0.01, 2.0  # of the exponents
SIZES, LENGTHS = 3, 2  # fewest numbers of parameters and of tokens of each model
ALIKE = 1.02  # ratio of tokens below which results have the same length
UNSEEN = 1e-3  # fraction of a loss below which a term of the law is not seen in it
LARGEST_LOG = 100.0  # of a factor: losses that hardly depend on size and tokens do not determine it
TINY = 1e-300  # of a term, whose logarithm is taken
POWER = 0.8  # with which the smallest visible difference is found
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LadderPoint:
    """The loss of a model with `parameters`, without embeddings, after `tokens`."""

    model: str
    parameters: float
    tokens: float
    loss: float

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
        exponents = {"size": self.alpha, "number of tokens": self.beta}
        return [name for name, value in exponents.items() if not BOUNDS[0] * 1.01 < value < BOUNDS[1] / 1.01]

    def log_factor(self, model: int, compute: float) -> float:
        """Return the logarithm of the factor of a model at a compute, at most LARGEST_LOG from 0."""
        log = self.log_factors[model] + self.trends[model] * math.log(compute / self.centre)
        return max(-LARGEST_LOG, min(LARGEST_LOG, log))

    def loss(self, parameters: float, tokens: float, model: int = 0) -> float:
        """Return the loss of a model, by its index."""
        log, split = self.log_factor(model, 6 * parameters * tokens), self.splits[model]
        of_size: float = self.parameter_coefficient * (parameters / math.exp((log + split) / 2)) ** -self.alpha
        of_tokens: float = self.token_coefficient * (tokens / math.exp((log - split) / 2)) ** -self.beta
        return self.irreducible + of_size + of_tokens

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

    @property
    def unseen(self) -> list[str]:
        """Return which of size and number of tokens has less than a fraction UNSEEN of each loss."""
        law = self.law
        terms = {
            "size": [law.parameter_coefficient * one.parameters**-law.alpha / one.loss for one in self.points],
            "number of tokens": [law.token_coefficient * one.tokens**-law.beta / one.loss for one in self.points],
        }
        return [name for name, shares in terms.items() if max(shares) < UNSEEN]

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
        """Return the factor below 1 that this ladder would see, p < 0.05, with a probability of 80 %.

        None without an error of the factor.
        """
        estimate = self.factor(model)
        if not estimate.error:
            return None
        needed = quantile(estimate.freedom) + quantile(estimate.freedom, 2 * (1 - POWER))
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
    for name in law.at_bounds:
        rule = f"these runs do not determine how the loss depends on the {name}"
        raise ConfigError(Problem("scaling law", rule, help=f"add runs that differ more in their {name}"))
    return LadderFit(models, points, law, laws_without)


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

    start = _first_guess(size_N, token_N, loss_N, moved_2NF.shape[2]) if theta is None else theta
    low, high = np.full_like(start, -np.inf), np.full_like(start, np.inf)
    low[3:5], high[3:5] = BOUNDS
    options = {"loss": "huber", "f_scale": HUBER, "x_scale": "jac", "max_nfev": 1000}
    found: Floats = least_squares(residuals, start, slopes, bounds=(low, high), **options).x
    return found


def _first_guess(size_N: Floats, token_N: Floats, loss_N: Floats, coefficients: int) -> Floats:
    """Return the best relative fit over a grid of exponents; given these, E, A and B are linear."""
    best, guess = math.inf, np.zeros(0)
    for alpha, beta in product(EXPONENTS, EXPONENTS):
        columns_N3 = np.exp(np.stack([0 * size_N, -alpha * size_N, -beta * token_N], 1) - loss_N[:, None])
        constants, distance = nnls(columns_N3, np.ones_like(loss_N))
        if distance < best:
            logs = np.log(np.maximum(constants, 1e-3 * constants.max()))
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
            raise ConfigError(Problem(point.model, rule, help="leave out the run with this loss"))
    for model in models:
        own = [point for point in points if point.model == model]
        sizes = {round(math.log(point.parameters), 2) for point in own}
        lengths = {round(math.log(point.tokens), 1) for point in own}
        if len(sizes) < SIZES:
            rule = f"a scaling law needs at least {SIZES} sizes of each model, but this one has {len(sizes)}"
            raise ConfigError(Problem(model, rule, help="train it at more sizes, each about twice as large"))
        if len(lengths) < LENGTHS:
            rule = f"a scaling law needs at least {LENGTHS} numbers of tokens, but this model has {len(lengths)}"
            help = "train it for other numbers of steps too, or branch off cooldowns with cooldown=RUN@STEP"
            raise ConfigError(Problem(model, rule, help=help))
    if (count := len(rungs(points))) <= constants:
        rule = f"{count} sizes and lengths do not determine the {constants} constants of the law"
        raise ConfigError(Problem("scaling law", rule, help="train more sizes, or for more numbers of steps"))


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
    """Return for each model the mean relative error of its losses at the largest size, predicted by `smaller`."""
    errors: dict[str, list[float]] = {model: [] for model in smaller.models}
    for point in of_the_largest_size(points):
        predicted = smaller.law.loss(point.parameters, point.tokens, smaller.models.index(point.model))
        errors[point.model].append(predicted / point.loss - 1)
    return {model: fmean(values) for model, values in errors.items()}
