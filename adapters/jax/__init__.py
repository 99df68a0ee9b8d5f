"""JAX: `adapter` is how its tensors meet cunorm."""

from cunorm.adapters.jax.adapter import ADAPTER

__all__ = ["ADAPTER"]
