"""Elementwise ops and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphaccel.ort.builder import MICROSOFT, Arguments, Builder, Declined, OnnxValue, Translations

aten = torch.ops.aten


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def as_value(b: Builder, x: Any, dtype: torch.dtype) -> OnnxValue:
    """A tensor or a Python number as a Value of that dtype."""
    return b.cast(x, dtype) if isinstance(x, OnnxValue) else b.constant(x, dtype)


def _shaped(b: Builder, node: fx.Node, x: OnnxValue) -> OnnxValue:
    """Reshape a tensor of another rank than the result (both operands scalars) to the result's
    shape."""
    return b.expand(x, tuple(node.meta["val"].shape))


def _unary(kind: str) -> Callable[..., OnnxValue]:
    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        return b.op(kind, b.cast(a["self"], _dtype(node)))

    return translate


def _binary(kind: str, logical: str | None = None) -> Callable[..., OnnxValue]:
    """Arithmetic in the dtype of the result; `logical`: the op for booleans."""

    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        dtype = _dtype(node)
        other = as_value(b, a["other"], dtype)
        alpha = a.get("alpha", 1)
        if alpha != 1:
            other = b.binary("Mul", other, b.scalar(alpha, other))
        if dtype == torch.bool:
            if logical is None:
                raise Declined("it has no meaning on booleans")
            return b.binary(logical, b.cast(a["self"], dtype), other)
        if kind in ("Add", "Sub") and not isinstance(a["other"], OnnxValue) and a["other"] == 0:
            return b.cast(a["self"], dtype)
        return b.binary(kind, as_value(b, a["self"], dtype), other)

    return translate


def _division(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    if a.get("rounding_mode") is not None:
        raise Declined("it rounds")
    dtype = _dtype(node)
    return b.binary("Div", as_value(b, a["self"], dtype), as_value(b, a["other"], dtype))


def _comparison(kind: str, negate: bool = False) -> Callable[..., OnnxValue]:
    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        x, y = a["self"], a["other"]
        if isinstance(y, OnnxValue):
            given = [torch.empty(v.shape, dtype=v.dtype, device="meta") for v in (x, y)]
            dtype = torch.result_type(*given)
        else:
            dtype = torch.result_type(torch.empty(x.shape, dtype=x.dtype, device="meta"), y)
        if dtype == torch.bool and kind != "Equal":
            dtype = torch.int64
        built = b.binary(kind, as_value(b, x, dtype), as_value(b, y, dtype), torch.bool)
        return b.op("Not", built) if negate else built

    return translate


def _logical(kind: str) -> Callable[..., OnnxValue]:
    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        if _dtype(node) != torch.bool:
            raise Declined("it works on bits")
        x, y = (as_value(b, a[k], torch.bool) for k in ("self", "other"))
        return b.binary(kind, x, y)

    return translate


def _not(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    if _dtype(node) != torch.bool:
        raise Declined("it works on bits")
    return b.op("Not", b.cast(a["self"], torch.bool))


def _power(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    dtype, exponent = _dtype(node), a["exponent"]
    x = as_value(b, a["self"], dtype)
    if isinstance(exponent, OnnxValue):
        return b.binary("Pow", x, b.cast(exponent, dtype))
    if exponent == 1:
        return x
    if exponent == 2:
        return b.binary("Mul", x, x)
    if exponent == 3:
        return b.binary("Mul", b.binary("Mul", x, x), x)
    if exponent == 0.5:
        return b.op("Sqrt", x)
    if exponent == -0.5:
        return _inverse_root(b, x)
    return b.binary("Pow", x, b.scalar(exponent, x))


def _inverse_root(b: Builder, x: OnnxValue) -> OnnxValue:
    root = b.op("Sqrt", x)
    return b.binary("Div", b.scalar(1, x), root)


def _rsqrt(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return _inverse_root(b, b.cast(a["self"], _dtype(node)))


def _reversed_subtraction(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    dtype = _dtype(node)
    x, other = as_value(b, a["self"], dtype), as_value(b, a["other"], dtype)
    if a.get("alpha", 1) != 1:
        x = b.binary("Mul", x, b.scalar(a["alpha"], x))
    return b.binary("Sub", other, x)


def _extreme(kind: str) -> Callable[..., OnnxValue]:
    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        dtype = _dtype(node)
        return b.binary(kind, b.cast(a["self"], dtype), b.cast(a["other"], dtype))

    return translate


def _clamp(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = b.cast(a["self"], _dtype(node))
    if a.get("min") is not None:
        x = b.binary("Max", x, as_value(b, a["min"], x.dtype))
    if a.get("max") is not None:
        x = b.binary("Min", x, as_value(b, a["max"], x.dtype))
    return x


def _where(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    dtype = _dtype(node)
    x, y = as_value(b, a["self"], dtype), as_value(b, a["other"], dtype)
    return b.where(b.cast(a["condition"], torch.bool), x, y)


def _masked_fill(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    dtype = _dtype(node)
    return _shaped(b, node, b.where(a["mask"], as_value(b, a["value"], dtype), a["self"]))


def _copy(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """A cast or a copy: the dtype may change, the values do not."""
    x: OnnxValue = a["self"]
    if x.dtype.is_floating_point and _dtype(node) == torch.bool:
        return b.op("Not", b.binary("Equal", x, b.scalar(0, x), torch.bool))
    return b.cast(x, _dtype(node))


def _copy_from(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return _shaped(b, node, b.cast(a["src"], _dtype(node)))


# ---- activations


def gelu(b: Builder, x: OnnxValue, approximate: str) -> OnnxValue:
    """Gaussian error linear unit (Hendrycks and Gimpel, 2016), exact or by tanh."""
    return b.op("Gelu", x, approximate=approximate)


def _gelu(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return gelu(b, a["self"], a["approximate"])


def _gelu_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """With standard operators: `GeluGrad` and `FastGeluGrad` are slower."""
    grad, x = a["grad_output"], a["self"]
    slope = _tanh_slope if a["approximate"] == "tanh" else _normal_slope
    return b.binary("Mul", grad, slope(b, x))


def _normal_slope(b: Builder, x: OnnxValue) -> OnnxValue:
    """d(x Φ(x))/dx = Φ(x) + x φ(x); with u = x/√2: (1 + erf(u) + 2 u exp(-u²)/√π) / 2."""
    u = b.binary("Mul", x, b.scalar(1 / math.sqrt(2), x))
    power = b.binary("Sub", b.scalar(math.log(2 / math.sqrt(math.pi)), x), b.binary("Mul", u, u))
    bell = b.binary("Mul", u, b.op("Exp", power))
    rest = b.binary("Add", b.op("Erf", u), bell)  # erf last: it reuses the memory of u
    return b.binary("Mul", b.binary("Add", rest, b.scalar(1, x)), b.scalar(0.5, x))


def _tanh_slope(b: Builder, x: OnnxValue) -> OnnxValue:
    """The same of x s, s = sigmoid(v), v = 2k (x + 0.044715 x³), k = √(2/π), which is
    0.5 x (1 + tanh(v/2)): s (1 + (1 - s) x v'), and x v' = 3v - 4k x."""
    k, cubic = math.sqrt(2 / math.pi), 0.044715
    square = b.binary("Mul", x, x)
    inner = b.binary("Mul", square, b.scalar(2 * k * cubic, x))
    v = b.binary("Mul", x, b.binary("Add", inner, b.scalar(2 * k, x)))
    s = b.op("Sigmoid", v)
    triple = b.binary("Mul", v, b.scalar(3, x))
    move = b.binary("Sub", triple, b.binary("Mul", x, b.scalar(4 * k, x)))
    rest = b.binary("Mul", b.binary("Sub", b.scalar(1, x), s), move)
    return b.binary("Mul", s, b.binary("Add", rest, b.scalar(1, x)))


def _silu(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = a["self"]
    return b.binary("Mul", x, b.op("Sigmoid", x))


def _silu_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """d(x σ)/dx = σ (1 + x (1 - σ))."""
    grad, x = a["grad_output"], a["self"]
    sigmoid = b.op("Sigmoid", x)
    one = b.scalar(1, x)
    inner = b.binary("Add", one, b.binary("Mul", x, b.binary("Sub", one, sigmoid)))
    return b.binary("Mul", grad, b.binary("Mul", sigmoid, inner))


def _tanh_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    grad, y = a["grad_output"], a["output"]
    if b.can("TanhGrad", grad, y):
        return b.op("TanhGrad", grad, y, domain=MICROSOFT)
    return b.binary("Mul", grad, b.binary("Sub", b.scalar(1, y), b.binary("Mul", y, y)))


def _sigmoid_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    grad, y = a["grad_output"], a["output"]
    if b.can("SigmoidGrad", grad, y):
        return b.op("SigmoidGrad", grad, y, domain=MICROSOFT)
    slope = b.binary("Mul", y, b.binary("Sub", b.scalar(1, y), y))
    return b.binary("Mul", grad, slope)


def _threshold_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """Times 0 or 1: `Where` and `ReluGrad` take a branch for each element, which is slow."""
    grad, x = a["grad_output"], a["self"]
    above = b.binary("Greater", x, as_value(b, a["threshold"], x.dtype), torch.bool)
    return b.binary("Mul", grad, b.cast(above, grad.dtype))


def _dropout_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """Multiply by the mask that was drawn outside, and by the scale."""
    grad = a["grad_output"]
    kept = b.cast(a["mask"], grad.dtype)
    return b.binary("Mul", b.binary("Mul", grad, kept), b.scalar(a["scale"], grad))


def _leaky(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return b.op("LeakyRelu", a["self"], alpha=float(a["negative_slope"]))


def _leaky_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    grad, x = a["grad_output"], a["self"]
    above = b.binary("Greater", x, b.scalar(0, x), torch.bool)
    return b.where(above, grad, b.binary("Mul", grad, b.scalar(a["negative_slope"], grad)))


_greater, _equal = _comparison("Greater"), _comparison("Equal")
_less, _unequal = _comparison("Less"), _comparison("Equal", negate=True)
_at_least, _at_most = _comparison("GreaterOrEqual"), _comparison("LessOrEqual")
_add, _sub, _mul = _binary("Add", "Or"), _binary("Sub"), _binary("Mul", "And")

OPS: Translations = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Scalar: _reversed_subtraction,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _division,
    aten.div.Scalar: _division,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    aten.rsqrt.default: _rsqrt,
    aten.neg.default: _unary("Neg"),
    aten.abs.default: _unary("Abs"),
    aten.exp.default: _unary("Exp"),
    aten.log.default: _unary("Log"),
    aten.sqrt.default: _unary("Sqrt"),
    aten.sin.default: _unary("Sin"),
    aten.cos.default: _unary("Cos"),
    aten.erf.default: _unary("Erf"),
    aten.reciprocal.default: _unary("Reciprocal"),
    aten.tanh.default: _unary("Tanh"),
    aten.sigmoid.default: _unary("Sigmoid"),
    aten.relu.default: _unary("Relu"),
    aten.minimum.default: _extreme("Min"),
    aten.maximum.default: _extreme("Max"),
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: _clamp,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.eq.Tensor: _equal,
    aten.eq.Scalar: _equal,
    aten.ne.Tensor: _unequal,
    aten.ne.Scalar: _unequal,
    aten.gt.Tensor: _greater,
    aten.gt.Scalar: _greater,
    aten.lt.Tensor: _less,
    aten.lt.Scalar: _less,
    aten.ge.Tensor: _at_least,
    aten.ge.Scalar: _at_least,
    aten.le.Tensor: _at_most,
    aten.le.Scalar: _at_most,
    aten.bitwise_and.Tensor: _logical("And"),
    aten.bitwise_or.Tensor: _logical("Or"),
    aten.logical_and.default: _logical("And"),
    aten.logical_or.default: _logical("Or"),
    aten.bitwise_not.default: _not,
    aten.logical_not.default: _not,
    aten._to_copy.default: _copy,
    aten.clone.default: _copy,
    aten.copy.default: _copy_from,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.silu.default: _silu,
    aten.silu_backward.default: _silu_backward,
    aten.tanh_backward.default: _tanh_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
    aten.threshold_backward.default: _threshold_backward,
    aten.native_dropout_backward.default: _dropout_backward,
    aten.leaky_relu.default: _leaky,
    aten.leaky_relu_backward.default: _leaky_backward,
}
