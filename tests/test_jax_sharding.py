"""Several devices: sharded jit by GSPMD and Shardy, explicit axes, shard_map, and executables from a cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("jax_sharded_cases.py")
CHECKS = re.findall(r"^def (check_\w+)", CASES.read_text(), re.MULTILINE)


def run(arguments: list[str], **environment: str) -> str:
    """What a process of its own prints, in which JAX has eight CPU devices unless its platform is another."""
    variables = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, *arguments], env=variables | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_parts_on_cpu_devices(partitioner: str) -> None:
    assert run([str(CASES), partitioner, *CHECKS]).split() == CHECKS and CHECKS


@pytest.mark.gpu
def test_parts_on_gpus() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs an NVIDIA GPU beside another")
    run([str(CASES), "shardy", *(name for name in CHECKS if "flax" not in name)], JAX_PLATFORMS="cuda,cpu")


_PROGRAM = """
import sys, jax, jax.numpy as jnp, numpy as np, cunorm
from jax.sharding import NamedSharding, PartitionSpec
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("compilation_cache/cache_hits")))
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.arange(64.0).reshape(16, 4) ** 2
function = jax.jit(lambda x: cunorm.layer_norm(x, eps=0.25))
y = function(jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))))
np.testing.assert_allclose(y, cunorm.layer_norm(x, eps=0.25), rtol=1e-6)
print(sum(hits))
"""


def test_an_executable_from_the_persistent_cache(tmp_path: Path) -> None:
    """Another process has compiled it, and only there was XLA asked which parts each device has."""
    options = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert int(run(["-c", _PROGRAM], **options)) == 0
    assert int(run(["-c", _PROGRAM], **options)) > 0
