"""Steps in an object store, on an S3 server of this machine: read by every way, held to their manifest, not written."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import jax
import numpy as np
import pytest

import pdlib
from pdlib.errors import ContractError, CorruptItem, NoCheckpoint, NotARun, TornStep, Unreachable
from pdlib.store import Manager, init_from_parent, restore_factors, restore_latest, save_state
from pdlib.testing import assert_bit_equal
from tests.store.crash import state_of
from tests.store.test_cases import LAYOUTS

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(300):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


class Bucket:
    """A bucket that a run is copied to, as a user would with the store's own tools."""

    def __init__(self, client, name: str) -> None:
        self.client, self.name, self.url = client, name, f"s3://{name}"
        client.create_bucket(Bucket=name)

    def upload(self, root: Path) -> None:
        for path in sorted(root.rglob("*")):
            if path.is_file():
                self.client.upload_file(str(path), self.name, path.relative_to(root).as_posix())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def content(self) -> dict[str, bytes]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {key: self.client.get_object(Bucket=self.name, Key=key)["Body"].read() for key in keys}


@pytest.fixture
def bucket(server: str, request, monkeypatch, tmp_path: Path) -> Iterator[Bucket]:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server, "PDLIB_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=server)
    name = re.sub(r"[^a-z0-9]+", "-", f"{request.node.name}-{time.time_ns()}".lower())
    yield Bucket(client, name[-50:].strip("-"))
    client.close()


def local_run(tmp_path: Path, layout: str, mesh=None) -> Path:
    run = tmp_path / "local" / "run"
    state = state_of(1) if mesh is None else jax.device_put(state_of(1), jax.NamedSharding(mesh, jax.P()))
    with Manager(run / "ckpts", layout=layout) as manager:
        save_state(manager, 0, state_of(0))
        save_state(manager, 1, state)
    (run / "run.toml").write_text('name = "far"\n', "utf-8")
    return run


def cached_files(tmp_path: Path) -> set[str]:
    cache = tmp_path / "cache"
    return {"/".join(path.relative_to(cache).parts[1:]) for path in cache.rglob("*") if path.is_file()}


@LAYOUTS
def test_what_is_in_an_object_store_is_read_by_every_way_and_nothing_is_written_there(bucket, tmp_path, layout):
    run = local_run(tmp_path, layout)
    bucket.upload(run.parent)
    before = bucket.content()
    near, far = pdlib.open_run(run), pdlib.open_run(f"{bucket.url}/run")
    assert_bit_equal(far.decomposition, near.decomposition)
    assert far.step == 1
    assert far.spec == {"name": "far"}
    assert_bit_equal(pdlib.open_run(f"{bucket.url}/run", step=0, verify=True, host=True).decomposition,
                     pdlib.open_run(run, step=0, host=True).decomposition)  # fmt: skip
    with Manager(run / "ckpts", read_only=True) as local, Manager(f"{bucket.url}/run/ckpts", read_only=True) as manager:
        assert manager.steps() == [0, 1]
        assert manager.items(1) == ["decomposition", "training"]
        assert manager.latest() == 1
        step, state = restore_latest(manager, jax.eval_shape(lambda: state_of(0)))
        assert step == 1
        assert_bit_equal(state, state_of(1))
        assert_bit_equal(restore_factors(manager, "s"), restore_factors(local, "s"))
        assert manager.verify(1)
        for item in manager.items(1):
            assert manager.content_digest(1, item) == local.content_digest(1, item)
            for mapped in (False, True):
                assert_bit_equal(manager.restore_to_host(1, item, mapped=mapped), local.restore_to_host(1, item))
    parent = init_from_parent(f"{bucket.url}/run", jax.eval_shape(lambda: state_of(0).decomposition))
    assert_bit_equal(parent, state_of(1).decomposition)
    assert bucket.content() == before


def test_leaves_in_several_shard_files_come_onto_any_mesh(bucket, tmp_path, mesh_of):
    registry = pdlib.Registry((pdlib.ItemSpec(name="params", leaves=[pdlib.LeafSpec(path="**")]),))
    tree = {"w": np.arange(64, dtype=np.float32).reshape(8, 8)}
    with Manager(tmp_path / "local" / "steps", registry=registry) as manager:
        manager.save(0, {"params": jax.device_put(tree, jax.NamedSharding(mesh_of(8), jax.P("fsdp")))})
    bucket.upload(tmp_path / "local")
    with Manager(f"{bucket.url}/steps", registry=registry, read_only=True) as manager:
        want = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=jax.NamedSharding(mesh_of(4), jax.P(None, "fsdp")))
        found = manager.restore(0, {"params": {"w": want}})["params"]
    assert_bit_equal(found, tree)
    assert found["w"].sharding == want.sharding


