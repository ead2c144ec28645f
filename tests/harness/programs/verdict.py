"""``verdict.json``: what a run has found, for programs. It is made of the content of summary.json alone."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.bugs.bug import Bug
from tests.harness.files import own_version
from tests.harness.law import LAWS, MATTERS_MOST, by_place, law_named
from tests.harness.programs import score
from tests.harness.programs.source import source_of
from tests.harness.programs.statuses import (
    ENVIRONMENT,
    NOT_TRIED,
    REFUSED,
    USAGE_ERROR,
    of_kernel,
    of_law,
    of_run,
    status_of,
)
from tests.harness.report.changes import Row, Summary
from tests.harness.report.folder import replay_line
from tests.harness.running.exits import SCRIPT

FORMAT = 1
"""The version of the schema. It grows when a field goes or changes its meaning, not when one is added."""


def verdict_of(summary: Summary, report_dir: Path) -> dict[str, Any]:
    """Return the content of verdict.json; ``summary`` is that of summary.json in the report directory."""
    run, rows = summary["run"], summary["results"]
    kernels = {name: _kernel(name, of["spec"], rows) for name, of in summary["kernels"].items()}
    of_device = summary["environment"]["device"]
    laws = [law for name in kernels for law in _laws(name, rows, of_device)]
    return {
        "schema": FORMAT,
        "flashproof": own_version(),
        "status": of_run((x["status"] for x in kernels.values()), run["exit"]),
        "complete": bool(rows) and not any(map(_is_open, laws)),
        "score": score.of_run(x["score"] for x in kernels.values()),
        "exit": run["exit"],
        "error": None,
        "seconds": run["seconds"],
        "seed": _seed(run["seed"]),
        "time": run["time"],
        "environment": summary["environment"],
        "report_dir": str(report_dir),
        "kernels": kernels,
        "laws": laws,
        "bugs": [_bug(row, report_dir) for row in summary["bugs"]],
        "less_precise": summary["less_precise"],
        "coverage": {name: _coverage(name, summary) for name in kernels},
        "notes": [*summary["complaints"], *summary["unjudged"], *summary["notices"], *summary["not_run"]],
    }


def no_verdict(error: str, exit_status: int, report_dir: Path) -> dict[str, Any]:
    """Return the content for a run that tried nothing, as its command line is wrong; ``error`` says why in one line."""
    nothing: dict[str, Any] = {"environment": {}, "kernels": {}, "laws": [], "bugs": []}
    nothing |= {"less_precise": {}, "coverage": {}, "notes": []}
    return {
        "schema": FORMAT,
        "flashproof": own_version(),
        "status": USAGE_ERROR,
        "complete": False,
        "score": 0.0,
        "exit": exit_status,
        "error": error,
        "seconds": 0.0,
        "seed": None,
        "time": "",
        "report_dir": str(report_dir),
        **nothing,
    }


def text_of(verdict: Mapping[str, Any]) -> str:
    """Return a verdict as JSON, which has no NaN and no infinity, in ASCII."""
    return json.dumps(verdict, indent=1, allow_nan=False) + "\n"


def read_verdict(path: Path) -> dict[str, Any]:
    """Return the content of a verdict.json, of this version of the schema or an earlier one.

    Raises ValueError, in one line, for any other file.
    """
    try:
        found = json.loads(path.read_text())
        version = found["schema"]
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise ValueError(f"{path}: got no verdict, expected a verdict.json ({type(e).__name__}: {e})") from e
    if not isinstance(version, int) or not 1 <= version <= FORMAT:
        raise ValueError(f"{path}: got schema {version!r:.80}, expected one from 1 to {FORMAT}")
    return dict(found)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of verdict.json."""
    return dict(json.loads(Path(__file__).with_name("verdict.schema.json").read_text()))


def _seed(seed: object) -> int | None:
    """Return the seed as a number; None if the run took one at random, which it does not keep."""
    return int(str(seed)) if seed is not None and str(seed).isdigit() else None


