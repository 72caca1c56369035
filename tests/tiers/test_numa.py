import ctypes
import logging
import os
import platform
from pathlib import Path

import pytest

from rootcellar.tiers import numa
from rootcellar.tiers.arena import SharedArena
from rootcellar.tiers.numa import gpu_node, prefer_node

SLOT_BYTES = 4096
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
PREFERRED, OF_ADDRESS = 1, 2
numa_maps = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel has no NUMA"
)


def _device(
    pci: Path, address: str, node: int | None, vendor: str = "0x10de", kind: str = "0x030200"
) -> None:
    """A device as sysfs shows it; a kernel without NUMA has no numa_node."""
    (pci / address).mkdir(parents=True)
    (pci / address / "vendor").write_text(f"{vendor}\n")
    (pci / address / "class").write_text(f"{kind}\n")
    if node is not None:
        (pci / address / "numa_node").write_text(f"{node}\n")


def test_a_known_gpu_has_its_own_node_whatever_the_others_have(tmp_path: Path) -> None:
    _device(tmp_path, "0000:17:00.0", 0)
    _device(tmp_path, "0000:ca:00.0", 1)
    assert gpu_node("0000:17:00.0", tmp_path) == 0
    assert gpu_node("0000:ca:00.0", tmp_path) == 1


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([1], 1),
        ([0, 0], 0),
        ([1, 1, 1], 1),
        ([0, 1], None),
        ([-1], None),
        ([-1, 1], None),
        ([None], None),
        ([None, 1], None),
        ([], None),
    ],
)
def test_gpus_that_are_not_told_apart_must_agree(
    nodes: list[int | None], expected: int | None, tmp_path: Path
) -> None:
    for bus, node in enumerate(nodes):
        _device(tmp_path, f"0000:{bus:02x}:00.0", node)
    assert gpu_node(None, tmp_path) == expected


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [
        ("0x10de", "0x068000"),  # a switch between GPUs
        ("0x10de", "0x040300"),  # the sound of a graphics card
        ("0x15b3", "0x020000"),  # a network card
        ("0x1a03", "0x030000"),  # the display of a server
    ],
)
def test_only_nvidia_gpus_count(vendor: str, kind: str, tmp_path: Path) -> None:
    _device(tmp_path, "0000:01:00.0", 0, vendor, kind)
    assert gpu_node(None, tmp_path) is None
    _device(tmp_path, "0000:02:00.0", 1, kind="0x030000")
    assert gpu_node(None, tmp_path) == 1


def test_where_sysfs_is_hidden_nothing_is_preferred(tmp_path: Path) -> None:
    assert gpu_node("0000:17:00.0", tmp_path) is None
    assert gpu_node(None, tmp_path / "missing") is None


@numa_maps
def test_the_wish_is_kept_with_the_memory_and_seen_by_every_mapping() -> None:
    arena = SharedArena(SLOT_BYTES, 4, numa_node=0)
    plain = SharedArena(SLOT_BYTES, 4)
    mapping = arena.shared_at.attach()
    assert _policy(arena.address) == _policy(mapping.address) == (PREFERRED, 1)
    assert "prefer:0" in _numa_map(mapping.address)
    assert _policy(plain.address) == (0, 0)
    for each in (mapping, arena, plain):
        each.close()


@numa_maps
def test_the_wish_covers_the_last_byte() -> None:
    arena = SharedArena(SLOT_BYTES, 4)
    prefer_node(0, arena.address, 3 * SLOT_BYTES)
    policies = [_policy(arena.address + slot * SLOT_BYTES)[0] for slot in range(4)]
    assert policies == [PREFERRED] * 3 + [0]
    arena.close()


def test_memory_is_placed_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[tuple[int, int, set[int]]] = []

    def place(node: int, address: int, size_bytes: int) -> None:
        files = [stat for stat in map(os.fstat, _memfds()) if stat.st_size == size_bytes]
        placed.append((node, size_bytes, {stat.st_blocks for stat in files}))

    monkeypatch.setattr("rootcellar.tiers.arena.prefer_node", place)
    size_bytes = 7 * SLOT_BYTES
    SharedArena(SLOT_BYTES, 7, numa_node=3).close()
    assert placed == [(3, size_bytes, {0})]


@pytest.mark.parametrize("node", [63, 64, 1023])
def test_a_node_that_the_machine_lacks_is_ignored(
    node: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        arena = SharedArena(SLOT_BYTES, 4, numa_node=node)
    assert f"not placed near the GPU, on node {node}" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    arena.slot(3)[:] = b"x" * SLOT_BYTES
    arena.close()


def test_a_machine_whose_system_call_is_not_known_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    monkeypatch.setattr(numa, "_libc", None)  # not called
    with caplog.at_level(logging.DEBUG):
        prefer_node(0, 0, 4096)
    assert "no mbind known for s390x" in caplog.text


def _policy(address: int) -> tuple[int, int]:
    """The kind of the policy at an address, and its nodes as bits."""
    kind, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    number = GET_MEMPOLICY[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    at, bits = ctypes.c_void_p(address), ctypes.c_ulong(8 * ctypes.sizeof(nodes))
    assert libc.syscall(number, ctypes.byref(kind), nodes, bits, at, OF_ADDRESS) == 0
    return kind.value, nodes[0]


def _numa_map(address: int) -> str:
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{address:08x} ")]
    return line


def _memfds() -> list[int]:
    names = {int(path.name): _target(path) for path in Path("/proc/self/fd").iterdir()}
    return [fd for fd, name in names.items() if name.startswith("/memfd:rootcellar-arena")]


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # the listing's own
        return ""
