"""Right kernels are never refused, kernels that are wrong on purpose always, and no rank takes one wrong on it."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distca.attention import AttentionSpec, choose_kernel, select
from distca.attention.pair import PairKernel
from distca.attention.reference import ReferenceKernel
from distca.attention.self_check import check
from distca.errors import KernelError
from distca.plan.kinds import AttentionKind
from distca.testing.ranks import run_ranks
from distca.testing.wrong_kernels import OtherKind, WrongKernel, wrong_kernels
from tests.attention.rounded_kernel import RoundedKernel

CPU = torch.device("cpu")
BF16 = AttentionSpec(4, 2, 32, torch.bfloat16, CPU)
WRONG = list(wrong_kernels(ReferenceKernel()))
KINDS = [AttentionKind(0.2, window=100), AttentionKind(0.2, softcap=1.5), AttentionKind(0.2, window=7, softcap=5.0)]


class PlainKernel(ReferenceKernel):
    """The reference's arithmetic, checked as any other, which the reference itself is not."""

    name = "plain"


RIGHT = [
    *((RoundedKernel(), dtype) for dtype in (torch.bfloat16, torch.float64)),
    (PlainKernel(), torch.float32),
    *(pytest.param(RoundedKernel(), dtype, marks=pytest.mark.matrix) for dtype in (torch.float16, torch.float32)),
    *(
        pytest.param(PlainKernel(), dtype, marks=pytest.mark.matrix)
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    ),
]


@pytest.mark.parametrize("kernel, dtype", RIGHT, ids=lambda given: getattr(given, "name", str(given)))
def test_right_kernels_are_never_refused(kernel, dtype) -> None:
    for seed, heads in enumerate([(1, 1, 24), (2, 1, 16), (1, 1, 128), (3, 1, 40), (2, 2, 8)]):
        found = check(kernel, AttentionSpec(*heads, dtype, CPU), seed=seed)
        assert found.objection is None
        assert found.furthest is not None and found.furthest.excess < 0.5
    narrow = check(kernel, AttentionSpec(2, 2, 24, dtype, CPU, value_dim=16))
    assert narrow.objection is None and narrow.furthest is not None and narrow.furthest.excess < 0.5


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.matrix)], ids=str)
def test_wrong_kernels_are_refused_with_the_figure(how, dtype) -> None:
    for seed, heads in enumerate([(2, 1, 32), (1, 1, 128)]):
        found = check(wrong_kernels(RoundedKernel())[how], AttentionSpec(*heads, dtype, CPU), seed=seed)
        assert found.objection is not None and "% off the reference" in found.objection
        assert found.furthest is not None and found.furthest.excess > 2


def test_a_factor_is_seen_in_the_tensor_that_has_it() -> None:
    found = check(wrong_kernels(RoundedKernel())["dV x 1.05"], BF16)
    assert (
        found.objection
        == "for head dimension 32 dv is 5.00% off the reference in the whole, and rounding explains 1.17%"
    )


def test_numbers_that_are_none_are_refused() -> None:
    kernel = WrongKernel(RoundedKernel(), backward=lambda out, _: (out[0] * float("nan"), *out[1:]))
    assert "dq is inf% off" in str(check(kernel, BF16).objection)


def test_a_kernel_that_raises_is_refused() -> None:
    class Raising(RoundedKernel):
        def forward(self, *_):
            raise RuntimeError("no such tile\nmore lines")

    assert check(Raising(), BF16).objection == "for head dimension 32 it fails: no such tile"


@pytest.mark.parametrize(
    "kernel", [RoundedKernel(), wrong_kernels(RoundedKernel())["dV x 1.05"]], ids=["right", "wrong"]
)
def test_batches_without_a_causal_mask(kernel) -> None:
    assert (check(kernel, replace(BF16, causal=False)).objection is None) == isinstance(kernel, RoundedKernel)


def test_a_causal_kernel_is_refused_where_the_mask_is_not() -> None:
    class Causal(RoundedKernel):
        def forward(self, q, k, v, batch, kind):
            return super().forward(q, k, v, replace(batch, causal=True), kind)

    assert check(Causal(), replace(BF16, causal=False)).objection is not None


def test_another_scale_is_checked() -> None:
    class OwnScale(RoundedKernel):
        def forward(self, q, k, v, batch, kind):
            return super().forward(q, k, v, batch, AttentionKind(q.shape[-1] ** -0.5))

    assert check(OwnScale(), BF16).objection is None
    assert check(OwnScale(), replace(BF16, kinds=(AttentionKind(0.3),))).objection is not None
    assert check(RoundedKernel(), replace(BF16, kinds=(AttentionKind(0.3),))).objection is None


