"""Laws keep v in k where they change both alike, reports name the claim, and scripts build v as a view of k."""

from dataclasses import replace
from pathlib import Path

import pytest

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.law import law_named
from tests.harness.trial import Trial
from tests.panel import latent, planted_latent
from tests.unit.running import exit_status, pytest_run

EAGER, TILED = (("tests.panel.latent:eager", latent.CLAIMS), ("tests.panel.latent:tiled", latent.SERVED))
KEPT = {
    **dict.fromkeys(("forward", "backward", "additivity", "composition", "memory", "rotary"), EAGER),
    "ragged": TILED,
}
"""Laws that have v in k in every call if it is so in a case, each with a kernel that it is run on."""
BESIDE = ("determinism", "exact", "identities", "invariance", "special")
"""Laws that have v in k in some calls, and values of their own in others."""


def calls_of(law: str, spec: str, claims: tuple[str, ...], case: Case) -> list[bool]:
    """Return of each call that a law makes on a case whether v was the first columns of k in it."""
    trial = Trial(load(spec, claims), case, "cpu", SAFETY)
    law_named(law)(trial)
    return [call.problem.v_in_k for call in trial.calls]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("law", [*KEPT, *BESIDE])
def test_v_stays_in_k(law: str, seed: int) -> None:
    spec, claims = KEPT.get(law, EAGER)
    case = Case(
        batch=2,
        heads_kv=2,
        group=2,
        seqlen_q=9,
        seqlen_k=70,
        head_dim=24,
        v_head_dim=16,
        v_in_k=True,
        k_layout="bnhd",
        seed=seed,
    )
    kinds = ("cache", "paged", "append") if law == "ragged" else ("none",)
    found = [x for kind in kinds for x in calls_of(law, spec, claims, replace(case, ragged=kind))]
    assert all(found) if law in KEPT else any(found)


def test_a_backward_is_asked_for_the_gradients_of_two_arguments() -> None:
    """The sum of dv over keys is that of dout, and in no column is it a part of dk."""
    case = Case(seqlen_q=5, seqlen_k=7, v_in_k=True)
    given = []
    for spec, claims in (EAGER, ("tests.panel.eager:float32", ("v_in_k=true",))):
        trial = Trial(load(spec, claims), case, "cpu", SAFETY)
        law_named("backward")(trial)
        given.append(trial.given[0].named())
    for name in ("dk", "dv"):
        assert (given[0][name] - given[1][name]).abs().max() < 1e-5
    assert (given[0]["dk"] - given[0]["dv"]).abs().max() > 0.1


@pytest.mark.parametrize("law", ["forward", "ragged"])
def test_a_script_builds_v_from_k_and_exits_with_0_once_the_kernel_is_right(law: str, tmp_path: Path) -> None:
    planted = {"forward": "last_columns", "ragged": "values_behind_the_end"}[law]
    bug = next(bug for bug in planted_latent.PLANTED if bug.name == f"v_in_k__{planted}")
    claims = latent.CLAIMS if bug.function == "eager" else latent.SERVED
    options = ["--kernel", f"tests.panel.planted_latent:{bug.name}", "-k", f"test_{law}", "--examples=60"]
    options += [f"--claims={claim}" for claim in (*claims, "dtypes=float16")]
    pytest_run(tmp_path, *options, "--hypothesis-seed=1", status=pytest.ExitCode.TESTS_FAILED)
    script = next(tmp_path.rglob("repro.py"))
    assert "v0 = k0[..., :" in script.read_text()
    assert exit_status(script, tmp_path) == 1
    assert "v_in_k=false" in next(tmp_path.rglob("report.md")).read_text()
    text = script.read_text().replace("tests.panel.planted_latent", "tests.panel.latent")
    script.write_text(text.replace(bug.name, bug.function))
    assert exit_status(script, tmp_path) == 0