def _kernel(name: str, spec: str, rows: Iterable[Row]) -> dict[str, Any]:
    own = [row for row in rows if row["kernel"] == name]
    file, line = source_of(spec)
    return {
        "spec": spec,
        "status": of_kernel(
            map(status_of, own), [status_of(row) for row in own if row["property"] == MATTERS_MOST]
        ),
        "score": score.of_kernel(own),
        "examples": sum(row["examples"] for row in own),
        "file": file,
        "line": line,
    }


def _laws(kernel: str, rows: Iterable[Row], device: str) -> Iterator[dict[str, Any]]:
    """Yield what is told of each law of a kernel, of those that the run left out as well."""
    own = [row for row in rows if row["kernel"] == kernel]
    for law in sorted(LAWS, key=by_place):
        of_it = [row for row in own if row["property"] == law]
        status = of_law(map(status_of, of_it))
        yield {
            "kernel": kernel,
            "law": law,
            "status": status,
            "reason": _reason(law, of_it, status, device),
            "dtypes": {row["dtype"]: status_of(row) for row in of_it},
            "examples": _sum(of_it, "examples"),
            "broken": _sum(of_it, "broken"),
            "refused": _sum(of_it, "refusals"),
            "not_run": _sum(of_it, "skipped"),
            "worst": max((row["worst"] for row in of_it), default=0.0),
            "seconds": round(sum(row["seconds"].get("total", 0.0) for row in of_it), 1),
            "bugs": sorted({key for row in of_it for key in row["reports"]}),
        }


def _sum(rows: Iterable[Row], name: str) -> int:
    return sum(row[name] for row in rows)


def _reason(law: str, rows: Sequence[Row], status: str, device: str) -> str | None:
    """Say why a law has no answer; None if it has one."""
    if status not in (ENVIRONMENT, NOT_TRIED, REFUSED):
        return None
    if not rows:
        only = law_named(law).only_on
        return "left out of the run" if law_named(law).is_tried_on(device) else f"it is tried on {only} alone"
    counts = [row["reasons" if status == REFUSED else "skip_reasons"] for row in rows]
    named = {text: number for each in counts for text, number in each.items()}
    return max(named, key=named.__getitem__, default="the time was up" if status == NOT_TRIED else None)


def _is_open(law: Mapping[str, Any]) -> bool:
    """Whether a law of the run was not tried at some claimed dtype. What the run left out is not open."""
    return any(status in (ENVIRONMENT, NOT_TRIED) for status in law["dtypes"].values())


def _bug(row: Row, report_dir: Path) -> dict[str, Any]:
    bug, facts = Bug.from_dict(row["record"]), row["facts"]
    script = report_dir / row["folder"] / SCRIPT
    return {
        "id": row["folder"],
        "kernel": row["kernel"],
        "law": row["law"],
        "laws": list(row["laws"]),
        "dtypes": list(row["dtypes"]),
        "tensors": row["tensors"],
        "headline": row["headline"],
        "certificate": row["certificate"],
        "claim": facts["claim"],
        "where": facts.get("where"),
        "error": facts.get("error"),
        "needs": facts.get("needs"),
        "failures": row["failures"],
        "severity": {
            "rank": row["rank"],
            "shown": row["ordinary_shown"],
            "tried": row["ordinary_tried"],
            "text": facts.get("how bad"),
        },
        "case": facts["smallest"],
        "claims_that_hold": [shlex.split(line.partition(": ")[0])[1] for line in row["offers"]],
        "replay": replay_line(bug.failure, report_dir),
        "report": str(report_dir / row["folder"]),
        "script": str(script) if script.is_file() else None,
    }


def _coverage(kernel: str, summary: Summary) -> dict[str, Any]:
    tried = summary["tried"].get(kernel, {})
    counts = {name: tried.get(name, (0, 0)) for name in ("levels", "pairs", "triples")}
    told = {name: {"tried": some, "claimed": all_} for name, (some, all_) in counts.items()}
    return {
        "values": told["levels"],
        "pairs": told["pairs"],
        "triples": told["triples"],
        "never": [f"{axis}={level}" for axis, level in tried.get("missing", ())],
        "laws_not_tried": summary["not_tried"].get(kernel, ""),
    }
