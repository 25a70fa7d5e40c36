"""The reference kernel against direct attention differentiated by autograd, in float64."""

import numpy as np
import pytest
import torch

from distca.attention import TaskBatch
from distca.attention.kernel import core_attention
from distca.attention.reference import ReferenceKernel
from distca.attention.sink import sink_gradient
from distca.plan.kinds import AttentionKind
from distca.testing.reference_attention import packed_attention, relative_error


def _inputs(tokens, heads, groups, dim, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, n, dim, generator=generator, dtype=dtype) for n in (heads, groups, groups, heads)]


@pytest.mark.parametrize("heads,groups,dim", [(4, 4, 16), (6, 2, 8), (3, 1, 20)])
@pytest.mark.parametrize("lengths", [[1], [7, 1, 300], [513, 2]])
def test_whole_documents(heads, groups, dim, lengths):
    q, k, v, do = _inputs(sum(lengths), heads, groups, dim, seed=sum(lengths))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    expected = packed_attention(q, k, v, lengths)
    expected.backward(do)
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    batch, kind = TaskBatch.of(borders, borders, "cpu"), AttentionKind(dim**-0.5)
    kernel = ReferenceKernel()
    o, lse = kernel.forward(q.detach(), k.detach(), v.detach(), batch, kind)
    assert relative_error(o, expected) < 1e-14
    # Together, because dq and dk of a document of length 1 are exactly zero.
    actual = kernel.backward(do, q.detach(), k.detach(), v.detach(), o, lse, batch, kind)
    assert relative_error(torch.cat(actual, 1), torch.cat((q.grad, k.grad, v.grad), 1)) < 1e-14


@pytest.mark.parametrize("cuts", [[0, 300, 301, 700], [0, 1, 700], [0, 699, 700]])
def test_cut_queries_equal_the_whole(cuts):
    """Tasks of one document, each with its full context, give the rows and summed gradients of the whole document."""
    q, k, v, do = _inputs(700, 4, 2, 8, seed=1)
    kernel, kind = ReferenceKernel(), AttentionKind(8**-0.5)
    whole = TaskBatch.of(np.array([0, 700], np.int32), np.array([0, 700], np.int32), "cpu")
    o, lse = kernel.forward(q, k, v, whole, kind)
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, whole, kind)

    stops = cuts[1:]
    keys = torch.cat([torch.arange(stop) for stop in stops])
    cut = TaskBatch.of(np.array(cuts, np.int32), np.concatenate(([0], np.cumsum(stops))).astype(np.int32), "cpu")
    o_cut, lse_cut = kernel.forward(q, k[keys], v[keys], cut, kind)
    dq_cut, dk_cut, dv_cut = kernel.backward(do, q, k[keys], v[keys], o_cut, lse_cut, cut, kind)
    assert relative_error(o_cut, o) < 1e-14 and relative_error(lse_cut, lse) < 1e-14
    assert relative_error(dq_cut, dq) < 1e-14
    assert relative_error(torch.zeros_like(dk).index_add_(0, keys, dk_cut), dk) < 1e-14
    assert relative_error(torch.zeros_like(dv).index_add_(0, keys, dv_cut), dv) < 1e-14


def test_an_expanded_gradient_gives_the_gradient_of_sinks(monkeypatch):
    """The gradient of a sum has one element in memory, and Triton's row sums take contiguous rows only."""
    gradients = []

    def recorded(do, *others):
        gradients.append(do)
        return sink_gradient(do, *others)

    monkeypatch.setattr("distca.attention.kernel.sink_gradient", recorded)
    q, k, v, _ = _inputs(9, 4, 2, 8, seed=3)
    sink = torch.zeros(4, dtype=q.dtype, requires_grad=True)
    batch = TaskBatch.of(np.array([0, 9]), np.array([0, 9]), "cpu")
    assert batch.borders_q.dtype == batch.borders_kv.dtype == np.int32
    core_attention(q, k, v, batch, ReferenceKernel(), AttentionKind(8**-0.5, sink=True), sink_H=sink).sum().backward()
    assert gradients[0].is_contiguous() and sink.grad.abs().min() > 0
