"""Collectives whose payload is coded without loss, forward and backward; with codec=None they are XLA's own.

P devices of a group, Y bytes of a part. Only the transport changes: codec="raw" sends the same parts uncoded and gives
the same bits, NaN payloads included. reduce_scatter and all_reduce add in float32 in the order of the group and round
once (once more between the stages of a hierarchy), so they equal codec="raw" bit for bit, not XLA's reduction.

    y = all_to_all(x, ("node", "gpu"), codec="x4s", codec_axes=("node",))  # coded between nodes, plain inside a node
    y, counters = all_gather(w, ("node",), codec="x3p", counters=True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, Protocol, overload

import jax
import jax.numpy as jnp

from .. import codec as coder
from ..compat import vary_like, vary_over
from ..types import Axes
from . import plain
from .plain import group_size

Array = jax.Array
CHECKS = ("collective", "deferred")


class Counters(NamedTuple):
    """What one device sent, float32 scalars.

    wire_bytes: bytes sent over the coded axes, a fallback's raw bytes included. raw_bytes: what they are uncoded.
    pool_used: used share of the fullest pool, > 1 if it overflowed. fallbacks: 1 if the group sent raw as well; with
    check="deferred", 1 if this device's values did not fit, so that results of the group are wrong.
    """

    wire_bytes: Array
    raw_bytes: Array
    pool_used: Array
    fallbacks: Array


def added(*counters: Counters) -> Counters:
    """Those of several collectives."""
    wire, raw, used, fallbacks = zip(*counters, strict=True)
    return Counters(reduce(jnp.add, wire), reduce(jnp.add, raw), reduce(jnp.maximum, used), reduce(jnp.add, fallbacks))


def no_counters() -> Counters:
    """All zero. As `sink` of a collective, its gradient is the counters of the backward pass."""
    return Counters(*(jnp.zeros((), jnp.float32) for _ in Counters._fields))


@overload
def all_to_all(x: Array, axes: Axes, split_dim: int = 0, concat_dim: int = 0, codec: str | None = None, *,
               counters: Literal[False] = False, **options: Any) -> Array: ...


@overload
def all_to_all(x: Array, axes: Axes, split_dim: int = 0, concat_dim: int = 0, codec: str | None = None, *,
               counters: Literal[True], **options: Any) -> tuple[Array, Counters]: ...


def all_to_all(x: Array, axes: Axes, split_dim: int = 0, concat_dim: int = 0, codec: str | None = None, **options):
    """As `plain.all_to_all`. Sends b (P-1)/P / ratio bytes and one int32 for agreement; so does its transpose.

    options, for all four collectives: codec_axes, axes over which to code, the others stay plain (default: all).
    check: "collective", the group agrees on overflow and sends raw in a conditional; "deferred", no conditional:
    results are wrong if any device's `Counters.fallbacks` is not 0, and the caller must discard them. counters: return
    (result, Counters). sink: `no_counters()`, for those of the backward pass.
    """
    _check_split(x, axes, split_dim)
    return _collective(x, axes, codec, lambda how: AllToAll(axes, how, split_dim, concat_dim),
                       lambda: plain.all_to_all(x, axes, split_dim, concat_dim), **options)


@overload
def all_gather(x: Array, axes: Axes, dim: int = 0, codec: str | None = None, *,
               counters: Literal[False] = False, **options: Any) -> Array: ...


@overload
def all_gather(x: Array, axes: Axes, dim: int = 0, codec: str | None = None, *,
               counters: Literal[True], **options: Any) -> tuple[Array, Counters]: ...


def all_gather(x: Array, axes: Axes, dim: int = 0, codec: str | None = None, **options):
    """As `plain.all_gather`. Sends b (P-1) / ratio bytes; the flag is in the payload. Transpose: `reduce_scatter`."""
    return _collective(x, axes, codec, lambda how: AllGather(axes, how, dim), lambda: plain.all_gather(x, axes, dim),
                       **options)


@overload
def reduce_scatter(x: Array, axes: Axes, dim: int = 0, codec: str | None = None, *,
                   counters: Literal[False] = False, **options: Any) -> Array: ...


@overload
def reduce_scatter(x: Array, axes: Axes, dim: int = 0, codec: str | None = None, *,
                   counters: Literal[True], **options: Any) -> tuple[Array, Counters]: ...


def reduce_scatter(x: Array, axes: Axes, dim: int = 0, codec: str | None = None, **options):
    """Sum over the group, of which this device keeps its part of dim. Sends b (P-1)/P / ratio bytes, one int32."""
    _check_split(x, axes, dim)
    return _collective(x, axes, codec, lambda how: ReduceScatter(axes, how, dim),
                       lambda: plain.reduce_scatter(x, axes, dim), **options)


@overload
def all_reduce(x: Array, axes: Axes, codec: str | None = None, *,
               counters: Literal[False] = False, **options: Any) -> Array: ...


@overload
def all_reduce(x: Array, axes: Axes, codec: str | None = None, *,
               counters: Literal[True], **options: Any) -> tuple[Array, Counters]: ...


def all_reduce(x: Array, axes: Axes, codec: str | None = None, **options):
    """Sum over the group, the same on every device: reduce_scatter and all_gather. Sends 2 b (P-1)/P / ratio bytes.

    As with psum, the gradient needs no communication.
    """
    return _collective(x, axes, codec, lambda how: AllReduce(axes, how), lambda: plain.psum(x, axes), **options)


@dataclass(frozen=True)
class How:
    """Name of the format, axes that are coded, and how overflow is met."""

    codec: str
    axes: Axes
    check: str = "collective"

    @property
    def falls_back(self) -> bool:
        """Whether what does not fit is sent raw, in a conditional."""
        return self.codec != "raw" and self.check == "collective"


@partial(jax.tree_util.register_dataclass, data_fields=("payload_PY", "overflow", "pool_used", "x"),
         meta_fields=("shape", "dtype"))
@dataclass(frozen=True)
class Message:
    """Coded parts, before or after their way. shape, dtype: of a part. x: what was coded, to be sent raw if it does not
    fit; None if that never happens. overflow: of this device before the way, of the group after it."""

    payload_PY: Array
    overflow: Array
    pool_used: Array
    x: Array | None
    shape: tuple[int, ...]
    dtype: Any


class Operation(Protocol):
    """A collective with its arguments. apply: its result and counters."""

    def apply(self, x: Array) -> tuple[Array, Counters]: ...

    def transposed(self) -> Operation: ...


@dataclass(frozen=True)
class AllToAll:
    axes: Axes
    how: How
    split_dim: int
    concat_dim: int

    def apply(self, x: Array) -> tuple[Array, Counters]:
        y, counters = _exchange(cut(x, self.axes, self.split_dim), self.axes, self.how)
        return joined(y, self.concat_dim), counters

    def transposed(self) -> Operation:
        return replace(self, split_dim=self.concat_dim, concat_dim=self.split_dim)


@dataclass(frozen=True)
class AllGather:
    axes: Axes
    how: How
    dim: int

    def apply(self, x: Array) -> tuple[Array, Counters]:
        y, counters = _gather(x, self.axes, self.how, "varying")
        return joined(y, self.dim), counters

    def transposed(self) -> Operation:
        return ReduceScatter(self.axes, self.how, self.dim)


@dataclass(frozen=True)
class ReduceScatter:
    axes: Axes
    how: How
    dim: int

    def apply(self, x: Array) -> tuple[Array, Counters]:
        return _reduce(cut(x, self.axes, self.dim), self.axes, self.how)

    def transposed(self) -> Operation:
        return AllGather(self.axes, self.how, self.dim)


@dataclass(frozen=True)
class AllReduce:
    axes: Axes
    how: How

    def apply(self, x: Array) -> tuple[Array, Counters]:
        size = group_size(self.axes)
        x_PN = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(size, -1)
        part_N, scattered = _reduce(x_PN, self.axes, self.how)
        y_PN, gathered = _gather(part_N, self.axes, self.how, "invarying")
        return y_PN.ravel()[: x.size].reshape(x.shape), added(scattered, gathered)

    def transposed(self) -> Operation:
        return Vary(self.axes)


@dataclass(frozen=True)
class Vary:
    """The transpose of a sum: every device gets the gradient, nothing is sent."""

    axes: Axes

    def apply(self, x: Array) -> tuple[Array, Counters]:
        return vary_over(x, self.axes), no_counters()

    def transposed(self) -> Operation:
        raise NotImplementedError("all_reduce is differentiable once")


def _collective(x: Array, axes: Axes, codec: str | None, operation: Callable[[How], Operation],
                uncoded: Callable[[], Array], *, codec_axes: Axes | None = None, check: str = "collective",
                counters: bool = False, sink: Counters | None = None) -> Any:
    if check not in CHECKS:
        raise ValueError(f'check must be one of {", ".join(CHECKS)}, got "{check}"')
    if codec_axes is not None and not set(codec_axes) <= set(axes):
        raise ValueError(f"codec_axes={codec_axes} must be among the collective's axes {axes}")
    coded = axes if codec_axes is None else tuple(a for a in axes if a in codec_axes)
    if codec in (None, "off") or not coded:
        return (uncoded(), no_counters()) if counters else uncoded()
    coder.resolve(codec, x.dtype)
    x = vary_over(x, axes)
    sink = vary_like(no_counters() if sink is None else sink, x)
    y, found = _differentiable(operation(How(codec, coded, check)), x, sink)
    return (y, found) if counters else y


def _forward(operation: Operation, x: Array, sink: Counters):
    y, counters = operation.apply(x)
    return y, vary_like(counters, x)


def _forward_saved(operation: Operation, x: Array, sink: Counters):
    return _forward(operation, x, sink), None


def _backward(operation: Operation, saved: None, cotangents):
    gradient, counters = operation.transposed().apply(cotangents[0])
    return gradient, vary_like(counters, gradient)


_differentiable = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_differentiable.defvjp(_forward_saved, _backward)


def _exchange(x: Array, axes: Axes, how: How) -> tuple[Array, Counters]:
    """Part p of x [P, ...] goes to device p of the group; the result's part p came from it. Plain axes go first."""
    x = _plain_exchange(_by_stage(x, axes, how), axes, how)
    y, counters = _coded_exchange(x.swapaxes(0, 1), how)
    return _in_order(y.swapaxes(0, 1), axes, how), counters


