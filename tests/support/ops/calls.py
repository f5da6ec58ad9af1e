"""Random small calls of ops, by the shape of their arguments: sizes are even, values float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

aten = torch.ops.aten
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """What a case is made from: random choices and random tensors."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))

    def one(self, *choices: Any) -> Any:
        return self._data.draw(st.sampled_from(choices))

    def size(self) -> int:
        return self.one(2, 4)

    def shape(self, least: int = 1, most: int = 3) -> list[int]:
        return [self.size() for _ in range(self.one(*range(least, most + 1)))]

    def dim(self, shape: list[int]) -> int:
        return self.one(*range(-len(shape), len(shape)))

    def real(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return self.real(*shape).abs() + 0.1

    def whole(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self._generator)

    def truth(self, *shape: int) -> Tensor:
        return self.whole(2, *shape).bool()


Case = Callable[[Draw], Arguments]


def unary_call(*rest: Any, least: int = 1, **kwargs: Any) -> Case:
    return lambda d: ((d.real(*d.shape(least)), *rest), kwargs)


def binary_call(*rest: Any) -> Case:
    """Two tensors, the second perhaps broadcast."""

    def case(d: Draw) -> Arguments:
        shape = d.shape()
        other = [d.one(n, n, 1) for n in shape][d.one(0, 0, 1) :]
        return (d.real(*shape), d.positive(*other), *rest), {}

    return case


def twice_call(*rest: Any) -> Case:
    def case(d: Draw) -> Arguments:
        shape = d.shape()
        return (d.real(*shape), d.positive(*shape), *rest), {}

    return case


def along_call(
    *before: Any, after: tuple[Any, ...] = (), twice: bool = False, **kwargs: Any
) -> Case:
    """Tensor(s), `before`, a dim, `after`."""

    def case(d: Draw) -> Arguments:
        shape = d.shape()
        tensors = [d.real(*shape) for _ in range(1 + twice)]
        return (*tensors, *before, d.dim(shape), *after), kwargs

    return case


def dims_call(*before: Any, none: bool = True, many: bool = True, **kwargs: Any) -> Case:
    """A reduction over one dim, several or (`none`) all."""

    def case(d: Draw) -> Arguments:
        shape = d.shape()
        first = d.one(*range(len(shape)))
        dims: Any = first
        if many:
            dims = d.one([first], sorted({first, len(shape) - 1}), *([None] if none else []))
        keep = {"keepdim": d.one(True, False)} if kwargs.get("correction") is not None else {}
        rest = () if keep else (d.one(True, False),)
        return (d.real(*shape), *before, dims, *rest), kwargs | keep

    return case


def reshape_call(d: Draw) -> Arguments:
    a, b, c = d.size(), d.size(), d.size()
    source, target = d.one(
        ([a, b, c], [a * b, c]), ([a * b, c], [a, b, c]), ([a, b, c], [a, b * c]),
        ([a, 1, b], [a, b]),
        ([a, b], [1, a, b, 1]), ([a * b], [a, b]), ([a, b, c], [a * b * c]), ([4, 3], [6, 2]),
    )  # fmt: skip
    return (d.real(*source), target), {}


def squeeze_call(*dims: Any) -> Case:
    return lambda d: ((d.real(d.size(), 1, d.size()), *dims), {})


def expand_call(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.real(*[d.one(n, 1) for n in shape]), [*d.one([], [2]), *shape]), {}


def repeat_call(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.real(*shape), [*d.one([], [2]), *[d.one(1, 1, 3) for _ in shape]]), {}


def permute_call(d: Draw) -> Arguments:
    return (d.real(d.size(), d.size(), d.size()), d.one([2, 0, 1], [0, -1, 1], [1, 0, 2])), {}


def listed_call(d: Draw) -> Arguments:
    shape = d.shape()
    return ([d.real(*shape) for _ in range(d.one(2, 3))], d.dim(shape)), {}


def slice_call(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.real(*shape), d.dim(shape), *d.one((0, 2**63 - 1), (1, 2**63 - 1), (0, 1))), {}


def narrow_call(d: Draw) -> Arguments:
    shape = d.shape()
    dim = d.dim(shape)
    return (d.real(*shape), dim, 0, shape[dim]), {}


def put_back_call(*rest: Any, dropped: bool) -> Case:
    def case(d: Draw) -> Arguments:
        out = d.shape(2)
        dim = d.one(*range(len(out)))
        source = out[:dim] + ([] if dropped else [1]) + out[dim + 1 :]
        return (d.real(*source), out, dim, *rest), {}

    return case


def scatter_call(*rest: Any, dropped: bool) -> Case:
    def case(d: Draw) -> Arguments:
        out = d.shape(2)
        dim = d.one(*range(len(out)))
        source = out[:dim] + ([] if dropped else [1]) + out[dim + 1 :]
        return (d.real(*out), d.real(*source), dim, *rest), {}

    return case


def pad_call(d: Draw) -> Arguments:
    shape = d.shape(2)
    return (d.real(*shape), d.one([1, 0], [0, 0, 1, 2], [1, 1, 1, 1]), d.one(0, 0.0, 1.5)), {}


def roll_call(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.real(*shape), *d.one(([1], [d.dim(shape)]), ([1],))), {}


def added_call(*batch: int) -> Case:
    def case(d: Draw) -> Arguments:
        m, k, n = d.size(), d.size(), d.size()
        added = d.one([n], [m, n], [1, n]) if not batch else [*batch, m, n]
        return (d.real(*added), d.real(*batch, m, k), d.real(*batch, k, n)), {}

    return case


def product_call(left: str, right: str) -> Case:
    def case(d: Draw) -> Arguments:
        sizes = {i: d.size() for i in "bmkn"}
        return (d.real(*[sizes[i] for i in left]), d.real(*[sizes[i] for i in right])), {}

    return case


def convolution_call(d: Draw) -> Arguments:
    bias = d.one(None, d.real(4))
    return (
        d.real(d.size(), 4, 5, 5),
        d.real(4, 2, 3, 3),
        bias,
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        2,
    ), {}


def convolution_backward_call(d: Draw) -> Arguments:
    n, mask = d.size(), d.one([True, True, True], [False, True, False], [True, True, False])
    tensors = (d.real(n, 4, 5, 5), d.real(n, 4, 5, 5), d.real(4, 2, 3, 3))
    return (*tensors, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 2, mask), {}


def embedding_backward_call(d: Draw) -> Arguments:
    shape = d.shape(1, 2)
    return (d.real(*shape, 4), d.whole(6, *shape), 6, -1, d.one(False, False, True)), {}


def index_call(d: Draw) -> Arguments:
    a, b, c, k = d.size(), d.size(), d.size(), d.size()
    x = d.real(a, b, c)
    return d.one(
        (x, [d.whole(a, k)]),
        (x, [None, d.whole(b, k, 2)]),
        (x, [None, d.whole(b, k), d.whole(c, k)]),
        (x, [d.whole(a, k, 1), None, d.whole(c, 1, 4)]),
        (x, [d.whole(a, 1), d.whole(b, 1)]),
    ), {}


def index_put_call(d: Draw) -> Arguments:
    x, indices = index_call(d)[0]
    shape = x[tuple(slice(None) if i is None else i for i in indices)].shape
    base = d.one(x, torch.zeros_like(x))
    return (base, indices, d.real(*shape), d.one(True, False)), {}


def gather_call(d: Draw) -> Arguments:
    shape = d.shape(2, 3)
    dim = d.one(*range(len(shape)))
    index = [d.size() if i == dim else d.one(n, n, 2) for i, n in enumerate(shape)]
    return (d.real(*shape), dim, d.whole(shape[dim], *index)), {}


def scatter_add_call(d: Draw) -> Arguments:
    (source, dim, index), _ = gather_call(d)
    return (source, dim, index, d.real(*index.shape)), {}


def layer_norm_call(d: Draw) -> Arguments:
    shape = d.shape(2, 3)
    affine = d.one((None, None), (d.real(shape[-1]), d.real(shape[-1])))
    return (d.real(*shape), shape[-1:], *affine, 1e-5), {}


def layer_norm_backward_call(d: Draw) -> Arguments:
    shape = d.shape(2, 3)
    x, weight = d.real(*shape), d.real(shape[-1])
    # Rows may have two elements, and those be close: an epsilon that keeps that well conditioned.
    _, mean, scale = aten.native_layer_norm(x, shape[-1:], weight, weight, 0.5)
    mask = d.one([True, True, True], [True, False, False], [False, True, True])
    return (d.real(*shape), x, shape[-1:], mean, scale, weight, weight, mask), {}


def group_norm_call(d: Draw) -> Arguments:
    n = d.size()
    return (d.real(n, 4, 3, 3), d.real(4), d.real(4), n, 4, 9, 2, 1e-5), {}


def group_norm_backward_call(d: Draw) -> Arguments:
    n = d.size()
    x, weight = d.real(n, 4, 3, 3), d.real(4)
    _, mean, scale = aten.native_group_norm(x, weight, weight, n, 4, 9, 2, 1e-5)
    mask = d.one([True, True, True], [True, False, False])
    return (d.real(n, 4, 3, 3), x, mean, scale, weight, n, 4, 9, 2, mask), {}


def batch_norm_call(*training: bool) -> Case:
    def case(d: Draw) -> Arguments:
        x = d.real(*d.one([4, 2], [2, 4, 3, 3]))
        c = x.shape[1]
        mode = (d.one(*training),) if training else ()
        return (x, d.real(c), d.real(c), d.real(c), d.positive(c), *mode, 0.1, 1e-5), {}

    return case


def batch_norm_backward_call(d: Draw) -> Arguments:
    x = d.real(*d.one([4, 2], [2, 4, 3, 3]))
    c = x.shape[1]
    statistics = (d.real(c), d.positive(c), d.real(c), d.positive(c))
    mask = d.one([True, True, True], [True, False, False])
    return (d.real(*x.shape), x, d.real(c), *statistics, d.one(True, False), 1e-5, mask), {}


def weight_norm_call(d: Draw) -> Arguments:
    return (d.real(4, 2, 2), d.real(4, 1, 1), 0), {}


def weight_norm_backward_call(d: Draw) -> Arguments:
    v, g = d.real(4, 2, 2), d.real(4, 1, 1)
    _, norms = aten._weight_norm_interface(v, g, 0)
    return (d.real(4, 2, 2), v, g, norms, 0), {}


def attention_call(d: Draw) -> Arguments:
    b, h, q, s = d.size(), d.size(), d.size(), d.size()
    mask = d.one(None, d.real(b, h, q, s), d.real(1, 1, q, s), d.real(b, 1, 1, s), d.real(q, s))
    tensors = (d.real(b, h, q, 4), d.real(b, h, s, 4), d.real(b, h, s, 4))
    return (*tensors, 0.0, mask is None and d.one(True, False)), {"attn_mask": mask}


def attention_backward_call(d: Draw) -> Arguments:
    (q, k, v, p, causal), mask = attention_call(d)
    out, total = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, **mask)
    return (d.real(*out.shape), q, k, v, out, total, p, causal), mask


