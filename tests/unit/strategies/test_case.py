"""A case survives being printed and saved, and a file that is not a case is refused."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from kernels.contract import Capabilities
from strategies.case import Case, Spike, from_json, to_json
from strategies.cases import cases

FULL = Case(
    batch=2,
    heads_kv=3,
    group=4,
    seqlen_q=0,
    seqlen_k=65,
    head_dim=72,
    dtype="bfloat16",
    causal=True,
    sm_scale=0.1,
    key_padding="left",
    dropout_p=0.25,
    window=7,
    chunk=128,
    k_layout="bnhd",
    v_values="wide",
    seed=2**32 - 1,
    spikes=(
        Spike("k", (1, 2, 3, 4), 3e38),
        Spike("dout", (0, 0, 0, 0), "-inf"),
        Spike("q", (0, 0, 0, 0), -0.0),
    ),
    launch=(("block_n", 32), ("warp_specialize", True), ("scale", 0.5), ("mode", "fast"), ("split", None)),
)
CLAIMS = Capabilities(launch={"block_m": (16, 64), "mode": ("fast", None)})


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(to_json(FULL)), **fields})


def without(field: str) -> str:
    return json.dumps({name: value for name, value in json.loads(to_json(FULL)).items() if name != field})


def spike(**fields: Any) -> list[dict[str, Any]]:
    return [{"tensor": "q", "index": [0, 0, 0, 0], "value": 1.0, **fields}]


def test_full_case_survives_json_and_repr() -> None:
    assert repr(from_json(to_json(FULL))) == repr(FULL)  # by repr, because -0.0 == 0.0
    assert eval(repr(FULL), {"Case": Case, "Spike": Spike}) == FULL


@settings(database=None, deadline=None, max_examples=50)
@given(cases(CLAIMS, dtype="float16", nonfinite=True) | cases(CLAIMS, dtype="float16"))
def test_drawn_cases_survive_json_and_repr(case: Case) -> None:
    assert repr(from_json(to_json(case))) == repr(case)
    assert eval(repr(case), {"Case": Case, "Spike": Spike}) == case


def test_json_layout() -> None:
    record = json.loads(to_json(FULL))
    assert record["version"] == 10
    assert record["spikes"][0] == {"tensor": "k", "index": [1, 2, 3, 4], "value": 3e38}
    assert record["launch"]["block_n"] == 32


def test_a_file_older_than_a_field_has_its_default() -> None:
    record, expected = json.loads(to_json(FULL)), FULL
    parts = ("window_right", "chunk", "first_keys", "prefix", "softcap", "alibi_slopes", "bias", "sinks")
    sequences = ("seqlens_q", "seqlens_k", "rows_behind", "page_size", "block_table", "pool")
    for version, names in (
        (9, ("way", "earlier", "rounds", "inference")),
        (8, sequences),
        (7, ("ragged", "fp8_cache", "fp8_inputs", "rotary")),
        (6, ("v_in_k",)),
        (5, ("v_head_dim",)),
        (4, parts),
        (3, ("window",)),
        (2, ("key_padding",)),
        (1, ("dropout_p",)),
    ):
        record["version"] = version
        for name in names:
            del record[name]
        expected = replace(expected, **{name: getattr(Case, name) for name in names})
        assert from_json(json.dumps(record)) == expected


def test_json_refuses_to_write_numbers_it_could_not_read() -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json(Case(sm_scale=float("nan")))


def test_integers_are_read_as_floats_where_a_float_is_meant() -> None:
    scale = from_json(changed(sm_scale=2)).sm_scale
    assert scale == 2.0
    assert isinstance(scale, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not JSON"),
        ("{", "'{' is not JSON"),
        ("[1]", "got [1], expected an object"),
        ("null", "got None, expected an object"),
        (changed(version=0), "version: got 0, expected 1 to 10"),
        (changed(version=11), "version: got 11, expected 1 to 10"),
        (changed(version=True), "version: got True, expected 1 to 10"),
        (changed(version="1"), "version: got '1', expected 1 to 10"),
        (without("version"), "version: got None, expected 1 to 10"),
        (changed(version=6), "v_in_k: got False, expected no such field in version 6"),
        (changed(version=5), "v_head_dim: got 0, expected no such field in version 5"),
        (without("seqlen_k"), "seqlen_k: missing"),
        (without("spikes"), "spikes: missing"),
        (changed(seqlenk=3), "seqlenk: got 3, expected no field but"),
        (changed(heads_q=3), "heads_q: got 3, expected no field but"),
        (changed(batch=1.0), "batch: got 1.0, expected an integer"),
        (changed(batch=True), "batch: got True, expected an integer"),
        (changed(batch="1"), "batch: got '1', expected an integer"),
        (changed(seqlen_q=-1), "seqlen_q: got -1, expected an integer, 0 or more"),
        (changed(seed=None), "seed: got None, expected an integer"),
        (changed(causal=1), "causal: got 1, expected true or false"),
        (changed(dtype=None), "dtype: got None, expected a string"),
        (changed(sm_scale="1"), "sm_scale: got '1', expected a finite number or null"),
        (changed(sm_scale=False), "sm_scale: got False, expected a finite number or null"),
        (changed(sm_scale=float("nan")), "sm_scale: got nan, expected a finite number"),
        (changed(sm_scale=10**400), f"sm_scale: got 1{79 * '0'}, expected a finite number"),
        (changed(dropout_p=1.0), "dropout_p: got 1.0, expected a probability from 0 up to 1"),
        (changed(dropout_p=None), "dropout_p: got None, expected a probability"),
        (changed(spikes={}), "spikes: got {}, expected a list"),
        (changed(spikes=[1]), "spikes[0]: got 1, expected an object"),
        (changed(spikes=spike(index=[0, 0, 0])), "spikes[0].index: got [0, 0, 0], expected four"),
        (changed(spikes=spike(index=[0, 0, 0, 0.5])), "spikes[0].index: got 0.5, expected an integer"),
        (changed(spikes=spike(tensor=0)), "spikes[0].tensor: got 0, expected a string"),
        (changed(spikes=spike(value="NaN")), "spikes[0].value: got 'NaN', expected a finite number or"),
        (changed(spikes=spike(value=float("inf"))), "spikes[0].value: got inf, expected a finite"),
        (changed(spikes=spike(value=[])), "spikes[0].value: got [], expected a finite"),
        (changed(spikes=spike(row=1)), "spikes[0].row: got 1, expected no field but"),
        (changed(launch=[["block_m", 16]]), "launch: got [['block_m', 16]], expected an object"),
        (changed(launch={"block_m": [16]}), "launch.block_m: got [16], expected a string, a finite"),
        (changed(launch={"block_m": float("inf")}), "launch.block_m: got inf, expected a string, a fin"),
    ],
)
def test_what_is_not_a_case_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^case(\.|: ){re.escape(message)}") as refusal:
        from_json(text)
    assert "\n" not in str(refusal.value)


def test_sequences_of_an_older_file_follow_from_its_seed() -> None:
    record = json.loads(to_json(replace(FULL, ragged="paged")))
    later = ("earlier", "rounds", "inference")
    for name in ("seqlens_q", "seqlens_k", "rows_behind", "page_size", "block_table", "pool", "way", *later):
        del record[name]
    assert from_json(json.dumps({**record, "version": 8})) == replace(
        FULL, ragged="paged", block_table="of_seed"
    )


def test_lengths_of_sequences_are_lists_in_json() -> None:
    case = replace(FULL, ragged="packed", seqlens_q=(3, 0), seqlens_k=(1, 9), rows_behind=7)
    assert json.loads(to_json(case))["seqlens_q"] == [3, 0]
    assert from_json(to_json(case)) == case
    with pytest.raises(ValueError, match=r"seqlens_k\[1\]: got -1, expected an integer, 0 or more"):
        from_json(changed(seqlens_k=[2, -1]))
    with pytest.raises(ValueError, match="seqlens_k: got 3, expected a list of integers"):
        from_json(changed(seqlens_k=3))
