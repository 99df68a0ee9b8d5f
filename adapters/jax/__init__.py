"""JAX: `adapter` is how its arrays meet cunorm; `nnx` and `linen` have norm layers for Flax, and import it."""

from cunorm.adapters.jax.adapter import ADAPTER

__all__ = ["ADAPTER"]
