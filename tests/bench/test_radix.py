import json

from rich.console import Console

from rootcellar.bench import radix

SMOKE = radix.Workload(
    num_groups=2,
    prompts_per_group=3,
    shared_tokens=8,
    own_tokens=4,
    num_leaves=80,
    num_nodes=50,
    long_tokens=100,
    rounds=2,
)


def test_the_result_is_json_and_counts_what_it_measured() -> None:
    result = json.loads(json.dumps(radix.run(SMOKE)))
    counts = {(row["operation"], row["input"]): row["count"] for row in result["operations"]}
    assert counts["match 12 tokens", "list"] == 2 * 3 * 2
    assert counts["insert 4 tokens after 8 known", "int32 array"] == 2 * 2
    assert counts["evict a leaf", "80 leaves"] == 10
    assert result["memory"]["num_nodes"] == 50
    assert result["memory"]["num_tokens"] == 200
    assert result["workload"]["long_tokens"] == 100


def test_every_operation_is_a_row_of_the_table() -> None:
    result = radix.run(SMOKE)
    console = Console(width=140)
    with console.capture() as captured:
        console.print(radix.table(result))
    text = captured.get()
    assert all(row["operation"] in text for row in result["operations"])
    assert "bytes each" in text