def _reduce(x: Array, axes: Axes, how: How) -> tuple[Array, Counters]:
    """Sum of the parts that the group's devices have for this one."""
    x = _plain_exchange(_by_stage(x, axes, how), axes, how)
    return _coded_exchange(_sum(x), how, _sum, lambda *coded: coder.sum_from(*coded).astype(x.dtype))


def _gather(x: Array, axes: Axes, how: How, to: str) -> tuple[Array, Counters]:
    """[P, *x.shape], coded axes first, so that the slow link carries one device's part, not a node's."""

    def gather(row: Array, over: Axes) -> Array:
        return jax.lax.all_gather(row, over, axis=0, tiled=True, to=to) if over else row

    move = partial(gather, over=how.axes)
    y, counters = _unpacked(_sent(pack(x[None], how), move, lambda m: _any_flag(m, how)), how, move)
    y = coder.from_words(gather(coder.words(y)[None], _plain_axes(axes, how)), x.dtype)
    return _in_order(y, axes, how), _scaled(counters, group_size(how.axes) - 1)


def _any_flag(message: Message, how: How) -> Array:
    """Every device has every part, flags included, so all see the same."""
    return coder.overflowed(message.payload_PY, message.shape, message.dtype, how.codec).any()


def pack(x: Array, how: How) -> Message:
    """Parts x [P, ...], coded: the first of three steps of an exchange, which a schedule may place apart."""
    payload_PY, flags = coder.encode_for(x, x.shape[0], how.codec)
    kept = x if how.falls_back else None
    return Message(payload_PY, flags.overflow_P.any(), flags.used_P.max(), kept, x.shape[1:], x.dtype)


