"""The MuZero model: representation h, dynamics g and prediction f (Schrittwieser et al., arXiv:1911.08265)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from muzerox.config import NetworkConfig
from muzerox.errors import ConfigError
from muzerox.networks.layers import Embed, linear, relu
from muzerox.networks.torso import MLP, Downsample, ResNet, flatten, from_bytes, scale_hidden
from muzerox.precision import Policy
from muzerox.types import EnvSpec, Params

_NEIGHBOURS = 9  # of a cell in a 3x3 convolution, itself counted


class Model(NamedTuple):
    """The three networks as pure functions. Outputs are float32 at every precision level.

    init(key) -> params (nested dict, float32)
    represent(params, observation [B, ...]) -> hidden [B, ...], in [0, 1]
    dynamics(params, hidden, action [B] int32) -> hidden, reward logits [B, bins]; in two parts, for who advances many times:
    advance(params, hidden, action [B] int32) -> hidden, features [B, ...] of the step
    reward(params, features) -> reward logits [B, bins]
    predict(params, hidden) -> policy logits [B, A], value logits [B, bins]
    row_bytes: of the largest array that a convolution makes of a row, the neighbours of every cell; 0 where there is none
    """

    init: Callable[[jax.Array], Params]
    represent: Callable[[Params, jax.Array], jax.Array]
    dynamics: Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    advance: Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    reward: Callable[[Params, jax.Array], jax.Array]
    predict: Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]]
    row_bytes: int


class VectorNetworks(nnx.Module):
    """Networks for observations without spatial structure; the hidden state is [B, width]."""

    def __init__(self, config: NetworkConfig, spec: EnvSpec, *, dtype: str, rngs: nnx.Rngs):
        width, depth, bins = config.width, config.depth, config.num_bins

        def torso(inputs: int, layers: int) -> MLP:
            return MLP(inputs, width, layers, dtype=dtype, rngs=rngs)

        self.representation = torso(math.prod(spec.observation_shape), depth)
        self.embedding = linear(width, width, dtype=dtype, rngs=rngs)
        # Hidden state and one-hot action enter the dynamics as a sum of two products; the second is a row look-up.
        self.hidden_in = linear(width, width, dtype=dtype, rngs=rngs)
        self.action_in = Embed(
            spec.num_actions, width, dtype=dtype, rngs=rngs, embedding_init=nnx.initializers.normal(1.0 / math.sqrt(width))
        )
        self.transition = torso(width, depth - 1)
        self.hidden_out = linear(width, width, dtype=dtype, rngs=rngs)
        self.prediction = torso(width, depth)
        self.reward_head = _head(width, bins, dtype, rngs)
        self.policy_head = _head(width, spec.num_actions, dtype, rngs)
        self.value_head = _head(width, bins, dtype, rngs)
        self.dtype = dtype

    def represent(self, observation: jax.Array) -> jax.Array:
        return scale_hidden(self.embedding(self.representation(from_bytes(flatten(observation), self.dtype))))

    def advance(self, hidden: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.transition(relu(self.hidden_in(hidden) + self.action_in(action)))
        return scale_hidden(hidden.astype(jnp.float32) + self.hidden_out(x).astype(jnp.float32)), x

    def reward(self, x: jax.Array) -> jax.Array:
        return self.reward_head(x).astype(jnp.float32)

    def predict(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.prediction(hidden)
        return self.policy_head(x).astype(jnp.float32), self.value_head(x).astype(jnp.float32)


class GridNetworks(nnx.Module):
    """Networks for images and boards [H, W, C]; the hidden state is [B, H, W, width], that of a large image at most 8x8 cells."""

    def __init__(self, config: NetworkConfig, spec: EnvSpec, *, dtype: str, rngs: nnx.Rngs):
        height, wide, channels = spec.observation_shape
        width, depth, bins = config.width, config.depth, config.num_bins
        self.smaller = Downsample(channels, width, height, wide, dtype=dtype, rngs=rngs)
        height, wide = self.smaller.height, self.smaller.width
        self.cells = height * wide  # of the hidden state
        self.representation = ResNet(self.smaller.outputs, width, depth, dtype=dtype, rngs=rngs)
        # A learnt plane an action: where a move lands on the board is not known to an adapter, so it is learnt.
        self.action_in = Embed(
            spec.num_actions, height * wide, dtype=dtype, rngs=rngs, embedding_init=nnx.initializers.normal(1.0)
        )
        self.transition = ResNet(width + 1, width, depth, dtype=dtype, rngs=rngs)
        self.prediction = ResNet(width, width, max(depth // 2, 1), dtype=dtype, rngs=rngs)
        self.reward_reduce, self.reward_head = _grid_head(width, height * wide, bins, dtype, rngs)
        self.policy_reduce, self.policy_head = _grid_head(width, height * wide, spec.num_actions, dtype, rngs)
        self.value_reduce, self.value_head = _grid_head(width, height * wide, bins, dtype, rngs)
        self.dtype = dtype

    def represent(self, observation: jax.Array) -> jax.Array:
        return scale_hidden(self.representation(self.smaller(from_bytes(observation, self.dtype))))

    def advance(self, hidden: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        plane = self.action_in(action).reshape(*hidden.shape[:-1], 1)
        x = self.transition(jnp.concatenate([hidden.astype(self.dtype), plane], axis=-1))
        return scale_hidden(hidden.astype(jnp.float32) + x.astype(jnp.float32)), x

    def reward(self, x: jax.Array) -> jax.Array:
        return self._read(self.reward_reduce, self.reward_head, x)

    def predict(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.prediction(hidden.astype(self.dtype))
        return self._read(self.policy_reduce, self.policy_head, x), self._read(self.value_reduce, self.value_head, x)

    @staticmethod
    def _read(reduce: nnx.Linear, head: nnx.Linear, x: jax.Array) -> jax.Array:
        return head(flatten(relu(reduce(x)))).astype(jnp.float32)


def _head(inputs: int, outputs: int, dtype: str, rngs: nnx.Rngs) -> nnx.Linear:
    # Zero weights: the first searches see a uniform policy and a value of exactly 0.
    return linear(inputs, outputs, dtype=dtype, rngs=rngs, kernel_init=nnx.initializers.zeros)


def _grid_head(channels: int, cells: int, outputs: int, dtype: str, rngs: nnx.Rngs) -> tuple[nnx.Linear, nnx.Linear]:
    reduced = 8  # a 1x1 convolution to few channels before the dense layer keeps large boards affordable
    return linear(channels, reduced, dtype=dtype, rngs=rngs), _head(reduced * cells, outputs, dtype, rngs)


def make_model(config: NetworkConfig, spec: EnvSpec, policy: Policy) -> Model:
    """The model for an environment at a precision level.

    Raises:
      ConfigError: ``network.kind = resnet`` for observations that are not [H, W, C].
    """
    shape = spec.observation_shape
    grid = len(shape) == 3
    if config.kind == "resnet" and not grid:
        raise ConfigError("network.kind", "resnet", f"needs observations [H, W, C], {spec.id} has {list(shape)}", "mlp")
    # A 3x3 convolution sees all of a board as small as tic_tac_toe's: nothing is shared, and dense layers cost less.
    wanted = grid and min(shape[:2]) >= 4 if config.kind == "auto" else config.kind == "resnet"
    networks = GridNetworks if wanted else VectorNetworks

    def build(key: jax.Array) -> nnx.Module:
        return networks(config, spec, dtype=policy.compute, rngs=nnx.Rngs(key))

    # Only the structure is needed here: nothing is computed or allocated.
    structure = nnx.eval_shape(lambda: build(jax.random.key(0)))
    graphdef, _ = nnx.split(structure)
    row_bytes = 4 * _NEIGHBOURS * config.width * structure.cells if isinstance(structure, GridNetworks) else 0

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(build(key)))

    def represent(params: Params, observation: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params).represent(observation)

    def advance(params: Params, hidden: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        return nnx.merge(graphdef, params).advance(hidden, action)

    def reward(params: Params, features: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params).reward(features)

    def dynamics(params: Params, hidden: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        following, features = advance(params, hidden, action)
        return following, reward(params, features)

    def predict(params: Params, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        return nnx.merge(graphdef, params).predict(hidden)

    return Model(init, represent, dynamics, advance, reward, predict, row_bytes)