def test_a_deterministic_kernel_gives_the_same_bits() -> None:
    class Drifting(RoundedKernel):
        calls = 0

        def backward(self, *arguments):
            self.calls += 1
            dq, dk, dv = super().backward(*arguments)
            dq[-1, -1, -1] *= 1 + self.calls * 2**-8
            return dq, dk, dv

    assert check(Drifting(), BF16).objection is None
    assert "other bits" in str(check(Drifting(), replace(BF16, deterministic=True)).objection)
    assert check(RoundedKernel(), replace(BF16, deterministic=True)).objection is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_layer_is_checked(kind) -> None:
    spec = replace(BF16, dtype=torch.float32, kinds=(AttentionKind(0.2), kind))
    assert check(PlainKernel(), spec).objection is None
    others = [replace(kind, window=kind.window + more) for more in (-1, 1) if kind.window]
    others += [replace(kind, softcap=kind.softcap + 0.5)] if kind.softcap == 1.5 else []
    for wrong in (AttentionKind(0.2), *others):
        objection = check(OtherKind(PlainKernel(), wrong), replace(spec, kinds=(kind,))).objection
        assert objection is not None and kind.name in objection


def test_backward_takes_the_outputs_of_other_kernels() -> None:
    class OwnOutputs(RoundedKernel):
        """Its lse is another by less than rounding to bfloat16 explains, and its backward expects that."""

        def forward(self, *arguments):
            o, lse = super().forward(*arguments)
            return o, lse + 0.03

        def backward(self, do, q, k, v, o, lse, *rest):
            return super().backward(do, q, k, v, o, lse - 0.03, *rest)

    assert "% off the reference" in str(check(OwnOutputs(), BF16).objection)
    pair = PairKernel(RoundedKernel(), PlainKernel())
    assert pair.name == "rounded+plain" and check(pair, BF16).objection is None


def _chosen(wrong_on: dict[str, set[int]], name: str = "auto") -> tuple[str, str]:
    """The kernel that a rank takes and what its log says, where backward of some kernels is wrong on some ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    select.why_not = lambda name, spec: None

    def make(name, spec):
        if name == "reference":
            return ReferenceKernel()
        kernel = RoundedKernel()
        if rank in wrong_on.get(name, ()):
            kernel = wrong_kernels(kernel)["dV x 1.05"]
        kernel.name = name
        return kernel

    select._make = make
    said = []
    select.logger.addFilter(lambda record: said.append(f"{record.levelname} {record.getMessage()}") or True)
    select.logger.setLevel(logging.INFO)
    try:
        return choose_kernel(name, BF16).name, said[-1]
    except KernelError as error:
        return "", str(error)


def _cases() -> list[tuple[str, str]]:
    return [
        _chosen({}),
        _chosen({"flash4": {1}}),
        _chosen({"flash4": {0}, "torch": {0, 1}}),
        _chosen({"flash4": {1}}, "flash4"),
        _chosen({}, ("reference", "auto")[dist.get_rank()]),
    ]


def test_each_rank_takes_what_is_right_on_it_and_a_named_kernel_is_for_all() -> None:
    (right, one, both, named, unlike), others = run_ranks(2, _cases)
    line = "INFO Core attention kernel: on 1 of 2 ranks (0) reference; on 1 of 2 ranks (1) flash4"
    assert (unlike, others[4]) == (("reference", line), ("flash4", line)), "ranks may name different kernels"
    figure = "for head dimension 32 dv is 5.00% off the reference in the whole, and rounding explains 1.17%"
    assert right == others[0] == ("flash4", "INFO Core attention kernel: flash4")
    refused = f"not flash4: its self-check refuses it, as {figure}"
    line = f"on 1 of 2 ranks (0) flash4; on 1 of 2 ranks (1) flash4+torch ({refused})"
    assert (one[0], others[1][0]) == ("flash4", "flash4+torch")
    assert one[1] == others[1][1] == f"WARNING Core attention kernel: {line}"
    assert (both[0], others[2][0]) == ("flash4+reference", "flash4")
    assert named == others[3] and not named[0]
    assert named[1] == (
        f"`kernel` flash4 cannot run here: on rank 1, its self-check refuses it, as {figure}. Set `kernel` to auto to "
        "choose another."
    )
