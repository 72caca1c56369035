from typing import Any

import pytest

from rootcellar.admission.always import Always
from rootcellar.admission.gated import Gated
from rootcellar.tiers.config import StoreConfig, parse_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (1 << 40, 1 << 40),
        ("64GiB", 64 << 30),
        ("1 TiB", 1 << 40),
        ("1.5KiB", 1536),
        ("2MB", 2_000_000),
        (" 7 ", 7),
        ("10B", 10),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_exactly(size: int | str, expected: int) -> None:
    assert parse_bytes("x", size) == expected


@pytest.mark.parametrize(
    "size", ["", "GiB", "-1", -1, "1 gib", "1XB", 1.5, None, True, "1e9"], ids=repr
)
def test_anything_else_is_refused_by_name_and_value(size: Any) -> None:
    with pytest.raises(ValueError, match="dram_bytes is"):
        parse_bytes("dram_bytes", size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dram_bytes": 0}, "dram_bytes is 0"),
        ({"dram_bytes": -5}, "dram_bytes is -5"),
        ({"nvme_bytes": "1GiB"}, "nvme_path is None"),
        ({"nvme_path": "here"}, "nvme_bytes is 0"),
        ({"nvme_path": "here", "nvme_bytes": -1}, "nvme_bytes is -1"),
        ({"io": "fork"}, "io is 'fork', must be one of 'process', 'threads'"),
        ({"codec": "gzip"}, "codec is 'gzip', must be one of 'raw', 'zstd'"),
        ({"io_lanes": 0}, "io_lanes is 0"),
        ({"io_lanes": 65}, "io_lanes is 65"),
        ({"io_lanes": 1.5}, "io_lanes is 1.5"),
        ({"load_timeout_s": 0}, "load_timeout_s is 0"),
        ({"load_timeout_s": float("nan")}, "load_timeout_s is nan"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _configured(**changes)


def _configured(dram_bytes: Any = "1GiB", **changes: Any) -> StoreConfig:
    return StoreConfig(dram_bytes=dram_bytes, **changes)


def test_a_policy_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="admission is 'fifo', must be one of 'arc'"):
        StoreConfig(dram_bytes=1, admission="fifo")
    with pytest.raises(TypeError, match=r"must be a name, a class or a factory"):
        StoreConfig(dram_bytes=1, admission=Always())  # type: ignore[arg-type]  # on purpose


def test_a_policy_is_made_of_a_name_or_a_factory() -> None:
    assert isinstance(StoreConfig(dram_bytes=1, admission="gated").make_policy(), Gated)
    assert isinstance(StoreConfig(dram_bytes=1, admission=Always).make_policy(), Always)
