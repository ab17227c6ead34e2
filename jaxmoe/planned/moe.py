"""Tasks of MoE layers that do not depend on the layout: routing, statistics, shared experts, and the layer's result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from ..collectives import all_gather, reduce_scatter
from ..compat import vary_over
from ..experts import experts_down, experts_up
from ..norm import rms_norm
from ..plan.block import Block
from ..plan.execute import Verb
from ..plan.tasks import Degrees, Task, family
from ..routing.losses import conclusions, tally, total
from ..routing.tokens import in_group_order, outputs_of, tokens_of
from ..spec import Spec
from ..types import Groups, Routing
from .pieces import by_family, expert_weights, part_of, piece, piece_gradient
from .shared_slots import BY_TOKEN, own_tokens


class Layout(Protocol):
    """A way of moving tokens to experts and back, in chunks. holds_collectives: `choose` and `combine` do."""

    holds_collectives: ClassVar[bool]

    def choose(self, routing: Routing, groups: Groups) -> tuple[dict[str, Any], jax.Array]:
        """Where pairs go, and how many of this device's go nowhere."""
        ...

    def combine(self, back: list, weights_TK, choice: dict[str, Any], extra: dict[str, list]) -> jax.Array:
        """Outputs of the tokens [T, D] from the experts' outputs."""
        ...

    def table(self) -> dict[str, Verb]:
        """Verbs from `pack` to `combine`."""
        ...