def send(message: Message, axes: Axes) -> Message:
    """The same with the parts that the other devices have for this one. Sends the payload and one int32."""
    return _sent(message, partial(_swap, axes=axes), lambda m: _agreed(m.overflow, axes))


def unpack(message: Message, how: How) -> tuple[Array, Counters]:
    """The parts [P, ...] that arrived; where the group agreed that its values do not fit, they are sent here, raw."""
    y, counters = _unpacked(message, how, partial(_swap, axes=how.axes))
    return y, _scaled(counters, 1 - 1 / group_size(how.axes))


def _coded_exchange(x: Array, how: How, finish: Callable = lambda y: y,
                    decode: Callable = coder.decode_from) -> tuple[Array, Counters]:
    """`_exchange` of dim 0 over the coded axes, with `finish` of the parts."""
    message = send(pack(x, how), how.axes)
    y, counters = _unpacked(message, how, partial(_swap, axes=how.axes), finish, decode)
    return y, _scaled(counters, 1 - 1 / group_size(how.axes))


def _swap(row: Array, axes: Axes) -> Array:
    return jax.lax.all_to_all(row, axes, 0, 0, tiled=True)


def _agreed(overflow: Array, axes: Axes) -> Array:
    return plain.pmax(overflow.astype(jnp.int32), axes) > 0


