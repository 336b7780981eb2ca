"""Compiled kernels and torch operations against the reference, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DTYPES, assert_same_bits, bits, changed_agents, ordinary, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mergekit_ram import kernels, reference
from mergekit_ram.errors import UnsupportedInputError
from mergekit_ram.kernels import _cpu, _staging, _threads, _torch
from mergekit_ram.overlap import OverlapCounts

PATHS = ("compiled", "torch")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with both implementations."""
    assert _cpu.available()
    if request.param == "torch":
        monkeypatch.setattr(_cpu, "available", lambda: False)
    return request.param


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def same(base: torch.Tensor, agents: list[torch.Tensor], **factors: list[float]) -> None:
    """Merge, count, and do both at once, and compare with the reference."""
    n = len(agents)
    factors = {"epsilon": [1e-5] * n, "weight": [1.0] * n, "rescale": [1.0] * n} | factors
    wanted = reference.merge(base, agents, **factors)
    merged, bad = kernels.merge(base, agents, **factors)
    assert_same_bits(merged, wanted)
    overflow = int((~wanted.isfinite() & base.isfinite()).sum())
    assert bad == kernels.BadValues(0, (0,) * n, overflow)

    counts, bad = kernels.count(base, agents, epsilon=factors["epsilon"], names=range(n))
    assert not bad
    assert_counts(counts, reference.count(base, agents, epsilon=factors["epsilon"]))

    merged, both, bad = kernels.merge_and_count(base, agents, **factors, names=range(n))
    assert_same_bits(merged, wanted)
    assert bad == kernels.BadValues(0, (0,) * n, overflow)
    assert both.key() == counts.key()


def assert_counts(counts: OverlapCounts, wanted_counts: dict) -> None:
    assert counts.elements == wanted_counts["elements"]
    assert counts.overlap.tolist() == wanted_counts["overlap"]
    assert counts.pairs.tolist() == wanted_counts["pairs"]
    assert counts.below_epsilon.tolist() == wanted_counts["below_epsilon"]
    assert counts.sign_conflicts == wanted_counts["sign_conflicts"]
    assert counts.changed.tolist() == wanted_counts["changed"]
    classes = counts.unchanged_elements, counts.unique_elements, counts.shared_elements
    assert classes == tuple(wanted_counts[k] for k in ("unchanged", "unique", "shared"))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.T.contiguous().T,
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].reshape(t.shape),
}


