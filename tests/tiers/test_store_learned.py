"""What the default policy is for, on a live store: the general stream displaces nothing hot."""

from pathlib import Path

import numpy as np
import pytest

from rootcellar.admission.base import Boundary
from rootcellar.admission.learned.policy import Learned
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import CHUNK_BYTES, FILE_BYTES, NAMESPACE, chunks_of, keys_of
from rootcellar.tiers.toy import Path as Chain

HOT: list[Chain] = [(1, head, 2, 3) for head in range(10)]
"""Ten prompts of four chunks that share their first."""

DOCUMENT_CHUNKS = 400
"""100,000 tokens, were a chunk 256 of them."""


def _open(
    root: Path | None, *, dram: int = 100, nvme: int = 300, policy: Learned | None = None
) -> TieredStore:
    if root is None:
        return TieredStore(StoreConfig(dram_bytes=dram * CHUNK_BYTES), NAMESPACE)
    config = StoreConfig(
        dram_bytes=dram * CHUNK_BYTES,
        nvme_path=root / "store",
        nvme_bytes=nvme * FILE_BYTES,
        io="threads",
        admission="learned" if policy is None else lambda: policy,
    )
    return TieredStore(config, NAMESPACE)


def _request(store: TieredStore, chain: Chain) -> int:
    """As an engine does it; returns how many chunks were there."""
    keys = keys_of(chain)
    store.observe(keys)
    found = len(store.get(keys))
    if found < len(chain):
        job = store.prepare_store(keys, found)
        for index, view in zip(job.wanted, store.store_views(job), strict=True):
            view.copy_(chunks_of(chain, index)[0])
        store.complete_store(job)
    store.poll()
    return found


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_one_off_document_between_hot_prompts_evicts_none_of_them(
    tmp_path: Path, on_disk: bool
) -> None:
    with _open(tmp_path if on_disk else None) as store:
        for _ in range(6):
            for chain in HOT:
                _request(store, chain)
        document = tuple(5000 + n for n in range(DOCUMENT_CHUNKS))
        assert _request(store, document) == 0
        store.flush()
        for chain in HOT:
            assert store.lookup(keys_of(chain)).num_chunks == len(chain)
        store.check_integrity()


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_stream_of_one_off_prompts_leaves_hot_ones_where_they_are(
    tmp_path: Path, on_disk: bool
) -> None:
    with _open(tmp_path if on_disk else None) as store:
        found = 0
        for round_ in range(40):
            for chain in HOT:
                found += _request(store, chain)
                _request(store, tuple(9000 + 50 * round_ + n for n in range(12)))
        assert found >= 0.95 * 39 * sum(map(len, HOT))
        store.check_integrity()


def test_a_new_prompt_is_there_for_its_second_request_while_there_is_room() -> None:
    with _open(None) as store:
        assert [_request(store, (7, 7, 7)) for _ in range(3)] == [0, 3, 3]


def test_hbm_takes_a_viral_prompt_with_its_second_request() -> None:
    with _open(None) as store:
        keys = keys_of((7, 7, 7))
        store.observe(keys)
        assert store.admits(Boundary.INTO_HBM, keys, 0, free_chunks=0) == 0
        store.observe(keys)
        assert store.admits(Boundary.INTO_HBM, keys, 0, free_chunks=0) == 3


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    """Hot prompts come back all the time and others never: known at once by the next process."""
    before, after = Learned(), Learned()
    with _open(tmp_path, policy=before) as store:
        for round_ in range(60):
            for chain in HOT:
                _request(store, chain)
                _request(store, tuple(9000 + 50 * round_ + n for n in range(12)))
    assert before.model.events.sum() > 100
    with _open(tmp_path, policy=after) as store:
        assert np.array_equal(after.model.events, before.model.events)
        assert np.array_equal(after.model.exposure, before.model.exposure)
        for chain in HOT:
            assert _request(store, chain) == len(chain)
