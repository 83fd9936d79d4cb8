"""Llama-3.1-8B is planned, split and differentiated on shapes alone, in a process of its own that is watched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import pathlib, re, time
import haiku as hk, jax, jax.numpy as jnp
import pdlib
from tests.rewrite.architectures import LLAMA_8B, llama_net

transformed = hk.without_apply_rng(hk.transform(llama_net(LLAMA_8B)))
ids = jax.ShapeDtypeStruct((8, 512), jnp.int32)
params = jax.eval_shape(transformed.init, jax.random.key(0), ids)
total = sum(leaf.size for leaf in jax.tree.leaves(params))
before = len(jax.live_arrays())
start = time.perf_counter()
plan = pdlib.Target(transformed.apply, params).plan(ids)
sites = plan.sites("model/layers_18/mlp/*")
seconds = time.perf_counter() - start

C = 24_576
def shape(*size, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(size, dtype)
factors = {n: pdlib.Factors(shape(s.d_in, C), shape(C, s.d_out)) for n, s in sites.items()}
masks = {n: {"mask": shape(*s.positions[n], C), "delta": shape(*s.positions[n], 1)} for n, s in sites.items()}
_, taps = jax.eval_shape(lambda p, x: plan.clean(p, x, taps=list(sites)), params, ids)
prefix, suffix = plan.split(list(sites))
residuals = jax.eval_shape(prefix, params, ids)
gradient = jax.grad(lambda f, m, p, r: jnp.mean(suffix(p, r, f, m).astype(jnp.float32)), (0, 1))
out = jax.eval_shape(gradient, factors, masks, params, residuals)
assert jax.tree.map(lambda a: a.shape, out) == jax.tree.map(lambda a: a.shape, (factors, masks))
sizes = dict(zip(plan.names, (leaf.size for leaf in jax.tree.leaves(params))))
part = lambda names: sum(sizes[name] for name in names) / total
print(total, len(plan.sites("*")), sorted((s.d_in, s.d_out) for s in sites.values()))
print([tap.input.shape for tap in taps.values()], [r.shape for r in residuals])
print(round(part(suffix.params), 3), round(part(prefix.params), 3))
# the peak of this program: getrusage has that of the process that started it, if it was higher
status = pathlib.Path("/proc/self/status").read_text()
print(seconds, int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 1024, len(jax.live_arrays()) - before)
"""


def test_the_8b_model_is_planned_in_five_seconds_and_400_mb_and_nothing_is_allocated():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, third, fourth = done.stdout.splitlines()
    assert first == f"8030261248 226 {[(4096, 14336), (4096, 14336), (14336, 4096)]}"
    assert second == f"{[(8, 512, 14336), (8, 512, 4096), (8, 512, 4096)]} {[(8, 512, 4096)] * 2}"
    assert third == "0.44 0.56"
    seconds, megabytes, arrays = map(float, fourth.split())
    assert seconds < 5
    assert megabytes < 400
    assert arrays == 0