@dataclass(frozen=True)
class MoEVerbs:
    """groups: of a device's whole batch. norm_eps: None = no norm before routing, and no residual sum."""

    block: Block
    degrees: Degrees
    spec: Spec
    groups: Groups
    layout: Layout
    norm_eps: float | None

    def table(self) -> dict[str, Verb]:
        return {
            "token_gather": Verb(self.gather, self.gather_gradient),
            "route": Verb(self.route, holds_collectives=self.layout.holds_collectives),
            "tally": Verb(self.tally), "losses": Verb(self.losses),
            "statistics": Verb(self.statistics, self.statistics_gradient),
            "unpack": Verb(self.unpack, self.unpack_gradient, self.layout.holds_collectives),
            "shared_up": Verb(self.shared_up), "shared_down": Verb(self.shared_down),
        }

    @property
    def parts(self) -> int:
        return self.block.token_parts(self.degrees)

    def groups_of_part(self) -> Groups:
        g, parts = self.groups, self.parts
        if self.block.chunk == "sequence":
            return replace(g, tokens=g.tokens // parts)
        if g.local % parts:
            raise ValueError(f"schedule.degrees: chunks along the batch must divide a device's {g.local} capacity "
                             f"groups (moe.group), got {parts}")
        return replace(g, local=g.local // parts)

    def part_of_tokens(self, consts: dict, part: int) -> dict[str, jax.Array]:
        names = [n for n in BY_TOKEN if n in consts]
        return {n: piece([consts[n]], part, self.parts, 1, self.block.token_dim) for n in names}

    def part_of_groups_tokens(self, consts: dict, part: int) -> dict[str, jax.Array]:
        """The same of the devices that share slots, one after the other."""
        dim = 2 * self.block.token_dim
        found = {n: piece([a], part, self.parts, 1, dim) for n, a in consts["group"].items()}
        return {n: a.reshape(a.shape[0], -1, *a.shape[3:]) for n, a in found.items()}

    def residual(self, values: dict[str, list], part: int) -> jax.Array:
        """A part of what attention gave."""
        return piece(values["h"], part, self.parts, self.degrees.dense_forward, self.block.token_dim)

    def gather(self, task: Task, reads, consts):
        """Tokens of all devices that share slots, whole sequences (of a part)."""
        values = by_family(task.reads, reads)
        x_BSD = self.residual(values, part_of(task)) if "h" in values else values["x"][0]
        return (all_gather(x_BSD, self.block.role("model"), 1),)

    def gather_gradient(self, task: Task, cotangents, values, consts):
        d_BSD = reduce_scatter(cotangents[0], self.block.role("model"), 1)
        if family(task.writes[0]) != "h":
            return (d_BSD,)
        return tuple(piece_gradient(d_BSD, part_of(task), self.parts, self.degrees.dense_forward, self.block.token_dim))

    def route(self, task: Task, reads, consts):
        """Where slots are shared, of the whole group's tokens; what leaves is of this device's, but for "n_all"."""
        values, part, shared = by_family(task.reads, reads), part_of(task), self.block.sharers > 1
        groups = self.groups_of_part()
        if shared:
            x_BSD, groups = values["tokens"][0], replace(groups, axes=())
            by_token, own = self.part_of_groups_tokens(consts, part), self.own_tokens
        else:
            x_BSD = self.residual(values, part) if "h" in values else values["x"][0]
            by_token, own = self.part_of_tokens(consts, part), lambda a: a
        if self.norm_eps is not None:
            x_BSD = rms_norm(x_BSD, values["ffn_norm"][0], self.norm_eps)
        tokens, bad_T = tokens_of({"x": x_BSD, **by_token}, groups)
        weights = {n.removeprefix("router_"): w[0] for n, w in values.items() if n.startswith("router_")}
        routing = self.spec.router(weights, tokens, groups, consts.get("bias"), consts.get("key"))
        assert isinstance(routing, Routing)   # blocks of Soft MoE are refused
        choice, dropped = self.layout.choose(routing, groups)
        choice |= {"experts": own(routing.experts_TK), "chosen": own(routing.chosen_TK), "valid": own(tokens.valid_T),
                   "bad": own(bad_T), "dropped": dropped}
        n_TD = tokens.x_TD.astype(self.spec.dtype)
        found = {"n": own(n_TD), "n_all": n_TD, "weights": own(routing.weights_TK), "scores": own(routing.scores_TE),
                 "logits": own(routing.logits_TE), "choice": choice}
        return tuple(found[family(v)] for v in task.writes)

    def own_tokens(self, a_T: jax.Array) -> jax.Array:
        return own_tokens(a_T, self.groups_of_part(), self.block.role("model"))

    def tally(self, task: Task, reads, consts):
        values, groups = by_family(task.reads, reads), self.groups
        parts = self.groups_of_part()

        def whole(arrays):
            cut = [a.reshape(parts.local, -1, *a.shape[1:]) for a in arrays]
            a = cut[0] if len(cut) == 1 else jnp.concatenate(cut, self.block.token_dim)
            return a.reshape(-1, *a.shape[2:])

        choice = {name: whole([c[name] for c in values["choice"]]) for name in ("experts", "chosen", "valid", "bad")}
        dropped = sum(c["dropped"] for c in values["choice"])
        routing = Routing(choice["experts"], whole(values["weights"]), choice["chosen"], whole(values["scores"]),
                          whole(values["logits"]))
        by_token = {n: consts[n] for n in ("mask", "index", "segment")}
        tokens, _ = tokens_of(by_token | {"x": jnp.zeros((*consts["mask"].shape, 1))}, groups)
        tokens = tokens._replace(valid_T=choice["valid"])
        return (tally(routing, tokens, groups, jnp.asarray(dropped), choice["bad"].sum(), self.spec.load_balance),)

    def statistics(self, task: Task, reads, consts):
        return (total(reads[0], self.groups, self.spec.roles.token_axes),)

    def statistics_gradient(self, task: Task, cotangents, values, consts):
        """A sum over devices is pulled back by giving each its cotangent; maxima have none."""
        (d_sums,) = cotangents
        d_tally = {n: d for n, d in d_sums.items() if n != "largest_load"}
        E, local = self.spec.num_experts, self.groups.local
        d_tally["loads_GE"] = jnp.zeros((local, E), d_tally["pairs_E"].dtype)
        return (vary_over(d_tally, self.spec.roles.token_axes if self.spec.mesh is not None else ()),)

    def losses(self, task: Task, reads, consts):
        spec, groups = self.spec, self.groups
        fair_load = spec.router.pairs_per_token(spec.num_experts) * groups.tokens / spec.num_experts
        return (conclusions(reads[0], spec.load_balance, fair_load),)

    def unpack(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        y_BSD = self._outputs(values, consts)
        if "h" not in values:
            return (y_BSD,)
        return (self.residual(values, part_of(task)) + y_BSD,)

    def _outputs(self, values: dict[str, list], consts):
        choice, groups = values["choice"][0], self.groups_of_part()
        y_TD = self.layout.combine(values["back"], values["weights"][0], choice, values)
        B, S = consts["mask"].shape
        shape = (B, S // self.parts) if self.block.chunk == "sequence" else (B // self.parts, S)
        y_BSD = outputs_of(y_TD, choice["valid"], choice["bad"], shape, groups).astype(self.spec.dtype)
        if "shared" in values:
            y_BSD = y_BSD + outputs_of(values["shared"][0], choice["valid"], choice["bad"], shape, groups)
        return y_BSD

    def unpack_gradient(self, task: Task, cotangents, values, consts):
        """Residual and shared parts get the cotangent itself; no value of theirs is needed."""
        (d_BSD,) = cotangents
        wants = [v.removeprefix("d:") for v in task.writes]
        pulled = [v for v in wants if v in values]
        names = tuple(values)

        def run(*wanted):
            at = values | dict(zip(pulled, wanted, strict=True))
            return self._outputs(by_family(names, tuple(at[v] for v in names)), consts)

        _, pullback = jax.vjp(run, *(values[v] for v in pulled))
        found = dict(zip(pulled, pullback(d_BSD), strict=True))
        choice = next(v for n, v in values.items() if n.startswith("choice"))
        parts = piece_gradient(d_BSD, part_of(task), self.parts, self.degrees.dense_forward, self.block.token_dim)
        residual = iter(parts)
        for v in wants:
            if v.startswith("h."):
                found[v] = next(residual)
            elif v.startswith("shared."):
                d_TD = in_group_order(d_BSD, self.groups_of_part())
                found[v] = jnp.where(choice["valid"][:, None], d_TD, 0)
        return tuple(found[v] for v in wants)

    def shared_up(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        w = expert_weights(values, "shared_")
        n_TD = values["n"][0]
        return (experts_up(jnp.broadcast_to(n_TD, (1, w.up_EDF.shape[0], *n_TD.shape)), w),)

    def shared_down(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        w = expert_weights(values, "shared_")
        return (experts_down(values["shared_hidden"][0], w, self.spec.activation)[0].sum(0),)