def test_only_the_files_that_are_asked_for_come_and_they_come_once(bucket, tmp_path):
    bucket.upload(local_run(tmp_path, "raw").parent)
    with Manager(f"{bucket.url}/run/ckpts", read_only=True) as manager:
        restore_factors(manager, "s", step=1)
    came = cached_files(tmp_path)
    assert {name.split("/")[0] for name in came} == {"components.s.V", "components.s.U"}
    for name in came:  # gone from the store, still read: it is here
        bucket.put(
            f"run/ckpts/1/decomposition/{name}", b"\0" * len(bucket.content()[f"run/ckpts/1/decomposition/{name}"])
        )
    with Manager(f"{bucket.url}/run/ckpts", read_only=True) as manager:
        assert_bit_equal(restore_factors(manager, "s", step=1)["s"], state_of(1).decomposition.components["s"])


def test_a_flipped_bit_on_the_way_is_refused_and_not_kept(bucket, tmp_path):
    bucket.upload(local_run(tmp_path, "raw").parent)
    key = "run/ckpts/1/decomposition/components.s.V/0.0"
    data = bytearray(bucket.content()[key])
    data[3] ^= 16
    bucket.put(key, bytes(data))
    with pytest.raises(CorruptItem) as refused:
        pdlib.open_run(f"{bucket.url}/run")
    assert str(refused.value) == (
        f"changed: {bucket.url}/{key}\nRestore these files from a copy, or open another step."
    )
    assert "components.s.V/0.0" not in cached_files(tmp_path)
    with Manager(f"{bucket.url}/run/ckpts", read_only=True) as manager:
        assert manager.verify(1).changed == ("1/decomposition/components.s.V/0.0",)


def test_a_step_that_is_still_being_copied_is_torn_and_the_one_before_is_found(bucket, tmp_path):
    bucket.upload(local_run(tmp_path, "raw").parent)
    bucket.delete("run/ckpts/1/decomposition/components.s.V/0.0")
    with pytest.raises(TornStep, match=r"components\.s\.V/0\.0 is missing"):
        pdlib.open_run(f"{bucket.url}/run")
    assert pdlib.open_run(f"{bucket.url}/run", step=0).step == 0


def test_a_file_outside_the_item_is_never_asked_for(bucket, tmp_path):
    bucket.upload(local_run(tmp_path, "raw").parent)
    key = "run/ckpts/1/decomposition/manifest.json"
    bucket.put(key, bucket.content()[key].replace(b'"components.s.V/0.0"', b'"../../../../outside"'))
    with pytest.raises(TornStep, match="is no whole manifest"):
        pdlib.open_run(f"{bucket.url}/run")


def test_wrong_places_in_a_store_are_told_apart(bucket, tmp_path):
    bucket.upload(local_run(tmp_path, "raw").parent)
    with pytest.raises(NotARun, match="a level too shallow"):
        Manager(f"{bucket.url}/run", read_only=True)
    with pytest.raises(NotARun, match="lies inside a run"):
        pdlib.open_run(f"{bucket.url}/run/ckpts")
    with pytest.raises(NotARun, match="does not exist; did you mean 'run'"):
        pdlib.open_run(f"{bucket.url}/ru")
    with pytest.raises(NoCheckpoint, match="holds no step 7"):
        pdlib.open_run(f"{bucket.url}/run", step=7)
    with pytest.raises(ContractError, match="is in an object store, where no save is atomic: pass read_only=True"):
        Manager(f"{bucket.url}/run/ckpts")


def test_a_store_that_does_not_answer_is_named_with_the_cause(monkeypatch):
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(Unreachable, match=r"s3://nobody/run cannot be read: .*\n.*nothing was changed"):
        pdlib.open_run("s3://nobody/run")
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_scheme_that_nothing_speaks_says_what_to_install():
    with pytest.raises(ContractError, match="To read gs:// paths, pip install 'pdlib\\[gcs\\]'"):
        pdlib.open_run("gs://bucket/run")
    with pytest.raises(ContractError, match="nobody://bucket/run cannot be read here"):
        pdlib.open_run("nobody://bucket/run")


def test_the_command_line_inspects_a_run_in_a_store(bucket, tmp_path):
    bucket.upload(local_run(tmp_path, "raw").parent)
    command = [sys.executable, "-m", "pdlib", "inspect", f"{bucket.url}/run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert f"{bucket.url}/run" in done.stdout
    assert "decomposition" in done.stdout
