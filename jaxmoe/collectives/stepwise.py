"""An All-to-All in steps, and a gather that follows it one step behind (Parm's SAA).

In step s every device sends to the one that is s places further on in the group, so that what arrives can be gathered
over other links while the next step flies. Nothing here orders the steps: a plan does, by tasks; left alone, XLA does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..types import Axes
from .compressed import cut, joined
from .plain import all_gather, group_size


def all_to_all_gather(x: jax.Array, axes: Axes, gather: Axes, dim: int = 0) -> jax.Array:
    """all_gather(all_to_all(x, axes), gather, dim), bit for bit, and so is its transpose but for the order of sums.

    Dim 0 of x is split over the n devices of axes. Sends b (n-1)/n bytes over axes, one n-th at a time, and b (m-1)
    over the m devices of gather. The two tuples may share axes.
    """
    if x.shape[0] % group_size(axes):
        raise ValueError(f"the {group_size(axes)} devices of {axes} must divide dim 0, got shape {x.shape}")
    parts = by_step(cut(x, axes, 0), axes)
    came = [step(part[None], axes, (), s)[0] for s, part in enumerate(parts)]
    met = jnp.stack([all_gather(part[None], gather) for part in came])   # [steps, devices of gather, ...]
    by_device = by_sender(met, axes, gather).swapaxes(0, 1)
    return joined(by_device.reshape(by_device.shape[0], *x.shape), dim)


def step(x_Q: jax.Array, axes: Axes, mates: Axes, shift: int) -> jax.Array:
    """A step of an All-to-All over (*axes, *mates): what the devices `shift` places before this one have for it.

    x_Q: a part for each device of `mates` that is `shift` places further on in `axes`. The result: a part from each
    that is `shift` before. Sends x_Q; for shift 0, without the device's own part. Its transpose is the step -shift.
    """
    n, q = group_size(axes), group_size(mates)
    if shift % n == 0 and q == 1:
        return x_Q
    me = jax.lax.axis_index(mates) if mates else 0
    came = []
    for turn in range(q):   # in each turn one message a device
        part = x_Q[(me + turn) % q]
        if shift % n or turn:
            ways = [(e * q + g, (e + shift) % n * q + (g + turn) % q) for e in range(n) for g in range(q)]
            part = _permuted(part, (*axes, *mates), ways)
        came.append(part)
    return came[0][None] if q == 1 else jnp.stack(came)[(me - jnp.arange(q)) % q]


def _permuted(x: jax.Array, axes: Axes, ways: list[tuple[int, int]]) -> jax.Array:
    """ppermute between places in the group `axes`, whose order may be another than the mesh's."""
    names = tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes)
    places = np.arange(group_size(axes)).reshape([group_size((a,)) for a in names])
    places = places.transpose([names.index(a) for a in axes]).ravel()
    return jax.lax.ppermute(x, names, [(int(places[i]), int(places[j])) for i, j in ways])


def by_step(x_P: jax.Array, axes: Axes) -> jax.Array:
    """Parts for devices 0, 1, ... of the group as parts for the devices 0, 1, ... places further on."""
    return _by_step(x_P, axes)


def from_steps(x_S: jax.Array, axes: Axes) -> jax.Array:
    """The inverse of `by_step`."""
    return x_S[(jnp.arange(group_size(axes)) - index(axes)) % group_size(axes)]


def by_sender(x_SM: jax.Array, axes: Axes, gather: Axes) -> jax.Array:
    """[step, device of gather, ...] as [sender in axes, device of gather, ...], and back: it is its own inverse.

    In step s, device m of the gather got what the one s places before m sent.
    """
    return _by_sender(x_SM, axes, gather)


def _permutation(run: Callable[..., jax.Array], inverse: Callable[..., jax.Array], axes: int) -> Any:
    """run(x, tuples of axes) with its inverse as transpose: a gather where JAX would have a scatter-add."""
    f = jax.custom_vjp(run, nondiff_argnums=tuple(range(1, 1 + axes)))
    f.defvjp(lambda x, *groups: (run(x, *groups), None), lambda *a: (inverse(a[-1], *a[:-2]),))
    return f


def _steps_of(x_P, axes):
    return x_P[(index(axes) + jnp.arange(group_size(axes))) % group_size(axes)]


def _senders_of(x_SM, axes, gather):
    steps_PM = (index(axes, gather) - jnp.arange(group_size(axes))[:, None]) % group_size(axes)
    return x_SM[steps_PM, jnp.arange(group_size(gather))]


_by_step = _permutation(_steps_of, from_steps, 1)
_by_sender = _permutation(_senders_of, _senders_of, 2)


def index(axes: Axes, gather: Axes = ()) -> jax.Array:
    """Place in the group `axes` of each device of this one's group `gather` [m]; without one, of this device."""
    places = jnp.arange(group_size(gather))
    found = jnp.zeros_like(places)
    for axis in axes:
        here = jax.lax.axis_index(axis)
        if axis in gather:
            inner = group_size(gather[gather.index(axis) + 1:])
            here = places // inner % group_size((axis,))
        found = found * group_size((axis,)) + here
    return found
