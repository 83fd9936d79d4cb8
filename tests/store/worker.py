"""One of two JAX processes over loopback, two devices each: saves or restores a state that both hold a part of."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

ACTION, FOLDER, PORT, INDEX, LAYOUT = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=2, process_id=INDEX)

import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import pdlib  # noqa: E402
from tests.store.two_processes import ANY, host_state  # noqa: E402

MESH = Mesh(np.array(jax.devices()).reshape(4), ("a",))
SPLITS = {"split": PartitionSpec("a"), "second": PartitionSpec(None, "a"), "whole": PartitionSpec()}


def sharding(name: str) -> NamedSharding:
    return NamedSharding(MESH, SPLITS[name])


def global_state() -> dict[str, Any]:
    host = host_state()
    placed = {
        name: jax.make_array_from_callback(host[name].shape, sharding(name), lambda index, name=name: host[name][index])
        for name in SPLITS
    }
    return {**host, **placed}


def main() -> None:
    assert jax.process_count() == 2
    assert len(jax.devices()) == 4
    if f"break-{INDEX}" == ACTION:
        os.write = lambda *_: fail()
    if f"limit-{INDEX}" == ACTION:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
    if f"closed-{INDEX}" == ACTION:
        os.mkdir = lambda *_, **__: fail()
    manager = pdlib.Manager(FOLDER / "steps", registry=ANY, layout=LAYOUT)  # pyright: ignore
    if ACTION == "restore":
        abstract = {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(n)) if n in SPLITS else x
            for n, x in host_state().items()
        }
        restored = manager.restore(3, {"anything": abstract})["anything"]
        for name, want in host_state().items():
            got = restored[name]
            shards = got.addressable_shards if hasattr(got, "addressable_shards") else []
            assert not shards or name not in SPLITS or got.sharding == sharding(name)
            for shard in shards:
                assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(want[shard.index]).tobytes(), name
        print("restored")
        return
    try:
        if ACTION == "other values":  # step 3 is there already, from another trajectory
            manager.resume_at(2)
        manager.save(3, {"anything": global_state()}, background=ACTION == "background")
        manager.close()
        print("saved")
    except pdlib.PdlibError as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "))


def fail() -> int:
    raise OSError(28, "No space left on device")


main()
