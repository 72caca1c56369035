from pathlib import Path

import numpy as np
import pytest

from rootcellar.bench.raw_io import PageLoop, RawReader, build_page_loop
from rootcellar.tiers.chunk_file import HEADER_BYTES


@pytest.mark.parametrize("depth", [1, 3])
def test_raw_reads_bring_the_payload_of_each_file(depth: int, tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(6)]
    for number, file in enumerate(files):
        file.write_bytes(bytes(HEADER_BYTES) + bytes([number]) * 8192)
    targets = [memoryview(bytearray(8192)) for _ in range(depth)]
    with RawReader(files, targets, 0) as reader:
        for first in range(0, 6, depth):
            assert reader.read(first) > 0
            assert [target[-1] for target in targets] == list(range(first, first + depth))


def test_a_raw_read_that_fails_raises_and_the_next_one_works(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(4)]
    for number, file in enumerate(files):
        file.write_bytes(bytes(HEADER_BYTES + (100 if number == 1 else 8192)))
    targets = [memoryview(bytearray(8192)) for _ in range(2)]
    with RawReader(files, targets, 0) as reader:
        with pytest.raises(OSError, match="chunk file 1 is shorter"):
            reader.read(0)
        reader.read(2)


def test_the_page_loop_puts_each_page_where_it_belongs(tmp_path: Path) -> None:
    library = build_page_loop(tmp_path)
    if library is None:
        pytest.skip("no C compiler")
    rng, page_bytes = np.random.default_rng(0), 64
    chunk = rng.integers(0, 255, (3, 4, page_bytes), np.uint8)  # planes, pages of the chunk, bytes
    pool = np.zeros((3, 10, page_bytes), np.uint8)
    pages = np.array([7, 2, 9, 0])
    loop = PageLoop(library, 3, page_bytes, 10 * page_bytes)
    loop.copy(chunk.ctypes.data, pool.ctypes.data, pages)
    assert np.array_equal(pool[:, pages], chunk)
    assert not pool[:, [1, 3, 4, 5, 6, 8]].any()


def test_without_a_compiler_there_is_no_page_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_page_loop(tmp_path) is None