def _sent(message: Message, move: Callable[[Array], Array], agree: Callable[[Message], Array]) -> Message:
    """move takes and returns rows of bytes or words, never floats: XLA:CPU widens those and changes NaN payloads."""
    moved = replace(message, payload_PY=move(message.payload_PY))
    return moved if message.x is None else replace(moved, overflow=agree(moved))


def _unpacked(message: Message, how: How, move: Callable[[Array], Array], finish: Callable = lambda y: y,
              decode: Callable = coder.decode_from) -> tuple[Array, Counters]:
    """decode is to be `finish` of what `decode_from` gives."""
    part = (message.shape, message.dtype, how.codec)
    raw = float(message.payload_PY.shape[0] * coder.wire_bytes(message.shape, message.dtype, "raw"))
    wire, fallback = float(message.payload_PY.size), message.overflow.astype(jnp.float32)
    if message.x is None:
        return decode(message.payload_PY, *part), _counters(wire, raw, message.pool_used, fallback)
    y = jax.lax.cond(message.overflow, lambda payload_PY, x: finish(coder.from_words(move(coder.words(x)), x.dtype)),
                     lambda payload_PY, x: decode(payload_PY, *part), message.payload_PY, message.x)
    return y, _counters(wire + fallback * raw, raw, message.pool_used, fallback)


def _scaled(counters: Counters, sent: float) -> Counters:
    return counters._replace(wire_bytes=counters.wire_bytes * sent, raw_bytes=counters.raw_bytes * sent)


def _counters(*values) -> Counters:
    return Counters(*(jnp.asarray(v, jnp.float32) for v in values))


def _plain_exchange(x: Array, axes: Axes, how: How) -> Array:
    over = _plain_axes(axes, how)
    return coder.from_words(plain.all_to_all(coder.words(x), over), x.dtype) if over else x


def _by_stage(x: Array, axes: Axes, how: How) -> Array:
    """[plain, coded, ...] of [P, ...]."""
    x = x.reshape(*(group_size((a,)) for a in axes), *x.shape[1:])
    order = [axes.index(a) for a in (*_plain_axes(axes, how), *how.axes)]
    x = x.transpose(*order, *range(len(axes), x.ndim))
    return x.reshape(group_size(_plain_axes(axes, how)), group_size(how.axes), *x.shape[len(axes):])


def _in_order(x: Array, axes: Axes, how: How) -> Array:
    """[P, ...] of [plain, coded, ...]."""
    staged = (*_plain_axes(axes, how), *how.axes)
    x = x.reshape(*(group_size((a,)) for a in staged), *x.shape[2:])
    x = x.transpose(*(staged.index(a) for a in axes), *range(len(axes), x.ndim))
    return x.reshape(group_size(axes), *x.shape[len(axes):])


def _plain_axes(axes: Axes, how: How) -> Axes:
    return tuple(a for a in axes if a not in how.axes)


def _sum(x: Array) -> Array:
    """Over dim 0, in order, in float32; widened by bits, because converting may flush subnormals."""
    wide = x
    if x.dtype == jnp.bfloat16:
        wide = jax.lax.bitcast_convert_type(coder.words(x).astype(jnp.uint32) << 16, jnp.float32)
    return coder.sum_in_order(wide).astype(x.dtype)


def cut(x: Array, axes: Axes, dim: int) -> Array:
    """[P, ...]: dim cut into one part a device."""
    size = group_size(axes)
    return jnp.moveaxis(x.reshape(*x.shape[:dim], size, -1, *x.shape[dim + 1 :]), dim, 0)


def joined(x: Array, dim: int) -> Array:
    """Parts [P, ...] side by side along dim."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _check_split(x: Array, axes: Axes, dim: int) -> None:
    size = group_size(axes)
    if x.shape[dim] % size:
        raise ValueError(f"the {size} devices of {axes} must divide dim {dim}, got shape {x.shape}")
