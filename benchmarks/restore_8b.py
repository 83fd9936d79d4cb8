"""What it costs to open, read and resume a run of the size of Llama-3.1-8B's layer 18: pdlib beside orbax, in one run.

    uv run python benchmarks/restore_8b.py [--scale small | half | full] [--home DIR]

`full` has the exact shapes (d 4096, ff 14336, C 24576, importance transformer of width 4096 with 4 blocks: 9.9 GB of
product, 20 GB of process); `half` halves every width (2.5 and 5 GB), `small` quarters them (0.6 and 1.2 GB). Every
contender runs in a fresh process, from a warm and from a cold page cache. Ratios come first. Contenders that would need
more memory than the machine has are left out, and named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Result, bars, keep, machine, measure, megabytes, table

SCALES = {"small": 4, "half": 2, "full": 1}

SHAPES = """
import jax, jax.numpy as jnp, numpy as np, optax
from pdlib.items.state import Site, TrainingItem, TrainState, Decomposition, init_decomposition
from pdlib.method.transformer import Chunk, Sizes, chunkwise_transformer
d, ff, C, m, h = (n // SCALE for n in (4096, 14336, 24576, 4096, 16384))
sites = {f"layers.18.mlp.{n}_proj": Site(i, o, C) for n, i, o in (("gate", d, ff), ("up", d, ff), ("down", ff, d))}
importance = chunkwise_transformer([Chunk(("layers.18.mlp.gate_proj",), tuple(sites))], Sizes(m, 4, 64 // SCALE, h))
optimizer = optax.adamw(1e-4)
def initial(key):
    product = init_decomposition(key, sites, importance.init)
    sources = {s: jnp.zeros((1, 2048 // SCALE, C + 1)) for s in sites}
    adversary = {"sources": sources, "m": sources, "v": sources, "count": jnp.float32(0)}
    process = TrainingItem(optimizer.init(product.components), optimizer.init(product.ci_fn), {"ppgd": adversary},
                           jnp.int32(0))
    return TrainState(product, process)
abstract = jax.eval_shape(initial, jax.random.key(0))
"""

# Values are views of one file of normal numbers: a state larger than memory can be written, no two leaves are alike,
# and they compress as weights do.
VALUES = """
import math
from pathlib import Path
pool = np.memmap(POOL, np.uint8, mode="r")
offset = [0]
def values(leaf):
    nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
    if nbytes < 64:
        return np.ones(leaf.shape, leaf.dtype)
    offset[0] = (offset[0] + 4096 * 7919) % (len(pool) - nbytes) // 4096 * 4096
    return pool[offset[0]:offset[0] + nbytes].view(leaf.dtype).reshape(leaf.shape)
state = jax.tree.map(values, abstract)
"""

WRITE = """
from pdlib.store import Manager, save_state
with Manager(HOME + "/one/ckpts") as manager:
    save_state(manager, 1, state)
if TENFOLD:
    batch = jax.ShapeDtypeStruct((8, 2048 // SCALE, C + 1), jnp.float32)
    three = ("sources", "m", "v")
    more = lambda: {name: {s: values(batch) for s in sites} for name in three} | {"count": np.float32(0)}
    adversaries = dict(state.training.adversaries)
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    wanted = 10 * size(state.training)
    while size(state.training._replace(adversaries=adversaries)) < wanted:
        adversaries[f"ppgd{len(adversaries)}"] = more()
    with Manager(HOME + "/tenfold/ckpts") as manager:
        save_state(manager, 1, state._replace(training=state.training._replace(adversaries=adversaries)))
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
for count in (4, 8):
    part = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("fsdp",))
    def place(leaf):
        axis = next((i for i, n in enumerate(leaf.shape) if n == C), None)
        spec = jax.P(*("fsdp" if i == axis else None for i in range(leaf.ndim)))
        return jax.device_put(leaf, jax.NamedSharding(part, spec))
    with Manager(HOME + f"/shards{count}/ckpts") as manager:
        manager.save(1, {"decomposition": jax.tree.map(place, state.decomposition)})
import orbax.checkpoint as ocp, safetensors.numpy
plain = {"product": {"components": {s: list(f) for s, f in state.decomposition.components.items()},
                     "ci_fn": state.decomposition.ci_fn}}
ocp.PyTreeCheckpointer().save(HOME + "/orbax_product", plain["product"])
if WHOLE:
    ocp.PyTreeCheckpointer().save(HOME + "/orbax_whole", {**plain["product"], "process": tuple(state.training)})
flat = {"/".join(map(str, path)): leaf for path, leaf in
        [((s, k), getattr(f, k)) for s, f in state.decomposition.components.items() for k in "VU"]
        + [(("ci_fn", m, p), x) for m, ps in state.decomposition.ci_fn.items() for p, x in ps.items()]}
safetensors.numpy.save_file(flat, HOME + "/product.safetensors")
"""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # read once, when a process starts

OURS = "import jax, pdlib\nfrom pdlib.store import Manager, restore_factors\njax.devices()\n"
# the first matmul is compiled before the clock starts: what is measured is opening, and that its arrays can be used
COMPILE = """
import jax.numpy as jnp
first = jax.jit(lambda x, V: x @ V)
site, ones = "layers.18.mlp.gate_proj", jnp.ones((1, 4096 // SCALE))
first(ones, jax.device_put(jnp.ones((4096 // SCALE, 24576 // SCALE)), jax.devices()[0])).block_until_ready()
"""
FIRST = "\nfirst(ones, {}).block_until_ready()"
ORBAX = """
import jax, orbax.checkpoint as ocp, numpy as np
jax.devices()
def read(path, sharding=None):
    ck = ocp.PyTreeCheckpointer()
    meta = ck.metadata(path).item_metadata.tree
    host = ocp.RestoreArgs(restore_type=np.ndarray)
    make = lambda x: host if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding(x.shape))
    leaf = lambda x: hasattr(x, "shape")
    return jax.block_until_ready(ck.restore(path, restore_args=jax.tree.map(make, meta, is_leaf=leaf)))
"""
ONE_DEVICE = "s = lambda shape: jax.sharding.SingleDeviceSharding(jax.devices()[0])\n"
# as pdlib's contract has it: components over the devices, all else whole on each
BY_COMPONENT = """
s = lambda shape: jax.NamedSharding(mesh, jax.P(*("fsdp" if n == 24576 // SCALE else None for n in shape)))
"""
RAW = """
import os, mmap, numpy as np
from concurrent.futures import ThreadPoolExecutor
files = [os.path.join(d, f) for d, _, fs in os.walk(FOLDER) for f in fs if f[0].isdigit()]
PIECE = 64 << 20
tasks = [(f, s) for f in files for s in range(0, os.path.getsize(f), PIECE)]
buffers = {f: np.empty(os.path.getsize(f), np.uint8) for f in files}
def readinto(task):
    f, s = task
    view = memoryview(buffers[f])[s:s + PIECE]
    with open(f, "rb", buffering=0) as file:
        file.seek(s)
        while len(view):
            view = view[file.readinto(view):]
def touch(f):
    if os.path.getsize(f):
        with open(f, "rb") as file:
            int(np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)[::4096].sum())
"""


def contenders(home: Path, *, whole: bool, tenfold: bool) -> dict[str, tuple[str, str, int, Path]]:
    """Name → what is prepared, what is timed, how many devices, and the files it reads."""
    one, item = home / "one", home / "one" / "ckpts" / "1" / "decomposition"
    scale = f"SCALE = {os.environ['PDLIB_BENCH_SCALE']}\n"
    raw = f"FOLDER = {str(item)!r}\n{RAW}"
    pool = "with ThreadPoolExecutor(8) as pool: list(pool.map({}, {}))"
    owned = "with Manager({!r}, read_only=True) as m: x = m.restore_to_host(1, 'decomposition')"
    mesh = "mesh = jax.sharding.Mesh(np.array(jax.devices()), ('fsdp',))\n"
    open_ours = f"run = pdlib.open_run({str(one)!r})"
    first_site = f"f = restore_factors(Manager({str(one / 'ckpts')!r}, read_only=True), 'layers.18.mlp.up_proj')"
    found = {
        "pdlib: open the product, first matmul": (
            scale + OURS + COMPILE,
            open_ours + FIRST.format("run.components[site].V"),
            1,
            one,
        ),
        "pdlib: open the product": (OURS, open_ours, 1, one),
        "pdlib: one site": (OURS, first_site, 1, one),
        "pdlib: read the product, owned": (OURS, owned.format(str(one / "ckpts")), 1, one),
        "pdlib: onto 4 devices": (
            OURS + "import numpy as np\n" + mesh,
            f"x = jax.block_until_ready(pdlib.open_run({str(one)!r}, mesh=mesh).decomposition)",
            4,
            one,
        ),
        "orbax: the product, numpy": (ORBAX, f"x = read({str(home / 'orbax_product')!r})", 1, home / "orbax_product"),
        "orbax: the product, first matmul": (
            scale + ORBAX + ONE_DEVICE + COMPILE,
            f"x = read({str(home / 'orbax_product')!r}, s)" + FIRST.format("x['components'][site][0]"),
            1,
            home / "orbax_product",
        ),
        "safetensors: load_file": (
            "import safetensors.numpy",
            f"x = safetensors.numpy.load_file({str(home / 'product.safetensors')!r})",
            1,
            home,
        ),
        "raw limit: parallel readinto": (raw, pool.format("readinto", "tasks"), 1, one),
        "raw limit: touch every page": (raw, pool.format("touch", "files"), 1, one),
    }
    for count in (4, 8):
        shards = home / f"shards{count}"
        limit = f"FOLDER = {str(shards / 'ckpts' / '1' / 'decomposition')!r}\n{RAW}"
        found[f"pdlib: read the product of {count} shards, owned"] = (
            OURS,
            owned.format(str(shards / "ckpts")),
            1,
            shards,
        )
        found[f"raw limit: parallel readinto, {count} shards"] = (limit, pool.format("readinto", "tasks"), 1, shards)
    if tenfold:
        large = home / "tenfold"
        found["pdlib: open the product beside a process ten times larger"] = (
            OURS,
            f"run = pdlib.open_run({str(large)!r})",
            1,
            large,
        )
    if whole:
        found["orbax: onto 4 devices"] = (
            scale + ORBAX + mesh + BY_COMPONENT,
            f"x = read({str(home / 'orbax_product')!r}, s)",
            4,
            home / "orbax_product",
        )
        resume = (
            "from pdlib.store import restore_step\n"
            f"with Manager({str(one / 'ckpts')!r}, read_only=True) as m:\n"
            "    x = jax.block_until_ready(restore_step(m, 1, abstract))"
        )
        found["pdlib: resume the whole state"] = (scale + SHAPES + OURS, resume, 1, one)
        found["pdlib: resume the whole state, huge pages"] = found["pdlib: resume the whole state"]
        found["orbax: restore the whole state"] = (
            ORBAX + ONE_DEVICE,
            f"x = read({str(home / 'orbax_whole')!r}, s)",
            1,
            home / "orbax_whole",
        )
    return found


GOALS = (  # what is asked: contender, rival, and how many times faster it has to be
    ("pdlib: open the product", "orbax: the product, numpy", {"small": 100.0, "half": 100.0, "full": 300.0}),
    ("pdlib: open the product, first matmul", "orbax: the product, first matmul", 1.0),
    ("pdlib: read the product, owned", "orbax: the product, numpy", 3.0),
    ("pdlib: read the product, owned", "raw limit: parallel readinto", 0.8),
    ("pdlib: read the product of 4 shards, owned", "raw limit: parallel readinto, 4 shards", 0.6),
    ("pdlib: read the product of 8 shards, owned", "raw limit: parallel readinto, 8 shards", 0.6),
    ("pdlib: open the product beside a process ten times larger", "pdlib: open the product", 1.0),
    ("pdlib: onto 4 devices", "orbax: onto 4 devices", 3.0),
    ("pdlib: resume the whole state", "orbax: restore the whole state", 2.0),
    ("pdlib: resume the whole state, huge pages", "orbax: restore the whole state", 2.0),
)


def report(found: dict[str, tuple[Result, Result]], scale: str, product: int) -> str:
    """The tables: ratios, then what each contender took."""
    rows = [["pdlib", "rival", "times as fast, warm", "cold", "goal"]]
    for ours, rival, goal in GOALS:
        if ours in found and rival in found:
            warm, cold = (found[rival][i].seconds / found[ours][i].seconds for i in (0, 1))
            want = goal[scale] if isinstance(goal, dict) else goal
            rows.append([ours, rival, f"{warm:,.2f}", f"{cold:,.2f}", f"≥ {want:g}"])
    details = [["contender", "warm s", "cold s", "peak anonymous MB", "kept MB", "mapped MB"]]
    for name, (warm, cold) in found.items():
        memory = [megabytes(n) for n in (warm.peak_anonymous, warm.kept_anonymous, warm.mapped_pages)]
        details.append([name, f"{warm.seconds:.4f}", f"{cold.seconds:.4f}", *memory])
    return f"{machine()}\n\nproduct of {product / 1e9:.2f} GB, scale {scale}\n\n{table(rows)}\n\n{table(details)}"


def faster(one: Result, other: Result) -> Result:
    """The one that took less time."""
    return min(one, other, key=lambda result: result.seconds)


def write(home: Path, scale: int, *, whole: bool, tenfold: bool = False) -> None:
    """Write what the contenders read, in a process of its own."""
    random = np.random.default_rng(0)
    with (home / "pool").open("wb") as file:
        largest = 4 * (14336 // scale) * (24576 // scale)  # V of down_proj, in float32
        for _ in range(largest // (64 << 20) + 2):
            file.write(random.standard_normal(16 << 20, np.float32))
    code = (
        f"SCALE, HOME, POOL, WHOLE, TENFOLD = {scale}, {str(home)!r}, {str(home / 'pool')!r}, {whole}, {tenfold}\n"
        f"{SHAPES}{VALUES}{WRITE}"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)


def main() -> None:
    """Write, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--home", type=Path, default=None, help="where to write; a temporary directory without it")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    scale, whole, tenfold = SCALES[asked.scale], asked.scale != "full", asked.scale == "small"
    os.environ["PDLIB_BENCH_SCALE"] = str(scale)
    home = Path(tempfile.mkdtemp(dir=asked.home))
    try:
        write(home, scale, whole=whole, tenfold=tenfold)
        item = home / "one" / "ckpts" / "1" / "decomposition"
        product = sum(p.stat().st_size for p in item.rglob("*") if p.is_file())
        found: dict[str, tuple[Result, Result]] = {}
        os.sync()  # what was written is not written back while others are timed
        for _ in range(asked.repeats):  # in turns, so that a noisy minute is nobody's alone; cold first, which warms
            for name, (prepare, work, devices, reads) in contenders(home, whole=whole, tenfold=tenfold).items():
                huge = HUGE_PAGES if "huge pages" in name else {}
                shared = {"devices": devices, "repeats": 1, "environment": huge, "memory": min(2 * product, 14 << 30)}
                cold = measure(prepare, work, cold=[reads], **shared)
                warm = measure(prepare, work, **shared)
                before = found.get(name, (warm, cold))
                found[name] = (faster(before[0], warm), faster(before[1], cold))
                print(f"{name}: {warm.seconds:.4f} s warm, {cold.seconds:.4f} s cold", file=sys.stderr)
        text = report(found, asked.scale, product)
        if not whole:
            text += (
                "\n\nLeft out, since they need more memory than this machine has: the whole state (30 GB), and orbax "
                "onto 4 devices, which takes 2.3 times the product at half the widths."
            )
        print(text)
        flat = {
            f"{name}, {kind}": r for name, pair in found.items() for kind, r in zip(("warm", "cold"), pair, strict=True)
        }
        keep(f"restore_8b_{asked.scale}", {"report": text, "product_bytes": product, **flat})
        bars(
            f"restore_8b_{asked.scale}", {name: pair[0].seconds for name, pair in found.items()}, f"{asked.scale}, warm"
        )
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
