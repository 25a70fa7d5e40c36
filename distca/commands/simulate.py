"""``distca simulate``: what a training step would take on a described cluster. It needs neither a GPU nor torch."""

from __future__ import annotations

from distca.commands.lengths import MOST_TOKENS
from distca.commands.options import check_least, check_most, check_tolerance
from distca.commands.simulate_cases import run_cases
from distca.commands.simulate_inputs import draw, read_costs, read_model
from distca.commands.simulate_results import Files, Timeline, report
from distca.errors import BaselineError, OptionError
from distca.simulate import Cluster, Job, load_rates
from distca.simulate.job import Backward, Narrow, Recompute
from distca.simulate.rates import RATES
from distca.simulate.sweep import BEST, BEST_HIDDEN, parse
from distca.sizes.fp8_shapes import Fp8

_MOST = 1 << 20
_Counts = int | list[int]


def simulate(
    lengths: str,
    gpus: _Counts = 64,
    *,
    model: str = "8b",
    modes: str = f"distca,{BEST},{BEST_HIDDEN}",
    context: _Counts = 131_072,
    tp: int = 8,
    pp: int = 1,
    ep: int = 1,
    hide_experts: bool = False,
    tokens_per_rank: int = 131_072,
    micro_batches: int | None = None,
    recompute: Recompute = "none",
    backward: Backward = "keep",
    fp8: Fp8 = "none",
    gradients: Narrow = "float32",
    moments: Narrow = "float32",
    gpus_per_node: int = 8,
    nvlink_gb_s: float = 370.0,
    network_gb_s: float = 50.0,
    nvlink_latency_us: float = 15.0,
    network_latency_us: float = 30.0,
    memory_gib: float = 139.8,
    cost_table: str | None = None,
    rates: str | None = None,
    attention_tflops: float | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    steps: int = 1,
    output: str | None = None,
    picture: str | None = None,
    timeline: str | None = None,
    timeline_rank: int | None = None,
) -> None:
    """Predict training steps on a cluster, for DistCA and the ways to train that it is compared with.

    Args:
        lengths: a file with one document length per line, used again where a step needs more; a mix: pretrain, prolong,
            pretrain-long or prolong-long; or training data as text:PATH, jsonl:PATH, parquet:PATH, arrow:PATH,
            blend:PATH (a byte is a token) or indexed:PATH, cut where it exceeds a context.
        gpus: of the cluster; several as [64,128,256].
        model: 8b, 34b, gemma-3-like, olmo-3-like, gpt-oss-like, qwen3-30b-a3b, qwen3-235b-a22b, mixtral-8x7b,
            moonlight-16b-a3b, deepseek-v3, qwen3.5-9b, qwen3.5-27b, or a configuration file with a model (YAML).
        modes: comma-separated: distca, distca-unsplit (cad.ping_pong false), packed, packed-dealt, variable, cpN,
            cpN-keep, ringN, ulyssesN for groups of N ranks. With -hidden behind it, what a baseline sends travels
            beside computation. best-cp and best-cp-hidden take the fastest degree. With -halo (cp4-halo,
            best-cp-halo-hidden) layers with a window gather nothing and get the rows that they see. megatron-te,
            megatron-teN-p2p and megatron-teN-a2a are unmodified Megatron-Core's, with the same kernels. With stages all
            but DistCA's run 1F1B.
        context: longest document; longer ones of a mix are cut, of a long-context mix stretched to it; several as
            [131072,524288].
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel GPUs, which share the experts of every layer; rows count as if every expert got equally
            many.
        hide_experts: with distca, rows of one nano-batch travel to experts and back beside the other nano-batch's
            computation, as training does unless --recompute is all.
        tokens_per_rank: tokens of a micro-batch on a data-parallel rank.
        micro_batches: of a step; by default 1, with stages 4 for each.
        recompute: what backward computes again: none, mlp or all.
        backward: whether servers keep rows for DistCA's backward, keep, or home ranks send them again, resend; with
            stages always the latter.
        fp8: linear layers in FP8: none, or how tensors are scaled: current, delayed or blockwise.
        gradients: their type, float32 or bfloat16; memory depends on it.
        moments: of Adam, likewise.
        gpus_per_node: GPUs that share NVLink.
        nvlink_gb_s: GB/s of a GPU inside a node, each way.
        network_gb_s: GB/s of a GPU between nodes, each way.
        nvlink_latency_us: microseconds until the first byte inside a node.
        network_latency_us: the same between nodes.
        memory_gib: GiB of a GPU.
        cost_table: a measured cost table for the heads of a tensor-parallel rank; by default that of the H200.
        rates: a file of what else a GPU takes; by default that of the H200.
        attention_tflops: rate of a long document's attention forward; everything is scaled to it.
        tolerance: of plans; by default what training takes.
        seed: of the documents.
        steps: global batches to predict, one after the other.
        output: file for all figures (JSON).
        picture: file for speed over GPUs, such as speed.png.
        timeline: file for the first step of the first case that can run, for Perfetto (JSON).
        timeline_rank: the server that it shows; by default the first.
    """
    all_gpus, contexts = _several("gpus", gpus), _several("context", context)
    check_least(1, steps=steps, tokens_per_rank=tokens_per_rank, gpus=min(all_gpus), context=min(contexts))
    check_least(1, tp=tp, pp=pp, ep=ep, micro_batches=micro_batches)
    check_least(0, seed=seed, timeline_rank=timeline_rank)
    check_most(_MOST, gpus=max(all_gpus), steps=steps)
    check_most(MOST_TOKENS, context=max(contexts))
    if timeline_rank is not None and timeline is None:
        raise OptionError("--timeline_rank says what a timeline shows; give --timeline FILE too, or leave it out.")
    files = Files(output, picture, None if timeline is None else Timeline(timeline, timeline_rank or 0))
    files.check()
    if tolerance is not None:
        check_tolerance(tolerance)
    names = _modes(modes)
    if picture is not None and ("distca" not in names or len(names) < 2):
        raise OptionError(
            f"--picture shows DistCA's speed over that of others; name distca and another in --modes, not {modes}."
        )
    disaggregated = any(parse(name)[0].disaggregated for name in names)
    owned = (
        ("tolerance", tolerance is not None, disaggregated),
        ("backward", backward != "keep", disaggregated),
        ("hide_experts", hide_experts, "distca" in names),
    )
    for option, given, takes in owned:
        if given and not takes:
            raise OptionError(f"--{option} is DistCA's, but --modes is {modes}; add distca there, or leave it out.")
    if hide_experts and ep == 1:
        raise OptionError(
            "--hide_experts is about rows that travel to experts, but --ep is 1; raise --ep or leave it out."
        )
    if hide_experts and recompute == "all":
        raise OptionError(
            "--hide_experts is true, but training waits for rows of experts where --recompute is all; choose none or "
            "mlp, or leave --hide_experts out."
        )
    shape = read_model(model)
    clusters = [
        Cluster(count, gpus_per_node, nvlink_gb_s, network_gb_s, nvlink_latency_us, network_latency_us, memory_gib)
        for count in all_gpus
    ]
    cost = read_costs(shape, tp, cost_table, attention_tflops)
    jobs = [
        Job(
            shape,
            cluster,
            cost,
            tp=tp,
            pp=pp,
            ep=ep,
            hide_experts=hide_experts,
            tokens_per_rank=tokens_per_rank,
            micro_batches=micro_batches or (1 if pp == 1 else 4 * pp),
            recompute=recompute,
            backward=backward,
            fp8=fp8,
            gradients=gradients,
            moments=moments,
            tolerance=tolerance,
            rates=load_rates(RATES if rates is None else rates),
        )
        for cluster in clusters
    ]
    if files.timeline:
        files.timeline.check_rank(jobs)
    found = run_cases(
        jobs, contexts, names, lambda job, longest: draw(lengths, job, longest, seed, steps), files.timeline
    )
    report(found, lengths, f"{model}, TP {tp}, PP {pp}", memory_gib, files)


def _several(option: str, value: _Counts) -> list[int]:
    """Each once; OptionError where there is none."""
    if value == []:
        raise OptionError(f"--{option} is []; give one number, or several as [64,128].")
    return list(dict.fromkeys(value)) if isinstance(value, list) else [value]


def _modes(modes: str) -> list[str]:
    """Each once; OptionError where there is none or one is unknown."""
    names = list(dict.fromkeys(name.strip() for name in modes.split(",") if name.strip()))
    if not names:
        raise OptionError(f"--modes is {modes!r}, which names none; give some, such as distca,{BEST}.")
    for name in names:
        try:
            parse(name)
        except BaselineError as error:
            raise OptionError(f"--modes is {modes!r}. {error}") from None
    return names
