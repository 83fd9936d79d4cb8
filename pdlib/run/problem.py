"""A specification made concrete around a trained target, on a mesh of devices; touches no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdlib.errors import RunSpecError
from pdlib.items.contracts import default_registry
from pdlib.items.state import Decomposition, Site, TrainState, init_decomposition, named_key
from pdlib.method.importance import ImportanceFn, lower_squash
from pdlib.method.initialise import can_spread, spread_factors
from pdlib.method.model import Clean, Model, cast, decompose
from pdlib.method.objective import Term
from pdlib.method.optimizers import Optimizers
from pdlib.method.step import init_adversaries, init_state, make_loop, make_step, warm_up
from pdlib.method.truth import dense_error, identity_error, recovery
from pdlib.run.build import counts_of, importance_of, optimizers_of, select_names, task_of, terms_of
from pdlib.run.spec import RunSpec
from pdlib.store.decomposition import PROCESS, PRODUCT
from pdlib.targets.target import Target
from pdlib.targets.task import Task

_BATCHES, _BLOCK = 16, 32 * 2**20  # at most so many batches, or bytes of them, go to the devices at a time


class Inputs(NamedTuple):
    """What an update reads besides the state.

    Attributes:
        params: the target's.
        batches: of steps from `first` on, `[steps, batch, …]`; None where batches are drawn on the devices.
        first: see there.
    """

    params: Any
    batches: Any = None
    first: Any = None


@dataclass(frozen=True)
class Problem:
    """What a run computes with.

    Attributes:
        spec: the specification.
        task: its target.
        params: of the target, trained; or abstract, where nothing is to be computed.
        devices: that the batch, and C of each site, are split over; all when None.
    """

    spec: RunSpec
    task: Task
    params: Any
    devices: Sequence[Any] | None = None

    @property
    def key(self) -> jax.Array:
        """The root of everything random in the run."""
        return jax.random.key(self.spec.seed)

    @cached_property
    def mesh(self) -> Mesh:
        """`data`, over which a batch is split, by `fsdp`, over which C is.

        Raises:
            RunSpecError: the sizes do not divide.
        """
        devices = np.array(jax.devices() if self.devices is None else self.devices)
        training, count = self.spec.training, len(devices)
        if count % training.fsdp:
            raise RunSpecError(f"training.fsdp: {training.fsdp} does not divide the {count} devices; change it")
        rows = count // training.fsdp
        if training.batch % rows:
            raise RunSpecError(
                f"training.batch: {training.batch} is not split evenly over {rows} of the {count} devices; change it, "
                "or training.fsdp"
            )
        for site, C in self.counts.items():
            if C % training.fsdp:
                raise RunSpecError(f"decomposition: C = {C} of {site} is not split evenly by training.fsdp; change one")
        return Mesh(devices.reshape(rows, training.fsdp), ("data", "fsdp"))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The decomposed sites, in the order of the model."""
        return select_names(self.spec.decomposition.sites, list(self.task.sites), what="site of decomposition.sites")

    @cached_property
    def counts(self) -> dict[str, int]:
        """C of each site."""
        return counts_of(self.spec.decomposition, self.names)

    @property
    def dtype(self) -> Any:
        """What forwards run in."""
        return jnp.dtype(self.spec.training.compute_dtype)

    @cached_property
    def shapes(self) -> dict[str, Site]:
        """Shape and C of each site."""
        weights = jax.eval_shape(self.model.weights, self.params)
        shapes = {name: weights[name].shape for name in self.names}
        return {name: Site(d_in, d_out, self.counts[name]) for name, (d_in, d_out) in shapes.items()}

    @cached_property
    def model(self) -> Model:
        """The target, traced for batches of the run."""
        return self.model_for(self.abstract_batch)

    def model_for(self, batch: Any) -> Model:
        """The target, traced for batches of these shapes, in the dtype that forwards run in."""
        frozen = jax.eval_shape(lambda p: cast(p, self.dtype), self.params)
        plan = Target(self.task.apply, frozen).plan(batch)
        sites = {name: self.task.sites[name] for name in self.names}
        return decompose(plan, sites, self.task.loss, taps=self._named_taps)

    @cached_property
    def abstract_batch(self) -> Any:
        """A batch of the run by shapes, in the dtype that forwards run in."""
        if self.task.corpus is not None:
            return jax.eval_shape(lambda x: cast(x, self.dtype), self.task.corpus.abstract(self.spec.training.batch))
        return jax.eval_shape(self._sample, self.key)

    @cached_property
    def clean(self) -> Clean:
        """The shapes of a clean forward."""
        frozen = jax.eval_shape(lambda p: cast(p, self.dtype), self.params)
        return jax.eval_shape(self.model.clean, frozen, self.abstract_batch)

    @cached_property
    def importance(self) -> ImportanceFn:
        """The importance function."""
        widths = {name: x.shape[-1] for name, x in self.clean.taps.items() if name not in self.names}
        return importance_of(self.spec.importance, self.names, widths)

    @cached_property
    def terms(self) -> dict[str, Term]:
        """The objective."""
        return terms_of(self.spec, self.names)

    @cached_property
    def optimizers(self) -> Optimizers:
        """Of V and U, and of the importance function."""
        return optimizers_of(self.spec)

    @cached_property
    def placed_params(self) -> Any:
        """The target's parameters on every device."""
        return jax.device_put(self.params, NamedSharding(self.mesh, PartitionSpec()))

    @cached_property
    def loop(self) -> Callable[[TrainState, Inputs, Any], Any]:
        """`(state, inputs, count) → (state, metrics)`; see `pdlib.method.step.make_loop`, and `advance`."""
        over_data = NamedSharding(self.mesh, PartitionSpec("data"))
        shardings = self.shardings(self.abstract_state())
        key = named_key(self.key, "train")

        def update(state: TrainState, inputs: Inputs) -> Any:
            def sample(key: Any) -> Any:
                if inputs.batches is None:
                    batch = self._sample(key)
                else:
                    now = state.training.step - inputs.first
                    batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, now, keepdims=False), inputs.batches)
                return jax.lax.with_sharding_constraint(cast(batch, self.dtype), over_data)

            step = make_step(
                self.model, self.importance, self.terms, self.optimizers, sample, key, compute_dtype=self.dtype
            )
            state, metrics = step(state, inputs.params)
            return jax.lax.with_sharding_constraint(state, shardings), metrics

        return make_loop(update)

    def advance(self, state: TrainState, step: int, count: int) -> tuple[TrainState, dict[str, Any]]:
        """`count` updates of a state that has made `step`; donates it. Returns the metrics of the last one.

        Batches from the host go to the devices several at a time, those of the next piece while the last one computes.
        """
        if self.task.corpus is None:
            return self.loop(state, Inputs(self.placed_params), count)
        metrics: dict[str, Any] = {}
        most = max(1, min(_BATCHES, _BLOCK // _nbytes(self.abstract_batch)))  # always, so that one program serves all
        for first in range(step, step + count, most):
            now = min(most, step + count - first)
            state, metrics = self.loop(
                state, Inputs(self.placed_params, self._block(first, now, most), np.int32(first)), now
            )
        return state, metrics

    def _sample(self, key: Any) -> Any:
        assert self.task.sample is not None
        return cast(self.task.sample(key, self.spec.training.batch), self.dtype)

    def _block(self, first: int, count: int, most: int) -> Any:
        """The batches of some steps, `[most, batch, …]`, the last one repeated to the end."""
        assert self.task.corpus is not None
        read = [self.task.corpus.batch(self.spec.seed, first + i, self.spec.training.batch) for i in range(count)]
        read += [read[-1]] * (most - count)
        stacked = jax.tree.map(lambda *each: np.stack(each), *read)
        return jax.device_put(stacked, NamedSharding(self.mesh, PartitionSpec(None, "data")))

    def initial_product(self) -> Decomposition:
        """The product before step 0: drawn or spread, and warmed up for faithfulness; on the mesh."""
        abstract = jax.eval_shape(self._product, self.params)
        place = self._shardings(PRODUCT, abstract)
        return jax.jit(self._product, out_shardings=place)(self.placed_params)

    def initial_state(self, product: Decomposition) -> TrainState:
        """The state before step 0 around a product; on the mesh."""
        place = self.shardings(jax.eval_shape(self._state, product))
        state = jax.jit(self._state, out_shardings=place)(product)
        return jax.tree.map(lambda x: x.copy(), state)  # no two leaves in one buffer: the loop donates them

    def abstract_state(self) -> TrainState:
        """The abstract twin of the state: what a restore asks for."""
        return jax.eval_shape(lambda p: self._state(self._product(p)), self.params)

    def shardings(self, state: TrainState) -> TrainState:
        """Where each leaf of a state lies, by the contracts."""
        return TrainState(
            self._shardings(PRODUCT, state.decomposition),
            self._shardings(PROCESS, state.training),
        )

    def importance_on_probe(self, product: Decomposition) -> dict[str, Any]:
        """Lower importance `[features, C]` of each site on one active feature at a time; nothing without a probe."""
        if self.task.probe is None:
            return {}
        probe = jnp.asarray(self.task.probe)
        model = self.model_for(cast(probe, self.dtype))

        def compute(params: Any, product: Decomposition) -> dict[str, Any]:
            clean = model.clean(cast(params, self.dtype), cast(probe, self.dtype))
            logits = self.importance.apply(product.ci_fn, product.components, cast(clean.taps, jnp.float32))
            return {site: lower_squash(x) for site, x in logits.items()}

        return jax.device_get(jax.jit(compute)(self.params, product))

    def results(self, product: Decomposition) -> dict[str, Any]:
        """What was found of what is known of the target: recovery of features, identity and dense errors."""
        found: dict[str, Any] = {}
        site = self.task.recover
        if site in self.names:
            W = jax.device_get(self.model.weights(self.params)[site])
            measured = recovery(W, jax.device_get(product.components[site]))
            found |= {"features": len(W), "features_recovered": measured.recovered}
            found |= {"mmcs": measured.mmcs, "ml2r": measured.ml2r}
        ci = self.importance_on_probe(product)
        for site, (kind, size) in self.task.truth.items():
            if site in self.names:
                error = identity_error(ci[site]) if kind == "identity" else dense_error(ci[site], size)
                found.setdefault(f"{kind}_error", {})[site] = error
        return found

    @property
    def _named_taps(self) -> tuple[str, ...]:
        chunks = getattr(self.spec.importance, "chunks", ())
        globs = [glob for chunk in chunks for glob in chunk.taps]
        return tuple(glob for glob in globs if glob not in self.task.sites)

    def _product(self, params: Any) -> Decomposition:
        weights, table = self.model.weights(params), self.spec.decomposition
        product = init_decomposition(named_key(self.key, "init"), self.shapes, self.importance.init)
        if table.init == "spread":
            for name, site in self.shapes.items():
                if not can_spread(site):
                    raise RunSpecError(
                        f"decomposition.init: 'spread' needs C of at least {min(site.d_in, site.d_out)} at {name}, "
                        f"which has {site.C}; change it, or decomposition.C"
                    )
            spread = {
                name: spread_factors(named_key(self.key, f"spread/{name}"), weights[name], site.C)
                for name, site in self.shapes.items()
            }
            product = product._replace(components=spread)
        how = self.spec.warm_up
        components = warm_up(product.components, weights, steps=how.steps, learning_rate=how.learning_rate)
        return product._replace(components=components)

    def _state(self, product: Decomposition) -> TrainState:
        positions = {name: self.clean.taps[name].shape[:-1] for name in self.names}
        adversaries = init_adversaries(self.terms, self.key, positions, self.counts)
        return init_state(product, self.optimizers, adversaries)

    def _shardings(self, item: str, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding, default_registry().abstract(item, tree, self.mesh))


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def pretrain(spec: RunSpec) -> Any:
    """The parameters of the target that the specification and its seed determine."""
    return task_of(spec).pretrain(named_key(jax.random.key(spec.seed), "target"))