@st.composite
def merges(draw: st.DrawFn) -> dict:
    dtype = draw(st.sampled_from(DTYPES))
    n = draw(st.sampled_from([1, 2, 3, 8, 17]))
    shape = draw(
        st.sampled_from([(), (0,), (0, 4), (1,), (7,), (3, 5), (2, 3, 4), (523,), (2064,)])
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        base = random_bits(shape, dtype, rng)
        agents = changed_agents(base, n, rng, draw(st.sampled_from([0.1, 0.5, 1.0])))
    else:
        base, agents = ordinary(shape, n, dtype, int(rng.integers(2**31)))
    factor = st.sampled_from([1.0, 1.02, 0.3, 2.0, -1.0, 1.0000001, 1e-30])
    layouts = st.sampled_from(list(LAYOUTS)) if len(shape) == 2 else st.just("contiguous")
    return {
        "tensors": [LAYOUTS[draw(layouts)](t) for t in (base, *agents)],
        "epsilon": draw(
            st.lists(st.sampled_from([0.0, 1e-5, 1e-3, 0.5, 1e300]), min_size=n, max_size=n)
        ),
        "weight": draw(st.lists(factor, min_size=n, max_size=n)),
        "rescale": draw(st.lists(factor.map(abs), min_size=n, max_size=n)),
        "chunk": draw(st.sampled_from([5 if np.prod(shape) < 100 else 200, 1 << 18])),
        "threads": draw(st.sampled_from([1, 2])),
    }


@pytest.mark.parametrize("which", PATHS)
@settings(max_examples=150, deadline=None)
@given(case=merges())
def test_any_merge_equals_the_reference(which: str, case: dict) -> None:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_threads, "CHUNK", case["chunk"])
        patch.setattr(_torch, "SCRATCH", case["chunk"] * 43)
        if which == "torch":
            patch.setattr(_cpu, "available", lambda: False)
        torch.set_num_threads(case["threads"])
        try:
            base, *agents = case["tensors"]
            same(base, agents, **{k: case[k] for k in ("epsilon", "weight", "rescale")})
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("size", [255, 256, 257, 1024, 1025, 66_000])
def test_counters_hold_what_they_count(path: str, size: int) -> None:
    """All agents change all elements: no counter of a block may be too narrow for that."""
    base = torch.zeros(size, dtype=torch.bfloat16)
    agents = [base + 1, base + 2, base - 1]
    factors = {"epsilon": [1e-5] * 3, "weight": [1.0] * 3, "rescale": [1.0] * 3}
    counts, _ = kernels.count(base, agents, epsilon=factors["epsilon"], names="abc")
    merged, both, _ = kernels.merge_and_count(base, agents, **factors, names="abc")
    assert counts.overlap.tolist() == [[0, 0, size]] * 3
    assert counts.pairs.tolist() == [[size] * 3] * 3
    assert counts.sign_conflicts == size
    assert counts.below_epsilon.tolist() == [0, 0, 0]
    assert both.key() == counts.key()
    assert (bits(merged) == bits(torch.tensor([2 / 3], dtype=torch.bfloat16))).all()
    # A difference below epsilon everywhere.
    counts, _ = kernels.count(base, agents, epsilon=[1.5] * 3, names="abc")
    assert counts.below_epsilon.tolist() == [size, 0, size]
    assert counts.overlap.tolist() == [[0, 0, 0], [size, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("n", [4, 7, 16, 64])
def test_many_agents(path: str, n: int) -> None:
    same(*ordinary((1100,), n, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unchanged_non_finite_values_among_others(path: str, dtype: torch.dtype) -> None:
    base, agents = ordinary((1500,), 3, dtype)
    signalling = bits(torch.tensor([float("inf")], dtype=dtype)) + 1
    for start, value in ((3, float("nan")), (5, float("-inf")), (7, float("inf"))):
        base[start::97] = value
    bits(base)[11::97] = signalling
    for agent in agents:
        agent[:] = torch.where(base.isfinite(), agent, base)
        bits(agent)[11::97] = signalling
    same(base, agents)
    quiet = base.clone()
    quiet[11] = float("nan")
    _, _, bad = kernels.merge_and_count(
        base, [quiet], epsilon=[0.0], weight=[1.0], rescale=[1.0], names="a"
    )
    assert bad == kernels.BadValues(1, (1,), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_encoding_of_the_16_bit_formats(path: str, dtype: torch.dtype, n: int) -> None:
    base = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    agents = []
    for shift in (1, 257, 30011)[:n]:
        agent = base.roll(shift)
        # NaN and infinity may stand only where nothing changed.
        agents.append(torch.where(agent.isfinite() & base.isfinite(), agent, base))
    merged, bad = kernels.merge(
        base, agents, epsilon=[0.0] * n, weight=[1.0] * n, rescale=[1.0] * n
    )
    wanted = reference.merge(base, agents, epsilon=[0.0] * n)
    assert_same_bits(merged, wanted)
    assert bad.overflow == int((~wanted.isfinite() & base.isfinite()).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_round_to_even(path: str, dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    # Shared changes of 0 and one step: the mean lies half-way between two numbers.
    base = torch.tensor([1.0, 1.0 + step], dtype=dtype)
    first = base + step
    second = base + 2 * step
    merged, _ = kernels.merge(
        base, [first, second], epsilon=[0.0] * 2, weight=[1.0] * 2, rescale=[1.0] * 2
    )
    assert merged.tolist() == [1 + 2 * step, 1 + 2 * step]


def test_results_do_not_depend_on_threads(path: str, two_threads: None) -> None:
    base, agents = ordinary((700_001,), 3, torch.bfloat16)
    factors = {"epsilon": [1e-5] * 3, "weight": [1.0, 0.7, 1.3], "rescale": [1.0, 1.02, 1.0]}
    two, _ = kernels.merge(base, agents, **factors)
    counts, _ = kernels.count(base, agents, epsilon=[1e-5] * 3, names="abc")
    torch.set_num_threads(1)
    one, _ = kernels.merge(base, agents, **factors)
    again, _ = kernels.count(base, agents, epsilon=[1e-5] * 3, names="abc")
    assert_same_bits(one, two)
    assert counts.overlap.tolist() == again.overlap.tolist()
    assert_same_bits(one, reference.merge(base, agents, **factors))


def test_many_python_threads_at_once(two_threads: None) -> None:
    base, agents = ordinary((600_000,), 2, torch.float32)
    factors = {"epsilon": [1e-5] * 2, "weight": [1.0] * 2, "rescale": [1.0] * 2}
    wanted = reference.merge(base, agents, **factors)
    results: list[torch.Tensor] = []
    workers = [
        threading.Thread(target=lambda: results.append(kernels.merge(base, agents, **factors)[0]))
        for _ in range(6)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 6
    for result in results:
        assert_same_bits(result, wanted)


def test_an_interrupted_merge_stops_its_threads(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the calling thread: no helper works on for memory that may be gone."""
    monkeypatch.setattr(_threads, "CHUNK", 1 << 10)
    caller = threading.get_ident()
    running = threading.Semaphore(0)
    calls: list[int] = []

    def work(start: int, stop: int) -> None:
        if threading.get_ident() == caller:
            running.acquire()
            raise KeyboardInterrupt
        calls.append(start)
        running.release()
        time.sleep(0.01)
        calls.append(stop)

    with pytest.raises(KeyboardInterrupt):
        _threads.over_chunks(work, 1 << 20)
    done = len(calls)
    assert done % 2 == 0
    assert done < 100
    time.sleep(0.05)
    assert len(calls) == done


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_are_counted_where_something_changed(
    path: str, dtype: torch.dtype
) -> None:
    nan, inf = float("nan"), float("inf")
    base = torch.tensor([nan, inf, -inf, 1.0, 1.0, nan, 1.0], dtype=dtype)
    first = torch.tensor([nan, inf, -inf, nan, 1.0, 1.0, 1.0], dtype=dtype)
    second = torch.tensor([nan, inf, 2.0, -inf, inf, 1.0, 1.0], dtype=dtype)
    ones = {"weight": [1.0] * 2, "rescale": [1.0] * 2}
    _, bad = kernels.merge(base, [first, second], epsilon=[1e-5] * 2, **ones)
    # Positions 2 and 5 (twice) have a broken base; 3 is broken in both agents, 4 in one.
    assert bad == kernels.BadValues(base=3, agents=(1, 2), overflow=0)
    _, bad = kernels.count(base, [first, second], epsilon=[1e-5] * 2, names="ab")
    assert bad == kernels.BadValues(base=3, agents=(1, 2), overflow=0)
    _, _, bad = kernels.merge_and_count(
        base, [first, second], epsilon=[1e-5] * 2, **ones, names="ab"
    )
    assert bad == kernels.BadValues(base=3, agents=(1, 2), overflow=0)
    merged, bad = kernels.merge(base[:2], [first[:2], second[:2]], epsilon=[0.0] * 2, **ones)
    assert not bad
    assert_same_bits(merged, base[:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_that_overflows_is_counted(path: str, dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max
    base = torch.tensor([0.0, 1.0, large / 2], dtype=dtype)
    agent = torch.tensor([large, 1.0, large], dtype=dtype)
    _, bad = kernels.merge(base, [agent], epsilon=[0.0], weight=[1.0], rescale=[4.0])
    assert bad == kernels.BadValues(0, (0,), 2)
    _, bad = kernels.merge(base, [agent], epsilon=[0.0], weight=[1.0], rescale=[1.0])
    assert not bad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_beyond_the_working_dtype(path: str, dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max
    base = torch.tensor([-large, -large], dtype=dtype)
    first = torch.tensor([large, large], dtype=dtype)
    second = torch.tensor([-large, large], dtype=dtype)
    factors = {"epsilon": [0.0] * 2, "weight": [1.0] * 2, "rescale": [1.0] * 2}
    merged, bad = kernels.merge(base, [first, second], **factors)
    # Unique is a copy and fine; the mean of two infinite task vectors is not.
    assert merged[0].item() == large
    assert bad == kernels.BadValues(0, (0, 0), 1)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtypes", [DTYPES[:2], DTYPES[1:3], DTYPES[::-1], (torch.bfloat16,) * 2])
def test_mixed_dtypes_meet_where_they_promote_to(
    path: str, dtypes: tuple[torch.dtype, ...], out_dtype: torch.dtype
) -> None:
    base, agents = ordinary((40, 30), len(dtypes) - 1, torch.float64)
    tensors = [t.to(d) for t, d in zip((base, *agents), dtypes, strict=True)]
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = torch.promote_types(common, dtype)
    n = len(agents)
    factors = {"epsilon": [1e-5] * n, "weight": [1.0] * n, "rescale": [1.1] * n}
    merged, bad = kernels.merge(tensors[0], tensors[1:], **factors, out_dtype=out_dtype)
    # The reference rounds to its inputs' dtype, so that it is given the working dtype.
    work = torch.float64 if common == torch.float64 else torch.float32
    exact = [t.to(common).to(work) for t in tensors]
    wanted = reference.merge(exact[0], exact[1:], **factors)
    if work == torch.float64 and out_dtype in DTYPES[:2]:
        wanted = torch.tensor(
            [nearest(v, out_dtype) for v in wanted.flatten().tolist()], dtype=out_dtype
        ).reshape(wanted.shape)
    assert_same_bits(merged, wanted.to(out_dtype))
    assert not bad
    counts, _ = kernels.count(tensors[0], tensors[1:], epsilon=factors["epsilon"], names=range(n))
    merged, both, bad = kernels.merge_and_count(
        tensors[0], tensors[1:], **factors, names=range(n), out_dtype=out_dtype
    )
    assert_same_bits(merged, wanted.to(out_dtype))
    assert not bad
    assert both.key() == counts.key()


def nearest(value: float, dtype: torch.dtype) -> float:
    """The number of a 16-bit dtype nearest to a float64, ties to even, found by looking around."""
    start = torch.tensor(value, dtype=torch.float64).to(dtype)
    around = bits(start) + torch.arange(-2, 3, dtype=torch.int16)
    candidates = around.view(dtype).double()
    distance = (candidates - value).abs()
    best = distance == distance.min()
    even = best & (around % 2 == 0)
    return float(candidates[(even if int(best.sum()) > 1 else best).nonzero()[0, 0]])


def test_float64_is_rounded_once_to_16_bits() -> None:
    # Just above the middle of two bfloat16 numbers, by less than float32 can show.
    value = 1 + 2.0**-8 + 2.0**-40
    tensor = torch.tensor([value, -value, 1.0, 0.0], dtype=torch.float64)
    base = torch.zeros(4, dtype=torch.float64)
    merged, _ = kernels.merge(
        base, [tensor], epsilon=[0.0], weight=[1.0], rescale=[1.0], out_dtype=torch.bfloat16
    )
    up = 1 + 2.0**-7
    assert merged.tolist() == [up, -up, 1.0, 0.0]


def test_an_explicit_dtype_rounds_the_inputs_first(path: str) -> None:
    base, agents = ordinary((500,), 2, torch.float32)
    factors = {"epsilon": [1e-5] * 2, "weight": [1.0] * 2, "rescale": [1.0] * 2}
    merged, _ = kernels.merge(base, agents, **factors, dtype=torch.bfloat16)
    half = [t.bfloat16() for t in (base, *agents)]
    assert_same_bits(merged, reference.merge(half[0], half[1:], **factors))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4).to(dtype)
    with pytest.raises(UnsupportedInputError, match="dequantised"):
        kernels.merge(tensor, [tensor], epsilon=[0.0], weight=[1.0], rescale=[1.0])


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(UnsupportedInputError, match=r"\(2, 3\), \(3, 2\)"):
        kernels.merge(
            torch.zeros(2, 3), [torch.zeros(3, 2)], epsilon=[0.0], weight=[1.0], rescale=[1.0]
        )


def test_inputs_are_not_written_to(path: str) -> None:
    base, agents = ordinary((300, 5), 3, torch.bfloat16)
    before = [t.clone() for t in (base, *agents)]
    merged, _ = kernels.merge(base, agents, epsilon=[1e-5] * 3, weight=[1.0] * 3, rescale=[1.0] * 3)
    merged.zero_()
    for tensor, copy in zip((base, *agents), before, strict=True):
        assert_same_bits(tensor, copy)


def test_gradients() -> None:
    base = torch.tensor([1.0, 1.0, 1.0, 1.0], requires_grad=True)
    first = torch.tensor([1.0, 2.0, 2.0, 1.0], requires_grad=True)
    second = torch.tensor([1.0, 1.0, 3.0, 5.0], requires_grad=True)
    merged, bad = kernels.merge(
        base, [first, second], epsilon=[1e-5] * 2, weight=[1.0] * 2, rescale=[1.0, 2.0]
    )
    assert not bad
    merged.sum().backward()
    assert base.grad.tolist() == [1.0, 0.0, 0.0, -1.0]
    assert first.grad.tolist() == [0.0, 1.0, 0.5, 0.0]
    assert second.grad.tolist() == [0.0, 0.0, 0.5, 2.0]
    with torch.no_grad():
        plain, _ = kernels.merge(
            base, [first, second], epsilon=[1e-5] * 2, weight=[1.0] * 2, rescale=[1.0, 2.0]
        )
    assert not plain.requires_grad
    assert_same_bits(merged, plain)
    again, counts, bad = kernels.merge_and_count(
        base,
        [first, second],
        epsilon=[1e-5] * 2,
        weight=[1.0] * 2,
        rescale=[1.0, 2.0],
        names="ab",
    )
    assert again.requires_grad
    assert not bad
    assert_same_bits(again, merged)
    assert counts.overlap.tolist() == [[1, 1], [1, 1]]


class _Allocations(TorchDispatchMode):
    """Largest tensor that any torch operation returns, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            outputs = result if isinstance(result, tuple) else (result,)
            inputs = [a.data_ptr() for a in args if isinstance(a, torch.Tensor)]
            for tensor in outputs:
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in inputs:
                    size = tensor.numel() * tensor.element_size()
                    self.largest = max(self.largest, size)
        return result


@pytest.mark.parametrize("case", ["plain", "transposed", "mixed", "another output"])
def test_scratch_is_bounded(case: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_staging, "STAGING", 1 << 20)
    monkeypatch.setattr(_torch, "SCRATCH", 1 << 20)
    base, agents = ordinary((1000, 800), 2, torch.bfloat16)
    size = base.numel() * 2
    if case == "transposed":
        agents[0] = agents[0].T.contiguous().T
    elif case == "mixed":
        agents[1] = agents[1].half()
    out_dtype = torch.float32 if case == "another output" else None
    factors = {"epsilon": [1e-5] * 2, "weight": [1.0] * 2, "rescale": [1.0] * 2}
    with _Allocations() as allocations:
        kernels.merge(base, agents, **factors, out_dtype=out_dtype)
        kernels.count(base, agents, epsilon=[1e-5] * 2, names="ab")
        kernels.merge_and_count(base, agents, **factors, names="ab", out_dtype=out_dtype)
    assert allocations.largest <= 1 << 20 < size


@pytest.mark.skipif(
    os.environ.get("MERGEKIT_RAM_LARGE_TESTS") != "1",
    reason="needs 13 GB: set MERGEKIT_RAM_LARGE_TESTS=1 to merge a tensor of 2**31 + 3 elements",
)
def test_more_than_2_to_the_31_elements() -> None:
    n = 2**31 + 3
    base = torch.zeros(n, dtype=torch.bfloat16)
    agent = torch.zeros(n, dtype=torch.bfloat16)
    agent[-2] = 1.0
    merged, bad = kernels.merge(base, [agent], epsilon=[0.0], weight=[1.0], rescale=[1.0])
    assert not bad
    assert merged[-3:].tolist() == [0.0, 1.0, 0.0]
    # Without a temporary of this size.
    rest = bits(merged)[:-3]
    assert int(rest.max()) == int(rest.min()) == 0
    counts, _ = kernels.count(base, [agent], epsilon=[0.0], names="a")
    assert (counts.elements, counts.unique_elements) == (n, 1)


def test_kernel_options() -> None:
    from mergekit_ram.kernels import _numba

    assert _numba.COMPILED
    for function in _numba.COMPILED:
        options = function.targetoptions
        assert options["nogil"] is True
        assert options["error_model"] == "numpy"
        assert not options.get("fastmath")
        assert not options.get("parallel")


SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[1])
import numpy as np, torch
from helpers import *
from mergekit_ram import kernels, reference
from mergekit_ram.kernels import _threads
for threads in (1, 2):
    torch.set_num_threads(threads)
    for dtype in DTYPES[: int(os.environ.get("DTYPES", 4))]:
        rng = np.random.default_rng(1)
        for n in (1, 3):
            base = random_bits((300,), dtype, rng)
            base[0] = float("nan")
            agents = changed_agents(base, n, rng)
            for agent in agents:
                agent[0] = base[0]
            f = dict(epsilon=[1e-5] * n, weight=[1.0] * (n - 1) + [.5], rescale=[1.1] * n)
            merged, _ = kernels.merge(base, agents, **f)
            assert_same_bits(merged, reference.merge(base, agents, **f))
            counts, _ = kernels.count(base, agents, epsilon=f["epsilon"], names=range(n))
            wanted = reference.count(base, agents, epsilon=f["epsilon"])
            assert counts.overlap.tolist() == wanted["overlap"]
            assert counts.below_epsilon.tolist() == wanted["below_epsilon"]
            merged, both, _ = kernels.merge_and_count(base, agents, **f, names=range(n))
            assert_same_bits(merged, reference.merge(base, agents, **f))
            assert both.key() == counts.key()
from mergekit_ram.kernels import _cpu
print("compiled", _cpu.available())
"""


def run_script(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_without_compilation() -> None:
    result = run_script(NUMBA_DISABLE_JIT="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["compiled", "True"]


def test_a_cpu_without_extensions() -> None:
    # LLVM would end the process if it had to convert float16 there.
    result = run_script(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", DTYPES="2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["compiled", "True"]


@pytest.mark.parametrize("when", ["at import", "while saving"])
def test_a_cache_that_cannot_be_written_costs_one_warning(when: str, tmp_path: Path) -> None:
    # Not a read-only folder: root may write to it.
    blocker = tmp_path / "file"
    blocker.write_text("")
    if when == "at import":
        environment = {
            "NUMBA_CACHE_DIR": str(blocker / "cache"),
            "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
        }
    else:
        # The folder becomes a file once numba has found it in order.
        (tmp_path / "sitecustomize.py").write_text(
            "import numba.core.caching as c\n"
            "def fail(*_): raise PermissionError(13, 'Permission denied')\n"
            "c.IndexDataCacheFile._save_index = fail\n"
        )
        environment = {
            "PYTHONPATH": str(tmp_path),
            "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        }
    result = run_script(DTYPES="1", **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["compiled", "True"]
    assert result.stderr.count("cannot be kept on disk") == 1
    assert "NUMBA_CACHE_DIR" in result.stderr


def test_a_damaged_cache_costs_one_warning(tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "DTYPES": "1"}
    assert run_script(**environment).returncode == 0
    for file in tmp_path.rglob("*.nb[ic]"):
        file.write_bytes(file.read_bytes()[:20])
    result = run_script(**environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cannot be kept on disk") == 1


def test_without_numba(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('No module named numba')\n")
    result = run_script(PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["compiled", "False"]
    assert result.stderr.count("numba cannot be used") == 1


@pytest.mark.parametrize("shape", [(), (0, 4), (7,), (5, 130), (3, 40, 50)])
def test_samples_and_digests_go_by_the_elements(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the strides, and without a copy of the whole tensor."""
    monkeypatch.setattr(kernels, "DIGEST_CHUNK", 64)
    (base,) = ordinary(shape, 0, torch.bfloat16)[:1]
    strided = torch.stack([base, base + 1], -1)[..., 0]
    assert strided.numel() < 2 or not strided.is_contiguous()
    with _Allocations() as allocations:
        assert kernels.bits_digest(strided) == kernels.bits_digest(base)
        sample = kernels.bits_sample(strided)
    assert allocations.largest <= 64 * base.element_size()
    flat = base.reshape(-1)
    assert sample == flat[: len(sample) // 2].view(torch.uint8).numpy().tobytes()
    assert len(sample) or not base.numel()
    other = base.clone()
    if base.numel():
        other.view(-1)[-1] += 1
        assert kernels.bits_digest(other) != kernels.bits_digest(base)
