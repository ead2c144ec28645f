"""Functions that do not fit the contract are refused in one line, and a kernel that refuses all cases fails."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.contract import AttentionKernel
from kernels.contract.parsing import PLAIN_FUNCTION, parse_claims
from kernels.registry import SpecError, load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.refusals import Advice, complaint, drawn_within
from tests.harness.running.tally import MOST_CASES, Tally
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Verdict
from tests.harness.worker.probe import probe, simplest_case
from tests.properties.test_backward import backward
from tests.properties.test_forward import forward
from tests.unit.support.running import TOYS, pytest_run, summary_in
from tests.unit.support.toys import CLAIMS, sound

STRANGERS = TOYS.with_name("strangers.py")
EXPECTED = "expected a function f(q, k, v, *, causal, sm_scale), "


class TestSignature:
    @pytest.mark.parametrize(
        ("name", "told"),
        [
            (
                "other_names",
                "got other_names(q, k, v, scale=1.0, is_causal=False): got an unexpected keyword argument 'causal'",
            ),
            (
                "positional",
                "got positional(q, k, v, causal, sm_scale, /): "
                "'causal' parameter is positional only, but was passed as a keyword",
            ),
            (
                "without_scale",
                "got without_scale(q, k, v, *, causal): got an unexpected keyword argument 'sm_scale'",
            ),
            (
                "with_bias",
                "got with_bias(q, k, v, bias, *, causal, sm_scale): missing a required argument: 'bias'",
            ),
            ("Attention", "got the class Attention"),
            ("Fused", "got the class Fused"),
            ("device_code", "got device_code, a Triton kernel without the function that launches it"),
        ],
    )
    def test_one_that_cannot_be_called_is_refused_when_it_is_loaded(self, name: str, told: str) -> None:
        with pytest.raises(SpecError) as refused:
            load(f"{STRANGERS}:{name}")
        # What follows are words of ``inspect``, which differ between versions of Python.
        found = re.sub("'causal' parameter .*", "", str(refused.value))
        assert found == re.sub("'causal' parameter .*", "", f"kernel '{STRANGERS}:{name}': {EXPECTED}{told}")

    @pytest.mark.parametrize("name", ["any_keywords", "passing_on", "module", "written_in_c"])
    def test_one_that_may_take_anything_is_loaded(self, name: str) -> None:
        assert load(f"{STRANGERS}:{name}").name == f"strangers.{name}"

    def test_keywords_of_what_is_claimed_are_expected_and_passed(self, tmp_path: Path) -> None:
        path = tmp_path / "masked.py"
        path.write_text(
            "def f(q, k, v, *, causal, sm_scale, key_padding_mask=None):\n    return key_padding_mask\n"
        )
        kernel = load(f"{path}:f", ["key_padding=true"])
        assert kernel.forward(0, 0, 0, causal=False, sm_scale=1.0, key_padding_mask=7) == (7, None)
        with pytest.raises(SpecError, match=r"sm_scale, key_padding_mask\), got sound\(q, k, v, \*, causal"):
            load(f"{TOYS}:sound", ["key_padding=true"])
        with pytest.raises(SpecError, match=r"dropout_p, dropout_seed\), got f\("):
            load(f"{path}:f", ["dropout=0,0.1"])


class TestProbe:
    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("three_results", "returned a tuple of 3, expected out or (out, lse)"),
            ("a_list", "returned a list, expected out or (out, lse)"),
            ("an_array", "returned a numpy.ndarray, expected out or (out, lse)"),
            ("an_array_beside", "returned (torch.Tensor, numpy.ndarray), expected out or (out, lse)"),
            ("nothing", "returned None, expected out or (out, lse)"),
            (
                "rows_first",
                "returned out of shape (1, 16, 2, 16), expected (1, 2, 16, 16), which is "
                "(batch, heads, seqlen, head_dim): it has the shape for tensors of (batch, seqlen, heads, head_dim)",
            ),
            (
                "rows_first_with_lse",
                "returned lse of shape (1, 16, 2), expected (1, 2, 16), which is (batch, heads, seqlen): "
                "--claims lse_layout=bnh fits it",
            ),
            (
                "rows_first_throughout",
                "returned the answer for tensors of (batch, seqlen, heads, head_dim), "
                "expected the one for (batch, heads, seqlen, head_dim)",
            ),
            (
                "flat",
                "returned out of shape (1, 16, 32), expected (1, 2, 16, 16), which is (batch, heads, seqlen, head_dim)",
            ),
            ("always_float32", "returned out of dtype torch.float32, expected torch.float16"),
            (
                "passing_on",
                f"{EXPECTED}but the call raised TypeError: "
                "without_scale() got an unexpected keyword argument 'sm_scale'",
            ),
            (
                "module",
                f"{EXPECTED}but the call raised TypeError: "
                "Attention.forward() got an unexpected keyword argument 'causal'",
            ),
            (
                "written_in_c",
                f"{EXPECTED}but the call raised TypeError: "
                "scaled_dot_product_attention() got an unexpected keyword argument 'causal'",
            ),
        ],
    )
    def test_what_is_no_answer_is_told_in_one_line(self, name: str, told: str) -> None:
        assert probe(load(f"{STRANGERS}:{name}"), "cpu") == told

    @pytest.mark.parametrize(
        "spec",
        [
            f"{STRANGERS}:any_keywords",
            f"{STRANGERS}:half_a_type_error",
            f"{STRANGERS}:three_if_causal",
            f"{TOYS}:sound",
            f"{TOYS}:wrong",
            f"{TOYS}:nonfinite",
            f"{TOYS}:raising",
            f"{TOYS}:refusing_all",
            f"{TOYS}:wrong_gradient",
            f"{TOYS}:MASKED",
        ],
    )
    def test_right_answers_wrong_ones_refusals_and_bugs_are_left_to_the_laws(self, spec: str) -> None:
        assert probe(load(spec), "cpu") is None

    def test_a_call_that_ends_the_process_is_left_to_the_laws(self, child: Child) -> None:
        info = KernelInfo.ask(child, f"{TOYS}:crashing", ())
        info.check_returned(child)
        assert child.process is None

    def test_the_case_is_claimed(self) -> None:
        for claims in (
            [],
            ["causal=true", "dtypes=float32", "head_dims=96"],
            ["seqlen_multiple=48", "min_seqlen=50", "grouped_heads=false", "unequal_lengths=false"],
        ):
            capabilities = parse_claims(claims, PLAIN_FUNCTION)
            assert capabilities.admits(simplest_case(capabilities))


class TestLaws:
    """A mistake that the first call does not show is a finding of a law, with a case."""

    def claim_of(self, kernel: AttentionKernel, case: Case) -> str:
        with pytest.raises(LawBroken) as broken:
            backward(Trial(kernel, case, "cpu", SAFETY))
        assert broken.value.finding.kind == "contract"
        return broken.value.finding.claim

    def test_a_tuple_of_the_wrong_length(self) -> None:
        kernel = load(f"{STRANGERS}:three_if_causal")
        case = Case(seqlen_q=3, seqlen_k=3)
        forward(Trial(kernel, case, "cpu", SAFETY))
        claim = "a kernel returns what its contract says, but it returned a tuple of 3, expected out or (out, lse)"
        assert self.claim_of(kernel, replace(case, causal=True)) == claim

    def test_another_shape_where_gradients_are_asked_for(self) -> None:
        case = Case(heads_kv=2, seqlen_q=3, seqlen_k=3)
        claim = "out.shape is (1, 3, 2, 16), but should be (1, 2, 3, 16)"
        assert self.claim_of(load(f"{STRANGERS}:rows_first"), case) == claim

    def test_a_backward_with_two_results(self) -> None:
        kernel = AttentionKernel(
            name="two", forward=sound, backward=lambda *tensors, **options: tensors[:2], capabilities=CLAIMS
        )
        claim = self.claim_of(kernel, Case(seqlen_q=3, seqlen_k=3))
        assert claim.endswith("returned 2 values from its backward, expected (dq, dk, dv)")


class TestImports:
    @pytest.mark.parametrize(
        ("source", "told"),
        [
            (
                "import flash_attn_4",
                r"importing \S+ raised ModuleNotFoundError: No module named 'flash_attn_4'; .* install it",
            ),
            ("import sys; sys.exit('no GPU')", r"importing \S+ raised SystemExit: no GPU"),
            ("raise RuntimeError('one\\ntwo')", r"importing \S+ raised RuntimeError: one"),
            ("raise ValueError", r"importing \S+ raised ValueError"),
            ("import os; os._exit(7)", r"expected a kernel that can be imported, .* ended with status 7"),
            ("def f(:", r"importing \S+ raised SyntaxError: .*mine.py, line 1.*"),
            (
                "import ctypes; ctypes.string_at(0)",
                r"expected a kernel that can be imported, but .* signal 11 \(Segmentation fault\)",
            ),
            ("raise KeyboardInterrupt", r"expected a kernel that can be imported, but the process ended .*"),
            (
                "def __getattr__(name):\n    raise ImportError('built without CUDA')",
                r"looking up 'f' in \S+ raised ImportError: built without CUDA; .* on a GPU",
            ),
        ],
        ids=["package", "exit", "exception", "no message", "status", "syntax", "crash", "interrupt", "lazy"],
    )
    def test_each_failure_is_one_line(self, child: Child, tmp_path: Path, source: str, told: str) -> None:
        path = tmp_path / "mine.py"
        path.write_text(source)
        with pytest.raises(ValueError, match=r"mine\.py:f': ") as refused:
            KernelInfo.ask(child, f"{path}:f", ())
        assert re.fullmatch(f"kernel '{path}:f': {told}", str(refused.value)), refused.value

    def test_one_that_never_ends(self, child: Child, tmp_path: Path) -> None:
        path = tmp_path / "mine.py"
        path.write_text("import time\nwhile True: time.sleep(1)\n")
        child.ask({"do": "environment"})  # the process starts here, before the short limit
        child.start_seconds, patience = 0.5, child.start_seconds
        with pytest.raises(ValueError, match=r"can be imported, but it was still running after 0\.5 s$"):
            KernelInfo.ask(child, f"{path}:f", ())
        child.start_seconds = patience


def tally(case: Case, refused: int = 0, answered: int = 0, skipped: int = 0, reason: str = "no") -> Tally:
    """Return the counts of an item, all of the same case."""
    found = Tally()
    for status, number in (("refused", refused), ("held", answered), ("skipped", skipped)):
        for _ in range(number):
            is_held = status == "held"
            found.add(
                Verdict(
                    status=status, worst={"out": 0.5} if is_held else {}, reason="" if is_held else reason
                ),
                case,
            )
    return found


class TestComplaint:
    MASKED, PLAIN = Case(causal=True), Case()

    def told(self, **tallies: Tally) -> str | None:
        return complaint("f", {(law, "float32"): x for law, x in tallies.items()})

    def test_a_kernel_that_answers_is_not_told_of(self) -> None:
        assert self.told(forward=tally(self.PLAIN, answered=9, skipped=9)) is None
        assert self.told(forward=tally(self.PLAIN, answered=1, refused=9)) is None
        assert self.told() is None
        assert self.told(forward=Tally(known=7)) is None

    def test_few_cases_of_a_law_that_are_refused_say_nothing_of_it(self) -> None:
        """A law may have time for an example or two, which are just what the kernel refuses now and then."""
        answered = tally(self.PLAIN, answered=9)
        assert self.told(forward=answered, composition=tally(self.PLAIN, refused=4)) is None
        told = self.told(forward=answered, composition=tally(self.PLAIN, refused=5)) or ""
        assert told.startswith("f: refused 5 of 5 cases that it claims under composition")

    def test_a_kernel_that_refuses_everything(self) -> None:
        refusing = tally(self.PLAIN, refused=2, reason="not\ntoday")
        assert self.told(forward=refusing, memory=refusing) == (
            "f: refused all 4 cases that it claims (not today); claim less with --claims, or mend the kernel"
        )

    def test_reasons_of_refusals_are_quoted_in_short_and_without_those_of_other_cases(self) -> None:
        found = tally(self.PLAIN, refused=2, reason=f"no mask for {9 * 'these rows '}and {99 * 'others '}")
        found.merge(tally(self.PLAIN, skipped=3, reason="no memory for the tensors"))
        told = self.told(forward=found) or ""
        assert told.startswith("f: refused all 2 cases that it claims (no mask for these rows")
        assert "others ...); claim less" in told
        assert len(told) < 320

    def test_claims_that_were_tried_are_told(self) -> None:
        answered = tally(self.PLAIN, answered=20)
        masked = tally(self.MASKED, refused=10, reason="no mask")
        advice = Advice(("causal=false", "grouped_heads=false"), 31, 32)
        assert complaint("f", {("forward", "float32"): answered, ("special", "float32"): masked}, advice) == (
            "f: refused 10 of 10 cases that it claims under special (float32) (no mask); claim less: "
            "--claims causal=false --claims grouped_heads=false (tried: 31 of 32 cases are answered)"
        )

    def test_without_such_claims_it_is_told_what_refused_cases_have_in_common(self) -> None:
        found = tally(self.MASKED, refused=20, reason="no mask")
        found.merge(tally(Case(causal=True, seqlen_k=9), refused=20, reason="no mask"))
        found.merge(tally(self.PLAIN, answered=4))
        assert self.told(forward=found) == (
            "f: refused 40 of 44 cases that it claims under forward (float32) (no mask); "
            "all that were refused have in common: the causal mask; claim less with --claims, or mend the kernel"
        )

    def test_where_nothing_tells_the_cases_apart_only_the_kernel_is_quoted(self) -> None:
        answered, refused = tally(self.PLAIN, answered=20), tally(self.PLAIN, refused=10)
        told = self.told(forward=answered, special=refused) or ""
        assert told.endswith("under special (float32) (no); claim less with --claims, or mend the kernel")

    def test_one_of_which_nothing_can_be_run(self) -> None:
        skipped = tally(self.PLAIN, skipped=3, reason="no inline assembly here")
        assert self.told(forward=skipped, memory=skipped) == (
            "f: none of its 6 cases could be run here (no inline assembly here)"
        )

    def test_cases_that_were_drawn_from_what_it_answers_do_not_hide_its_refusals(self) -> None:
        found = tally(self.MASKED, refused=38)
        found.merge(tally(self.PLAIN, answered=2))
        found.merge(within := tally(self.PLAIN, answered=104))
        assert self.told(forward=found) is None
        found.within = within.examples
        assert self.told(forward=found) == (
            "f: refused 38 of 40 cases that it claims under forward (float32) (no); "
            "all that were refused have in common: the causal mask; claim less with --claims, or mend the kernel"
        )
        assert drawn_within("f", {("forward", "float32"): found}) is None
        found.merge(tally(self.PLAIN, answered=10))
        told = (
            "f: refused 38 of 50 cases that it claims (no), "
            "so that 104 others were drawn from what it seems to answer"
        )
        assert drawn_within("f", {("forward", "float32"): found}) == (
            f"{told}; all that were refused have in common: the causal mask"
        )
        assert drawn_within("f", {("forward", "float32"): found}, Advice(("causal=false",), 24, 24)) == (
            f"{told}; claim less: --claims causal=false (tried: 24 of 24 cases are answered)"
        )

    def test_what_is_kept_of_the_cases_is_bounded_and_travels(self) -> None:
        found = Tally()
        for number in range(2 * MOST_CASES):
            case = Case(seqlen_q=number, seed=number, q_values="ones", launch=(("block_m", 16),))
            for verdict in (Verdict(status="refused"), Verdict(status="held", worst={"out": 0.5})):
                found.add(verdict, case)
                found.add(verdict, replace(case, seed=1 + number))
        assert len(found.refused_cases) == len(found.answered_cases) == MOST_CASES
        assert [*found.refused_cases][3] == Case(seqlen_q=3, launch=(("block_m", 16),))
        again = Tally.from_dict(found.to_dict())
        assert again == found


class TestCommandLine:
    @pytest.mark.parametrize(
        ("name", "line"),
        [
            ("strangers.py:other_names", rf"{re.escape(EXPECTED)}got other_names\(q, k, v, scale=1.0, .*"),
            ("strangers.py:three_results", re.escape("returned a tuple of 3, expected out or (out, lse)")),
            ("crash.py:f", "expected a kernel that can be imported, but the process ended with signal 11 .*"),
        ],
    )
    def test_what_does_not_fit_is_status_4_and_one_line(self, tmp_path: Path, name: str, line: str) -> None:
        (tmp_path / "strangers.py").write_text(STRANGERS.read_text())
        (tmp_path / "crash.py").write_text("import ctypes; ctypes.string_at(0)")
        run = pytest_run(
            tmp_path, "--kernel", name, "-p", "no:cacheprovider", status=pytest.ExitCode.USAGE_ERROR
        )
        printed = (run.stdout + run.stderr).strip()
        assert re.fullmatch(f"ERROR: kernel '{name}': {line}", printed), printed
        assert not (tmp_path / "reports").exists()

    @pytest.mark.nightly
    def test_what_answers_too_little_is_status_1_and_one_line_for_each_kernel(self, tmp_path: Path) -> None:
        names = ("without_bfloat16", "without_memory", "without_gradients", "refusing_all")
        files = dict.fromkeys(names, STRANGERS) | {"refusing_all": TOYS}
        specs = [f"--kernel={path}:{name}" for name, path in files.items()]
        options = ["-k", "forward or backward", "--claims=dtypes=bfloat16,float32", "--examples=15", "-n1"]
        run = pytest_run(tmp_path, *specs, *options, status=pytest.ExitCode.TESTS_FAILED)
        assert "failed" not in run.stdout.splitlines()[-1]
        lines = [
            "strangers.without_bfloat16: refused 30 of 30 cases that it claims under backward (bfloat16), "
            "forward (bfloat16) (no bfloat16); claim less: --claims dtypes=float32",
            "strangers.without_memory: none of its 60 cases could be run here "
            "(out of memory in the kernel: no room for a workspace)",
            "strangers.without_gradients: refused 30 of 30 cases that it claims under "
            "backward (bfloat16, float32) (inference only); claim less: --claims backward=false",
            "toys.refusing_all: refused all 60 cases that it claims (not today); "
            "claim less with --claims, or mend the kernel",
        ]
        printed = re.findall(r"^\S+: (?:refused|none of).*", run.stdout, re.MULTILINE)
        assert [re.sub(r" \(tried: (\d+) of \1 cases are answered\)$", "", line) for line in printed] == lines
        assert summary_in(tmp_path)["complaints"] == printed

    @pytest.mark.parametrize(
        ("name", "options", "told"),
        [
            (
                "one_query",
                ["--hypothesis-seed=5"],
                r"\(seqlen_q must be 1\); claim less: --claims max_seqlen_q=1( --.*)? \(tried: .*\)",
            ),
            (
                "whole_blocks_of_keys",
                ["--max-seqlen=127"],
                r"\(keys come in blocks of 128\); all that were refused have in common: seqlen_k that is no multiple "
                r"of 128; claim less with --claims, or mend the kernel",
            ),
        ],
    )
    def test_claims_are_tried_and_what_no_claim_can_say_is_told_in_words(
        self, name: str, options: list[str], told: str, tmp_path: Path
    ) -> None:
        few = ["-k", "forward and float32", "--examples=60", "--hypothesis-seed=2", *options]
        run = pytest_run(tmp_path, f"--kernel={STRANGERS}:{name}", *few, status=pytest.ExitCode.TESTS_FAILED)
        (printed,) = re.findall(r"^strangers\.\S+: refused .*", run.stdout, re.MULTILINE)
        under = r"refused (all )?\d+ (of \d+ )?cases that it claims( under forward \(float32\))?"
        assert re.fullmatch(rf"strangers\.{name}: {under} {told}", printed), printed
