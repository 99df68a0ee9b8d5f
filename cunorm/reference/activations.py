"""The activations in NumPy: each one's value and derivative, in the dtype of their argument.

With Phi and phi the distribution and density of the standard normal, and s(t) = 1 / (1 + exp(-t))::

    relu       max(z, 0), whose derivative is taken as 0 at 0, and as 1 at NaN
    silu       z * s(z)                                 (Elfwing, Uchibe, Doya 2017, arXiv:1702.03118)
    gelu       z * Phi(z)                               (Hendrycks, Gimpel 2016, arXiv:1606.08415)
    gelu_tanh  z * (1 + tanh(u)) / 2 = z * s(2u), u = sqrt(2 / pi) * (z + 0.044715 z^3)      (the same paper)

They are what PyTorch's functions of these names compute (``F.gelu(z, approximate="tanh")`` for gelu_tanh). Where z is
large and negative the results are products of small numbers, never differences of large ones. The gelus and their
derivatives have their limits at infinity, 0 where PyTorch's are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FUNCTIONS", "Activation"]

Array = NDArray[Any]

_CUBIC = 0.044715
_TANH_SCALE = math.sqrt(2 / math.pi)

# Where the distribution functions of the gelus, and their densities, are 0 or 1 in any dtype.
_FAR = 40


class Activation(NamedTuple):
    """A function of arrays and its derivative. Neither changes its argument."""

    value: Callable[[Array], Array]
    derivative: Callable[[Array], Array]

    def turn_into_gradient(self, dy: Array, z: Array) -> None:
        """Make dy, in place, the gradient of z. Where relu is flat that is 0, also of a dy that is infinite or NaN."""
        if self.derivative is _relu_derivative:
            dy[z <= 0] = 0
        else:
            dy *= self.derivative(z)


def _relu(z: Array) -> Array:
    return np.asarray(np.maximum(z, 0))


def _relu_derivative(z: Array) -> Array:
    return np.asarray(~(z <= 0)).astype(z.dtype)


def _sigmoid(t: Array) -> Array:
    # The exponential of a number that is not positive, which cannot overflow.
    e = np.exp(-np.abs(t))
    return np.asarray(np.where(t < 0, e, 1) / (1 + e))


def _silu(z: Array) -> Array:
    return np.asarray(z * _sigmoid(z))


def _silu_derivative(z: Array) -> Array:
    s = _sigmoid(z)
    return np.asarray(s + z * (s * _sigmoid(-z)))


def _gelu(z: Array) -> Array:
    return np.asarray(np.maximum(z, -_FAR) * _normal_distribution(z).astype(z.dtype, copy=False))


def _gelu_derivative(z: Array) -> Array:
    # In float64: the exponent of a number that is far out is large, and its rounding would show.
    wide = np.clip(z.astype(np.float64, copy=False), -_FAR, _FAR)
    density = np.exp(-0.5 * wide * wide) * (1 / math.sqrt(2 * math.pi))
    return np.asarray((_normal_distribution(wide) + wide * density).astype(z.dtype, copy=False))


def _gelu_tanh(z: Array) -> Array:
    return np.asarray(np.maximum(z, -_FAR) * _sigmoid(2 * _TANH_SCALE * z * (1 + _CUBIC * z * z)))


def _gelu_tanh_derivative(z: Array) -> Array:
    z = np.clip(z, -_FAR, _FAR)  # beyond, the factors of the second term may overflow
    t = 2 * _TANH_SCALE * (z + _CUBIC * z * z * z)
    s = _sigmoid(t)
    slope = 2 * _TANH_SCALE * (1 + 3 * _CUBIC * z * z)
    return np.asarray(s + z * (s * _sigmoid(-t)) * slope)


FUNCTIONS = {
    "relu": Activation(_relu, _relu_derivative),
    "silu": Activation(_silu, _silu_derivative),
    "gelu": Activation(_gelu, _gelu_derivative),
    "gelu_tanh": Activation(_gelu_tanh, _gelu_tanh_derivative),
}


# ---- The normal distribution, which NumPy lacks: that of the complementary error function.

# Where the approximations of erfc change.
_SMALL, _MIDDLE, _LARGE, _END = 0.84375, 1.25, 1 / 0.35, 28.0

# The rational approximations of fdlibm (s_erf.c, Sun Microsystems 1993; the C library of FreeBSD and others has them):
# numerator and denominator, the highest power last. erf(x) = x + x * P/Q(x^2) below _SMALL;
# erfc(x) = 1 - _ERF_ONE - P/Q(x - 1) below _MIDDLE; erfc(x) = exp(-x^2 - 0.5625 + P/Q(1 / x^2)) / x above.
_ERF_ONE = 8.45062911510467529297e-01
_BELOW_SMALL = (
    (
        1.28379167095512558561e-01, -3.25042107247001499370e-01, -2.84817495755985104766e-02,
        -5.77027029648944159157e-03, -2.37630166566501626084e-05,
    ),
    (
        1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02, 5.08130628187576562776e-03,
        1.32494738004321644526e-04, -3.96022827877536812320e-06,
    ),
)  # fmt: skip
_BELOW_MIDDLE = (
    (
        -2.36211856075265944077e-03, 4.14856118683748331666e-01, -3.72207876035701323847e-01,
        3.18346619901161753674e-01, -1.10894694282396677476e-01, 3.54783043256182359371e-02,
        -2.16637559486879084300e-03,
    ),
    (
        1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01, 7.18286544141962662868e-02,
        1.26171219808761642112e-01, 1.36370839120290507362e-02, 1.19844998467991074170e-02,
    ),
)  # fmt: skip
_BELOW_LARGE = (
    (
        -9.86494403484714822705e-03, -6.93858572707181764372e-01, -1.05586262253232909814e+01,
        -6.23753324503260060396e+01, -1.62396669462573470355e+02, -1.84605092906711035994e+02,
        -8.12874355063065934246e+01, -9.81432934416914548592e+00,
    ),
    (
        1.0, 1.96512716674392571292e+01, 1.37657754143519042600e+02, 4.34565877475229228821e+02,
        6.45387271733267880336e+02, 4.29008140027567833386e+02, 1.08635005541779435134e+02,
        6.57024977031928170135e+00, -6.04244152148580987438e-02,
    ),
)  # fmt: skip
_BELOW_END = (
    (
        -9.86494292470009928597e-03, -7.99283237680523006574e-01, -1.77579549177547519889e+01,
        -1.60636384855821916062e+02, -6.37566443368389627722e+02, -1.02509513161107724954e+03,
        -4.83519191608651397019e+02,
    ),
    (
        1.0, 3.03380607434824582924e+01, 3.25792512996573918826e+02, 1.53672958608443695994e+03,
        3.19985821950859553908e+03, 2.55305040643316442583e+03, 4.74528541206955367215e+02,
        -2.24409524465858183362e+01,
    ),
)  # fmt: skip


def _normal_distribution(z: Array) -> Array:
    """Phi(z), in float64, whatever the dtype of z."""
    z = z.astype(np.float64, copy=False)
    half = 0.5 * _erfc(np.abs(z) * math.sqrt(0.5))
    return np.where(z > 0, 1 - half, half)


def _erfc(x: Array) -> Array:
    """The complementary error function of float64 numbers that are not negative, to about 1e-15 of itself."""
    result = np.where(np.isnan(x), np.nan, 0.0)

    inside = x < _SMALL
    some = x[inside]
    result[inside] = 1 - (some + some * _ratio(_BELOW_SMALL, some * some))

    inside = (x >= _SMALL) & (x < _MIDDLE)
    result[inside] = 1 - _ERF_ONE - _ratio(_BELOW_MIDDLE, x[inside] - 1)

    for low, high, coefficients in ((_MIDDLE, _LARGE, _BELOW_LARGE), (_LARGE, _END, _BELOW_END)):
        inside = (x >= low) & (x < high)
        some = x[inside]
        # The square of a number that is short enough, so that nothing is rounded in front of the exponential.
        short = some.astype(np.float32).astype(np.float64)
        rest = (short - some) * (short + some) + _ratio(coefficients, 1 / (some * some))
        result[inside] = np.exp(-short * short - 0.5625) * np.exp(rest) / some
    return result


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], t: Array) -> Array:
    numerator, denominator = (_polynomial(given, t) for given in coefficients)
    return np.asarray(numerator / denominator)


def _polynomial(coefficients: tuple[float, ...], t: Array) -> Array:
    """By Horner's rule, the highest power last."""
    result = np.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result *= t
        result += coefficient
    return result
