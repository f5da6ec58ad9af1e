"""The Triton kernels of `multi_tensor`.

A program processes a chunk of one tensor: `chunks` says which one, and where it begins. `table` has
a row per tensor: addresses of weight, gradient, two states and copy, and the number of elements;
`rows` its numbers, in float64.
"""

from __future__ import annotations

from graphaccel.kernels.jit import jit, tl

CHUNK, BLOCK = 1 << 15, 1 << 11
WARPS = 8


@jit
def _sides(at, count, SIZE: tl.constexpr):
    """Positions of one block, and which of them are inside the tensor."""
    places = at + tl.arange(0, SIZE)
    return places, places < count


@jit
def _read(pointer, places, inside, TAIL: tl.constexpr, WIDE: tl.constexpr):
    if TAIL:
        return tl.load(pointer + places, mask=inside, other=0.0).to(WIDE)
    return tl.load(pointer + places).to(WIDE)


@jit
def _write(pointer, places, inside, value, TAIL: tl.constexpr):
    if TAIL:
        tl.store(pointer + places, value.to(pointer.dtype.element_ty), mask=inside)
    else:
        tl.store(pointer + places, value.to(pointer.dtype.element_ty))


@jit
def _adam_block(
    weight, grad, first, second, copy, at, count, divisor, size, root, shrink, decay,
    beta1, beta2, eps,
    WIDE: tl.constexpr, TAIL: tl.constexpr, DECOUPLED: tl.constexpr, SCALED: tl.constexpr,
    COPIES: tl.constexpr, ZEROES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    places, inside = _sides(at, count, SIZE)
    p = _read(weight, places, inside, TAIL, WIDE)
    g = _read(grad, places, inside, TAIL, WIDE)
    m = _read(first, places, inside, TAIL, WIDE)
    v = _read(second, places, inside, TAIL, WIDE)
    if SCALED:
        g = g / divisor
    if DECOUPLED:
        p = p * shrink
    else:
        g = g + decay * p
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + (1 - beta2) * g * g
    p = p - size * (m / (tl.sqrt(v) / root + eps))
    _write(weight, places, inside, p, TAIL)
    _write(first, places, inside, m, TAIL)
    _write(second, places, inside, v, TAIL)
    if COPIES:
        _write(copy, places, inside, p, TAIL)
    if ZEROES:
        _write(grad, places, inside, tl.zeros_like(g), TAIL)
    elif SCALED:
        _write(grad, places, inside, g, TAIL)


@jit
def adam_kernel(
    table, rows, chunks, scale, found_inf,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, COPY: tl.constexpr,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, DECOUPLED: tl.constexpr, SCALED: tl.constexpr,
    SKIPS: tl.constexpr, COPIES: tl.constexpr, ZEROES: tl.constexpr,
    CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One chunk per program. Bias corrections in float64: 1 − β₂ᵗ starts at a thousandth."""
    number = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    at = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    entry = table + number * 6
    weight = tl.load(entry).to(tl.pointer_type(WEIGHT))
    grad = tl.load(entry + 1).to(tl.pointer_type(GRAD))
    first = tl.load(entry + 2).to(tl.pointer_type(STATE))
    second = tl.load(entry + 3).to(tl.pointer_type(STATE))
    copy = tl.load(entry + 4).to(tl.pointer_type(COPY))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        grad = tl.multiple_of(grad, 16)
        first = tl.multiple_of(first, 16)
        second = tl.multiple_of(second, 16)
        copy = tl.multiple_of(copy, 16)
    count = tl.load(entry + 5)
    row = rows + number * 6
    rate = tl.load(row)
    beta1 = tl.load(row + 1)
    beta2 = tl.load(row + 2)
    decay = tl.load(row + 4)
    step = tl.load(row + 5)
    size = (rate / (1 - tl.exp(step * tl.log(beta1)))).to(WIDE)
    root = tl.sqrt(1 - tl.exp(step * tl.log(beta2))).to(WIDE)
    shrink = (1 - rate * decay).to(WIDE)
    eps = tl.load(row + 3).to(WIDE)
    divisor = tl.load(scale).to(WIDE)
    end = tl.minimum(at + CHUNK, count)
    last = end
    if SKIPS:
        end = tl.where(tl.load(found_inf) == 0, end, at)
    while at + SIZE <= end:
        _adam_block(
            weight, grad, first, second, copy, at, end, divisor, size, root, shrink,
            decay.to(WIDE), beta1.to(WIDE), beta2.to(WIDE), eps, WIDE, False, DECOUPLED, SCALED,
            COPIES, ZEROES, SIZE,
        )  # fmt: skip
        at += SIZE
    if at < end:
        _adam_block(
            weight, grad, first, second, copy, at, end, divisor, size, root, shrink,
            decay.to(WIDE), beta1.to(WIDE), beta2.to(WIDE), eps, WIDE, True, DECOUPLED, SCALED,
            COPIES, ZEROES, SIZE,
        )  # fmt: skip
        at += SIZE
    if SKIPS and ZEROES:  # a skipped update zeroes its gradients too
        while at < last:
            places, inside = _sides(at, last, SIZE)
            tl.store(grad + places, (places * 0).to(GRAD), mask=inside)
            at += SIZE


@jit
def _sgd_block(
    weight, grad, buffer, copy, at, count, divisor, rate, momentum, damped, decay, new,
    WIDE: tl.constexpr, TAIL: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    SCALED: tl.constexpr, COPIES: tl.constexpr, ZEROES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    places, inside = _sides(at, count, SIZE)
    p = _read(weight, places, inside, TAIL, WIDE)
    g = _read(grad, places, inside, TAIL, WIDE)
    if SCALED:
        g = g / divisor
        if not ZEROES:
            _write(grad, places, inside, g, TAIL)
    if ZEROES:
        _write(grad, places, inside, tl.zeros_like(g), TAIL)
    g = g + decay * p
    if MOMENTUM:
        b = _read(buffer, places, inside, TAIL, WIDE)
        b = tl.where(new, g, b * momentum + damped * g)
        _write(buffer, places, inside, b, TAIL)
        if NESTEROV:
            g = g + momentum * b
        else:
            g = b
    p = p - rate * g
    _write(weight, places, inside, p, TAIL)
    if COPIES:
        _write(copy, places, inside, p, TAIL)


@jit
def sgd_kernel(
    table, rows, chunks, scale, found_inf,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, COPY: tl.constexpr,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    SCALED: tl.constexpr, SKIPS: tl.constexpr, COPIES: tl.constexpr, ZEROES: tl.constexpr,
    CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One chunk per program."""
    number = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    at = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    entry = table + number * 6
    weight = tl.load(entry).to(tl.pointer_type(WEIGHT))
    grad = tl.load(entry + 1).to(tl.pointer_type(GRAD))
    buffer = tl.load(entry + 2).to(tl.pointer_type(STATE))
    copy = tl.load(entry + 4).to(tl.pointer_type(COPY))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        grad = tl.multiple_of(grad, 16)
        buffer = tl.multiple_of(buffer, 16)
        copy = tl.multiple_of(copy, 16)
    row = rows + number * 6
    rate = tl.load(row).to(WIDE)
    momentum = tl.load(row + 1).to(WIDE)
    damped = (1 - tl.load(row + 2)).to(WIDE)
    decay = tl.load(row + 3).to(WIDE)
    new = tl.load(row + 4) != 0
    divisor = tl.load(scale).to(WIDE)
    end = tl.minimum(at + CHUNK, tl.load(entry + 5))
    last = end
    if SKIPS:
        end = tl.where(tl.load(found_inf) == 0, end, at)
    while at + SIZE <= end:
        _sgd_block(
            weight, grad, buffer, copy, at, end, divisor, rate, momentum, damped, decay, new,
            WIDE, False, MOMENTUM, NESTEROV, SCALED, COPIES, ZEROES, SIZE,
        )  # fmt: skip
        at += SIZE
    if at < end:
        _sgd_block(
            weight, grad, buffer, copy, at, end, divisor, rate, momentum, damped, decay, new,
            WIDE, True, MOMENTUM, NESTEROV, SCALED, COPIES, ZEROES, SIZE,
        )  # fmt: skip
        at += SIZE
    if SKIPS and ZEROES:
        while at < last:
            places, inside = _sides(at, last, SIZE)
            tl.store(grad + places, (places * 0).to(GRAD), mask=inside)
            at += SIZE


@jit
def squares_kernel(
    table, chunks, partial,
    GRAD: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The sum of squares of one chunk of a gradient."""
    number = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    at = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    grad = tl.load(table + number * 6 + 1).to(tl.pointer_type(GRAD))
    if ALIGNED:
        grad = tl.multiple_of(grad, 16)
    end = tl.minimum(at + CHUNK, tl.load(table + number * 6 + 5))
    summed = tl.zeros([SIZE], dtype=tl.float32)
    while at + SIZE <= end:
        places, inside = _sides(at, end, SIZE)
        g = _read(grad, places, inside, False, tl.float32)
        summed += g * g
        at += SIZE
    if at < end:
        places, inside = _sides(at, end, SIZE)
        g = _read(grad, places, inside, True, tl.float32)
        summed += g * g
    tl.store(partial + tl.program_id(0), tl.sum(summed, 0))
