"""The comparison of cut with whole documents: that it rehearses, and that it sees a window which is off by one."""

import torch

from benchmarks.kernel_kinds import KINDS, SMALL_DOCUMENTS, cut_tasks, drawn, measured, run
from distca.attention.reference import ReferenceKernel
from distca.plan.kinds import AttentionKind
from distca.testing.reference_attention import packed_attention, relative_error


def test_cut_documents_are_as_near_as_whole_ones():
    for name in ("window 128, sinks", "softcap 5, window 100, sinks"):
        found = measured(AttentionKind(0.25, **KINDS[name]), (4, 2, 16), 1, on_gpu=False)
        assert set(found["ratio"]) == {"o", "dq", "dk", "dv", "dsink"} and max(found["ratio"].values()) < 1.1
        assert found["deterministic"] is True


def test_it_computes_what_direct_attention_does_and_no_other_window():
    inputs = drawn((4, 2, 16), sum(SMALL_DOCUMENTS), 0, sink=True, on_gpu=False).double()
    kind = AttentionKind(0.25, 100, 5.0, True)
    tasks = cut_tasks(SMALL_DOCUMENTS, kind.window, 16)
    q, kv, sink = (x.clone().requires_grad_() for x in (inputs.q, inputs.kv, inputs.sink))
    o = packed_attention(q, kv[:, 0], kv[:, 1], SMALL_DOCUMENTS, kind, sink)
    o.backward(inputs.do)
    wanted = {"o": o, "dq": q.grad, "dk": kv.grad[:, 0], "dv": kv.grad[:, 1], "dsink": sink.grad}
    found = run(ReferenceKernel(), kind, SMALL_DOCUMENTS, tasks, inputs)
    other = run(ReferenceKernel(), AttentionKind(0.25, 101, 5.0, True), SMALL_DOCUMENTS, tasks, inputs)
    for part, values in wanted.items():
        assert relative_error(found[part], values) < 1e-12, part
    assert not torch.allclose(other["o"], found["o"])
