"""Real forks: what a child does to a store that it inherited."""

import os
from pathlib import Path

import pytest
import torch

from rootcellar import KVLayout, Namespace, StoreConfig, TieredStore, chunk_keys
from rootcellar.tiers.errors import StoreClosedError

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32")
NAMESPACE = Namespace(model="toy", revision="1", layout=LAYOUT)
KEYS = chunk_keys(range(512), NAMESPACE)


@pytest.mark.parametrize("on_disk", [False, True])
def test_in_a_forked_child_a_store_is_closed_and_the_parents_stays_as_it_is(
    on_disk: bool, tmp_path: Path
) -> None:
    nvme = {"nvme_path": tmp_path / "kv", "nvme_bytes": "4MiB", "io": "threads"} if on_disk else {}
    kv = [torch.full(LAYOUT.shape(256), float(number)) for number, _ in enumerate(KEYS)]
    with TieredStore(StoreConfig(dram_bytes="1MiB", **nvme), NAMESPACE) as store:  # type: ignore[arg-type]
        store.put(KEYS, kv)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store.close()  # returns at once: the threads that it would wait for are not here
                store.put(KEYS, [tensor + 7 for tensor in kv])
            except StoreClosedError:
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert all(torch.equal(a, b) for a, b in zip(store.get(KEYS), kv, strict=True))
        store.check_integrity()
