"""The table of packages by laws: what a run changes in it, and what it keeps."""

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.registry import PUBLIC
from tests.harness.commands.package_table import BEGIN, END, laws, main, with_table
from tests.harness.files import ROOT
from tests.harness.law import LAWS

PAGE = f"# Findings\n\n{BEGIN}\n{END}\n\nMore.\n"


def summary(
    *results: tuple[str, str, str, str],
    device: str = "cpu",
    not_run: tuple[str, ...] = (),
    day: str = "2026-11-27",
) -> dict[str, Any]:
    """Return what the table reads of summary.json, for results (kernel, law, dtype, mark) of 1,000 examples each."""
    names = ("kernel", "property", "dtype", "mark")
    return {
        "environment": {"device": device, "device_name": "H100", "torch": "2.13.0", "jax": "0.10.2"},
        "run": {"started": f"{day}T01:02:03+00:00"},
        "kernels": {kernel: {} for kernel, *_ in results},
        "results": [dict(zip(names, row, strict=True), examples=1000) for row in results],
        "not_run": not_run,
    }


def table(page: str) -> list[dict[str, str]]:
    """Return the rows of the table as cells by the names of their columns."""
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_a_row_has_version_date_examples_and_the_worst_verdict_at_any_dtype() -> None:
    run = summary(
        ("jax_xla", "forward", "float16", "held"),
        ("jax_xla", "forward", "float32", "broken"),
        ("jax_xla", "special", "float32", "known"),
    )
    (row,) = table(with_table(PAGE, [run]))
    assert (row["kernel"], row["device"], row["package"]) == ("`jax_xla`", "CPU", "jax 0.10.2")
    assert (row["date"], row["examples"]) == ("2026-11-27", "3,000")
    assert (row["forward"], row["special"], row["backward"]) == ("X", "k", ".")
    assert sorted(laws()) == sorted(LAWS)


def test_the_rest_of_the_page_stays_and_a_second_time_changes_nothing() -> None:
    run = summary(("jax_xla", "forward", "float32", "held"), not_run=("kernel 'vllm': needs vllm",))
    page = with_table(PAGE, [run])
    assert page.startswith(f"# Findings\n\n{BEGIN}\n")
    assert page.endswith(f"{END}\n\nMore.\n")
    assert with_table(page, [run]) == page


def test_a_law_without_a_column_was_not_tried() -> None:
    page = with_table(
        PAGE, [summary(("jax_xla", "forward", "float32", "held"), not_run=("kernel 'vllm': no",))]
    )
    cells = [line.split("|") for line in page.splitlines() if line.startswith("|")]
    place = [cell.strip() for cell in cells[0]].index("ragged")
    old = "\n".join("|".join([*line[:place], *line[place + 1 :]]) for line in cells)
    ran, missing = table(with_table(f"{BEGIN}\n{old}\n{END}", []))
    assert (ran["ragged"], ran["memory"], ran["forward"]) == ("?", ".", "+")
    assert missing["ragged"] == ""


def test_a_run_replaces_rows_of_its_kernels_on_its_device_alone() -> None:
    old = with_table(
        PAGE,
        [
            summary(("jax_xla", "forward", "float32", "broken"), ("sdpa_math", "forward", "float32", "held")),
            summary(("jax_xla", "forward", "float32", "held"), device="cuda:0"),
        ],
    )
    new = with_table(old, [summary(("jax_xla", "forward", "float32", "held"), day="2026-12-01")])
    assert [(x["kernel"], x["device"], x["date"][-5:], x["forward"]) for x in table(new)] == [
        ("`sdpa_math`", "CPU", "11-27", "+"),
        ("`jax_xla`", "CPU", "12-01", "+"),
        ("`jax_xla`", "H100", "11-27", "+"),
    ]


def test_what_a_kernel_needs_is_told_until_it_has_run_somewhere() -> None:
    page = with_table(
        PAGE, [summary(not_run=("kernel 'vllm': needs vllm (or so)", "initcheck: needs a GPU"))]
    )
    (row,) = table(page)
    assert (row["kernel"], row["device"], row["forward"]) == ("`vllm`", "not run: needs vllm", "")
    run = summary(("vllm", "forward", "float16", "held"), device="cuda:0")
    run["environment"]["vllm"] = "0.33.0"
    (row,) = table(with_table(page, [run]))
    assert row["device"] == "H100"


def test_kernels_of_users_are_left_out() -> None:
    run = summary(("mine.attention", "forward", "float32", "held"))
    assert table(with_table(PAGE, [run])) == []


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="packages: begin"):
        with_table("# Findings\n", [summary()])


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(summary(("jax_xla", "forward", "float32", "held"))))
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert main([str(tmp_path), "--page", str(page)]) == 0
    assert len(table(page.read_text())) == 1
    with pytest.raises(ValueError, match="expected the summary of a run"):
        main([str(tmp_path / "none"), "--page", str(page)])


def test_the_page_of_findings_has_a_row_for_each_public_kernel() -> None:
    page = (ROOT / "docs/findings.md").read_text()
    assert {row["kernel"].strip("`") for row in table(page.partition(END)[0])} == set(PUBLIC)
