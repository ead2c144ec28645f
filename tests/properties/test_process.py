"""Process: a call leaves its process as it was, and returns tensors in memory of their own.

Equal calls are made one after the other. After the first one, which may load and cache what it likes, none may leave
torch's default dtype, a random generator, an environment variable or another piece of state changed, and out may not
lie in memory of an input, for which a call with a single key is made as well. Nor may files, threads or tensors be more
after each of many equal calls. A kernel that has dropout may draw its seed from the random generators. Catches
state that is set and not put back, outputs that are views, and caches that nothing bounds.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from reference.mask_pattern import NO_PATTERN
from reference.score_rule import PLAIN
from strategies.layouts import bits
from tests.harness.device.left_behind import FEW, OF_EARLIER, OWN, left_behind, shared
from tests.harness.law import law
from tests.harness.trial.outputs import quoted
from tests.harness.trial.problem import Problem
from tests.harness.trial.ragged_form import Prepared
from tests.harness.trial.relate import asked
from tests.harness.trial.trial import Trial
from tests.harness.verdict import LEAVES, STATE

NUMBER = re.compile(r"\d+")
"""What differs between warnings of one kind, as sizes and addresses do."""
OF_ONE_KEY = " in a call with one key"
"""What is said of memory that is shared where the softmax has a single term, and out is v."""


@law(on_device=True, key_padding=True, dropout=True, variants=True, kinds=True, place=14, stands_alone=True)
def process(trial: Trial) -> None:
    """Look at what calls without gradients leave behind, then at calls with gradients, and at a call with one key."""
    call = trial.prepared(trial.problem)
    without = trial.call(call, backward=False)
    look(trial, call, without.call)
    with_gradients = trial.call(call, backward=True)
    if with_gradients.dq is not None:
        look(trial, call, with_gradients.call)
    if trial.problem.k.shape[2] > 1 and (p := asked(trial, of_one_key(trial.problem))) is not None:
        one = trial.prepared(p)
        got = trial.call(one, backward=False)
        q, k, v = (getattr(one.problem, name) for name in ("q", "k", "v"))
        for what in shared({"q": q, "k": k, "v": v, **got.named()}):
            trial.fail(f"{LEAVES}{what}{OF_ONE_KEY}", kind=STATE, call=got.call)


def look(trial: Trial, call: Prepared, number: int) -> None:
    """Break the law if repeats of a call leave something behind.

    Memory that is shared in a call with one key is left to the cases with more keys, as these tell whether it is so
    with one key alone. Memory that is returned again is left to the law ``memory``, which compares numbers, if a call
    with other numbers returns it as well.
    """
    has_one_key = call.problem.k.shape[2] == 1
    of_earlier = [OF_EARLIER.format(name) for name in OWN]
    with noting_warnings(trial):
        repeat, may_draw = partial(trial.repeat, call, number), bool(call.problem.dropout_p)
        left = left_behind(repeat, may_draw=may_draw, known=trial.growing)
    for what in left:
        is_of_one_key = has_one_key and what.startswith(OWN)
        if not (is_of_one_key or (what in of_earlier and is_changed_by_other_numbers(trial))):
            trial.fail(f"{LEAVES}{what}", kind=STATE, call=number)


@contextmanager
def noting_warnings(trial: Trial) -> Iterator[None]:
    """Note the warnings that calls make again and again meanwhile, which break no law."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
    told = Counter(f"{x.category.__name__}: {re.sub(NUMBER, '0', str(x.message))}" for x in warned)
    for words in (x for x, times in told.items() if times > FEW):
        trial.note(f"calls warn in {{}}: {quoted(words)}", shows=True)


def of_one_key(p: Problem) -> Problem:
    """Return a call with one key, which every query sees, and one query head for each key head."""
    first = slice(None, None, p.heads_q // p.heads_kv) if p.heads_kv else slice(None)
    plain = replace(p, causal=False, key_padding_mask=None, dropout_p=0.0, pattern=NO_PATTERN, rule=PLAIN)
    return replace(plain.with_keys(slice(1)), q=p.q[:, first], dout=p.dout[:, first])


def is_changed_by_other_numbers(trial: Trial) -> bool:
    """Whether a call with -q changes what an earlier call has returned."""
    if (other := asked(trial, replace(trial.problem, q=-trial.problem.q))) is None:
        return False
    earlier = trial.forward().out
    before = earlier.clone()
    trial.forward(other)
    return not torch.equal(bits(earlier), bits(before))
