import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.trace_file import TraceFile, header, rotated

HEADER = header(256, 1.0, "run")


def sizes(path: Path) -> list[int]:
    return [file.stat().st_size for file in (path, rotated(path)) if file.exists()]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(0, 7))
def test_both_files_never_exceed_their_bytes_over_any_openings(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], reopen: int
) -> None:
    path = tmp_path_factory.mktemp("t") / "trace"
    most = 400
    file = TraceFile(path, most)
    for i, length in enumerate(lines):
        line = b"x" * (length - 1) + b"\n"
        if reopen and i % reopen == 0:
            file.close()
            file = TraceFile(path, most)
        if not file.size or not file.fits(len(line)):
            if file.size:
                file.rotate()
            file.append(HEADER)
        file.append(line)
        assert file.size == path.stat().st_size <= most // 2
        assert sum(sizes(path)) <= most
    file.close()


def test_a_limit_that_was_lowered_holds_for_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(HEADER * 4)
    rotated(path).write_bytes(HEADER * 4)
    TraceFile(path, 4096).close()
    assert sizes(path) == [4 * len(HEADER)] * 2
    TraceFile(path, 6 * len(HEADER)).close()
    assert sizes(path) == [0]


@pytest.mark.parametrize("length", [1, 3, 200, 200_000])
def test_part_of_a_line_that_a_crash_left_is_cut_off(tmp_path: Path, length: int) -> None:
    path = tmp_path / "trace"
    path.write_bytes(HEADER + b"x" * length)
    file = TraceFile(path, 1 << 20)
    file.append(b"more\n")
    file.close()
    assert path.read_bytes() == HEADER + b"more\n"


def test_part_of_a_header_alone_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(HEADER[:9])
    TraceFile(path, 1 << 20).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("name", ["trace", "trace.1"])
def test_what_is_no_recording_is_left_untouched(tmp_path: Path, name: str) -> None:
    precious = tmp_path / name
    precious.write_text("my notes")
    with pytest.raises(ValueError, match=f"{name} is there already and is no recorded trace"):
        TraceFile(tmp_path / "trace", 1 << 20)
    assert precious.read_text() == "my notes"


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.touch(0o644)
    file = TraceFile(path, 1 << 20)
    file.append(HEADER)
    file.rotate()
    file.close()
    assert [os.stat(one).st_mode & 0o777 for one in (path, rotated(path))] == [0o600] * 2


def test_two_stores_do_not_record_to_one_file_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    code = (
        "import sys, time; from pathlib import Path;"
        "from rootcellar.tiers.trace_file import TraceFile;"
        f"file = TraceFile(Path({str(path)!r}), 4096); file.append({HEADER!r}); file.rotate();"
        "print('open', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE)
    assert other.stdout is not None
    with other, other.stdout:
        try:
            assert other.stdout.readline() == b"open\n"
            with pytest.raises(ValueError, match="recorded to by another store"):
                TraceFile(path, 4096)
        finally:
            other.kill()
    TraceFile(path, 4096).close()
    assert rotated(path).read_bytes() == HEADER