def labels_call(d: Draw, *shape: int) -> Tensor:
    labels = d.whole(4, *shape)
    labels.view(-1)[0] = -100
    return labels


def labelled_loss_call(*spatial: int) -> Case:
    def case(d: Draw) -> Arguments:
        n = d.size()
        weight = d.one(None, d.positive(4))
        return (
            d.real(n, 4, *spatial),
            labels_call(d, n, *spatial),
            weight,
            d.one(0, 1, 2),
            -100,
        ), {}

    return case


def labelled_loss_backward_call(*spatial: int) -> Case:
    def case(d: Draw) -> Arguments:
        args, _ = labelled_loss_call(*spatial)(d)
        op = aten.nll_loss2d_forward if spatial else aten.nll_loss_forward
        loss, total = op(*args)
        return (d.real(*loss.shape), *args, total), {}

    return case


def loss_call(*rest: Any, bounded: bool = False) -> Case:
    def case(d: Draw) -> Arguments:
        shape = d.shape()
        x, y = d.real(*shape), d.real(*shape)
        if bounded:
            return (x.sigmoid(), y.sigmoid(), d.one(None, d.positive(*shape)), d.one(0, 1, 2)), {}
        return (x, y, d.one(0, 1, 2), *rest), {}

    return case


def loss_backward_call(*rest: Any, bounded: bool = False) -> Case:
    def case(d: Draw) -> Arguments:
        (x, *others), _ = loss_call(*rest, bounded=bounded)(d)
        reduction = others[2] if bounded else others[1]
        return (d.real(*(x.shape if reduction == 0 else ())), x, *others), {}

    return case


def image_call(*rest: Any) -> Case:
    return lambda d: ((d.real(d.size(), 2, 4, 4), *rest), {})


def image_backward_call(size: int, *rest: Any) -> Case:
    def case(d: Draw) -> Arguments:
        n = d.size()
        return (d.real(n, 2, size, size), d.real(n, 2, 4, 4), *rest), {}

    return case


def max_pool_backward_call(d: Draw) -> Arguments:
    x = d.real(d.size(), 2, 4, 4)
    out, indices = aten.max_pool2d_with_indices(x, [2, 2])
    return (d.real(*out.shape), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices), {}


def upsample_backward_call(*rest: Any) -> Case:
    def case(d: Draw) -> Arguments:
        n = d.size()
        return (d.real(n, 2, 8, 8), [8, 8], [n, 2, 4, 4], *rest), {}

    return case


def where_call(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.truth(*shape), d.real(*shape), d.real(*[d.one(n, 1) for n in shape])), {}
