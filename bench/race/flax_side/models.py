"""The lanes' models in Flax, with images last in channels. Layers have the names of the torch modules whose weights
they take: kernels are those weights turned, see `contenders/jax_flax.py`.

Runs in an environment of its own, which has neither torch nor Podium.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

Batch = dict[str, jax.Array]


class BatchNorm(nn.Module):
    """Batch norm whose running variance is that of torch: of N values the sum of squares over N - 1."""

    momentum: float = 0.1
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        num = x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (num,))
        bias = self.param("bias", nn.initializers.zeros, (num,))
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (num,))
        running_var = self.variable("batch_stats", "var", jnp.ones, (num,))
        axes, count = tuple(range(x.ndim - 1)), x.size // num
        mean = x.mean(axes)
        var = jnp.square(x - mean).mean(axes)
        if not self.is_initializing():
            keep = 1 - self.momentum
            running_mean.value = keep * running_mean.value + self.momentum * mean
            running_var.value = keep * running_var.value + self.momentum * var * (count / (count - 1))
        return (x - mean) * (jax.lax.rsqrt(var + self.eps) * scale) + bias


def max_pool(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Take the maximum of windows that do not overlap.

    By a reshape: the gradient of `nn.max_pool` is a scatter, which is many times slower on processors.
    """
    kept = tuple(slice(0, size // pool * pool) for size, pool in zip(x.shape[1:-1], sizes, strict=True))
    x = x[(slice(None), *kept)]
    split = [part for size, pool in zip(x.shape[1:-1], sizes, strict=True) for part in (size // pool, pool)]
    return x.reshape(x.shape[0], *split, x.shape[-1]).max(tuple(range(2, 2 * len(sizes) + 1, 2)))


class Mnist(nn.Module):
    """(n, 28, 28, 1) -> (n, 10)"""

    options: dict[str, Any]

    @nn.compact
    def __call__(self, image: jax.Array, train: bool) -> jax.Array:
        first, second = self.options["filters"]
        x = nn.relu(max_pool(nn.Conv(first, (3, 3), padding="VALID", name="conv1.0")(image), (2, 2)))
        x = nn.relu(max_pool(nn.Conv(second, (3, 3), padding="VALID", name="conv2.0")(x), (2, 2)))
        x = nn.relu(nn.Dense(self.options["hidden"], name="hidden.1")(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(self.options["dropout"], deterministic=not train)(x)
        return nn.Dense(self.options["num_classes"], name="output.0")(x)


class Neuron(nn.Module):
    """(n, 1600, 4) -> (n, 15)"""

    options: dict[str, Any]
    num_outputs: int = 15

    @nn.compact
    def __call__(self, frames: jax.Array, train: bool) -> jax.Array:
        x = frames
        shape = zip(self.options["filters"], self.options["kernels"], self.options["pools"], strict=True)
        for number, (filters, kernel, pool) in enumerate(shape, start=1):
            name = f"conv{number}.{1 if number == 1 else 0}"
            x = nn.relu(max_pool(nn.Conv(filters, (kernel,), padding="VALID", name=name)(x), (pool,)))
        x = BatchNorm(name="norm")(x.reshape(x.shape[0], -1), train)
        for number, width in enumerate(self.options["linear"], start=1):
            x = nn.relu(nn.Dense(width, name=f"linear{number}.0")(x))
            x = nn.Dropout(self.options["dropout"], deterministic=not train)(x)
        return nn.Dense(self.num_outputs, name="output")(x)


class ResNet(nn.Module):
    """(n, 32, 32, 3) -> (n, 10), with shortcuts that have no parameters."""

    options: dict[str, Any]
    num_classes: int = 10

    @nn.compact
    def __call__(self, image: jax.Array, train: bool) -> jax.Array:
        def conv(x: jax.Array, out: int, stride: int, name: str) -> jax.Array:
            return nn.Conv(out, (3, 3), (stride, stride), padding=1, use_bias=False, name=name)(x)

        x = nn.relu(BatchNorm(name="stem.1")(conv(image, 16, 1, "stem.0"), train))
        for stage in range(3):
            out = 16 << stage
            for index in range((self.options["size"] - 2) // 6):
                stride = 2 if stage and not index else 1
                name = f"blocks.block{stage + 1}_{index + 1}.branch"
                y = nn.relu(BatchNorm(name=f"{name}.1")(conv(x, out, stride, f"{name}.0"), train))
                y = BatchNorm(name=f"{name}.4")(conv(y, out, 1, f"{name}.3"), train)
                if stride > 1:
                    x = jnp.pad(x[:, ::2, ::2], [(0, 0)] * 3 + [(0, out - x.shape[-1])])
                x = nn.relu(y + x)
        return nn.Dense(self.num_classes, name="head.2")(x.mean((1, 2)))


class Gpt2(nn.Module):
    """(n, tokens) -> (n, tokens, vocabulary); the head shares the table of the embedding."""

    options: dict[str, Any]

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        options, size = self.options, tokens.shape[1]
        hidden, heads, eps = options["hidden"], options["heads"], options["norm_eps"]

        def norm(x: jax.Array, name: str) -> jax.Array:
            return nn.LayerNorm(eps, name=name)(x)

        def dropout(x: jax.Array) -> jax.Array:
            return nn.Dropout(options["dropout"], deterministic=not train)(x)

        table = nn.Embed(options["vocabulary"], hidden, name="embedding.tokens")
        positions = nn.Embed(options["context"], hidden, name="embedding.positions")
        x = dropout(table(tokens) + positions.embedding[:size])
        mask = nn.make_causal_mask(tokens[:1])
        for number in range(options["layers"]):
            name = f"blocks.{number}"
            qkv = nn.Dense(3 * hidden, name=f"{name}.attention.qkv")(norm(x, f"{name}.attention_norm"))
            query, key, value = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, heads, -1), 2, 0)
            drawn = self.make_rng("dropout") if train and options["dropout"] else None
            y = nn.dot_product_attention(
                query, key, value, mask=mask, broadcast_dropout=False, dropout_rng=drawn,
                dropout_rate=options["dropout"] if drawn is not None else 0.0, deterministic=drawn is None,
            )  # fmt: skip
            x = x + dropout(nn.Dense(hidden, name=f"{name}.attention.out")(y.reshape(x.shape)))
            y = nn.Dense(4 * hidden, name=f"{name}.feed_forward.wide")(norm(x, f"{name}.feed_forward_norm"))
            x = x + dropout(nn.Dense(hidden, name=f"{name}.feed_forward.out")(nn.gelu(y, approximate=True)))
        return table.attend(norm(x, "head.norm"))


def _mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _of_labels(apply: Callable[..., Any], batch: Batch) -> Any:
    logits, state = apply(batch["image"])
    return _mean_cross_entropy(logits, batch["label"]), state


def _of_targets(apply: Callable[..., Any], batch: Batch) -> Any:
    output, state = apply(batch["frames"])
    return jnp.square(output - batch["target"]).mean(), state


def _of_next_tokens(apply: Callable[..., Any], batch: Batch) -> Any:
    tokens = batch["tokens"]
    logits, state = apply(tokens[:, :-1])
    return _mean_cross_entropy(logits, tokens[:, 1:]), state


#: kind -> the model, and its mean loss given what applies it
MODELS: dict[str, tuple[type[nn.Module], Callable[..., Any]]] = {
    "mnist": (Mnist, _of_labels),
    "neuron": (Neuron, _of_targets),
    "resnet": (ResNet, _of_labels),
    "gpt2": (Gpt2, _of_next_tokens),
}
