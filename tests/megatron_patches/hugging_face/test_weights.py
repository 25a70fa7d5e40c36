"""Weights of Hugging Face folders in GPTModels: the same logits as transformers in every layout, and back again."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import family_models
from distca.testing.ranks import run_ranks
from distca.testing.reference_attention import relative_error
from megatron_patches.versions import has_gated_delta_net

TOLERANCE = 1e-5
NEWER = ("qwen3_5", "qwen3_next", "nemotron_h", "deepseek_v3", "moonlight")
"""Beginnings of cases that Megatron-Core 0.16.1 has no model for."""


def _served(names):
    return [name for name in names if has_gated_delta_net() or not name.startswith(NEWER)]


ALIKE = (
    *("llama, own base and wide heads", "linear", "yarn", "yarn, two magnitudes", "mistral", "olmo2", "arcee"),
    *("qwen2, windows in later layers", "smollm3, windows", "phi3, longrope"),
)
"""Cases that differ from others in figures or fields alone, which tests of descriptions and frequencies hold too."""
CUT = ("llama", "qwen3", "phi3", "gemma2", "gpt_oss, dense", "arcee, biases")
STAGED = ("qwen2, tied", "olmo3", "cohere2", "qwen3_5 with images, tied", "nemotron_h")
"""Cases of tensor-parallel ranks, and of these in stages: together they have every weight, bias and norm that ranks
cut. STAGED have what depends on a layer's place: its kind, its window and rotation, and embeddings of both ends."""
THOROUGH = (
    *("llama", "qwen2, tied", "dynamic", "granite", "gemma2", "gemma3", "olmo3", "ministral3", "cohere2", "phi4_mini"),
    *("gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h"),
)
"""Cases that are also computed with attention at home, and whose token losses are also taken one by one: together they
have every kind of core attention and recurrence, of rotation by lengths, and of what is done with logits."""
REPLICATED = ("llama",)
"""The case of two data-parallel ranks: weights are the same on both."""


def _errors(root, layouts):
    """By layout, case and mode: the largest relative error of a document's logits and of the losses' sum.

    Where attention stays at home THOROUGH cases are held by one rank, and one case by several: what a rank does with
    angles depends on no layout.
    """
    warnings.filterwarnings("ignore")
    import torch.distributed as dist

    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    found = {}
    for (tp, pp), names in layouts.items():
        for path in (Path(root, name) for name in names):
            for disaggregate in (True, False) if path.name in _at_home(dist.get_world_size()) else (True,):
                where = f"{path.name}, tp {tp}, pp {pp}, {'disaggregated' if disaggregate else 'at home'}"
                found[where] = _case_errors(path, tp, pp, disaggregate)
    return found


def _at_home(ranks):
    return THOROUGH if ranks == 1 else REPLICATED


def _case_errors(path, tp, pp, disaggregate):
    import torch.distributed as dist

    from distca.data.batch import rank_batch
    from megatron_patches.steps.step_documents import StepDocuments
    from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

    _, cad, ddp = _model(path, tp, pp, disaggregate)
    documents = family_models.documents()
    homes = None if disaggregate else [np.arange(len(documents)) % cad.options.ranks] * 2
    step = cad.plan_step(StepDocuments([documents, documents[::-1]], homes))
    reference = torch.load(path / "logits.pt")
    reports = cad.forward_backward(step, _logits_step, ddp, forward_only=True)
    errors = [0.0]
    for rows_logits, documents_of, layouts in zip(
        reports, step.documents.micro_batches, step.plan.layouts, strict=False
    ):
        owners = [np.full(len(document), number) for number, document in enumerate(documents_of)]
        options = cad.options
        rows = rank_batch(owners, layouts, cad.rank, align=options.align, chunks=options.shares)
        whole = _gathered(rows_logits)
        assert (whole[:, family_models.VOCABULARY :] == torch.finfo(torch.float32).min).all()
        for number, document in enumerate(documents_of):  # as they were dealt
            mine = (rows.tokens == number) & (rows.lengths > 0)
            theirs = reference[documents.index(document)][rows.positions[mine]]
            ours = whole[: len(mine)][mine, : family_models.VOCABULARY]
            if len(ours):
                errors.append(relative_error(ours, theirs))
    # What follows the last hidden states is the same code where attention stays at home: one loss shows that it is.
    scored = cad.log_probabilities(step, ddp) if disaggregate else ()
    for documents_of, found in zip(step.documents.micro_batches, scored, strict=False):
        for document, ours in zip(documents_of, found, strict=True):
            each = reference[documents.index(document)].log_softmax(-1)[:-1]
            theirs = each.gather(1, torch.tensor(document[1:])[:, None])[:, 0]
            errors.append(relative_error(ours, theirs))
    for loss_step in (summed_loss_step, _unfused) if disaggregate and path.name in THOROUGH else (summed_loss_step,):
        found = cad.forward_backward(step, loss_step, ddp, forward_only=True)
        errors.append(_loss_error(sum_over_ranks(found, cad.device)[0], reference))
    worst = torch.tensor(max(errors))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _model(path, tp, pp, disaggregate, dtype=torch.float32):
    from distca.models.description import describe_folder
    from distca.models.tensors import TensorFiles
    from distca.train.config.initial import model_config
    from megatron_patches.api import CAD
    from megatron_patches.hugging_face.weights import load_weights
    from megatron_patches.model.gpt import build_model, transformer_config
    from megatron_patches.model.model_variant import cad_keywords
    from megatron_patches.ranks.groups import initialize_model_parallel

    described = describe_folder(path)
    initialize_model_parallel(tp, pp, 1, _expert_ranks(described, pp))
    shape = model_config(described)
    config = transformer_config(shape, dtype, sequence_parallel=True, cpu_initialization=True)
    cad = CAD(
        config,
        tokens_per_rank=sum(family_models.LENGTHS),
        disaggregate=disaggregate,
        kernel="reference",
        **cad_keywords(shape),
    )
    model = cad.attach(build_model(shape, described.vocabulary, cad))
    files = TensorFiles(path)
    files.check(described)
    load_weights(model, described, files)
    return described, cad, cad.data_parallel(model, distributed_optimizer=False)


def _expert_ranks(described, pp):
    """Two, where the model has experts and a stage so many ranks."""
    import torch.distributed as dist

    return 2 if described.experts.count and dist.get_world_size() // pp % 2 == 0 else 1


def _logits_step(batches, model):
    batch = next(batches)
    output = model(batch.tokens, batch.positions, batch.attention)
    return output, lambda logits: (logits.sum() * 0, torch.tensor(1), logits[0])


def _unfused(batches, model):
    from distca.parity.disaggregated import token_losses_step

    return token_losses_step(batches, model)


def _gathered(share):
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    shares = [torch.empty_like(share) for _ in range(group.size())]
    dist.all_gather(shares, share.contiguous(), group=group)
    return torch.cat(shares, dim=1)


def _loss_error(ours, logits):
    """Of both micro-batches, which have the same documents."""
    losses = [
        torch.nn.functional.cross_entropy(each[:-1].double(), torch.tensor(document[1:]), reduction="sum")
        for each, document in zip(logits, family_models.documents(), strict=True)
    ]
    theirs = 2 * sum(losses)
    return relative_error(ours, theirs)


def test_a_loss_that_is_no_number_is_no_small_error():
    logits = [torch.zeros(length, family_models.VOCABULARY) for length in family_models.LENGTHS]
    expected = 2 * sum(length - 1 for length in family_models.LENGTHS) * np.log(family_models.VOCABULARY)
    assert _loss_error(torch.tensor(expected), logits) <= TOLERANCE < _loss_error(torch.tensor(np.nan), logits)


class Folders:
    """Folders of cases of one type, each of which is written when it is first asked for."""

    def __init__(self, root, dtype):
        self.root, self._dtype, self.models = root, dtype, {}

    def of(self, names):
        """The folder of all, with those of ``names`` among them."""
        for name in names:
            if name not in self.models:
                self.models[name] = family_models.write_folder(name, self.root / name, self._dtype)
        return self.root


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("float32"), torch.float32)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("bfloat16"), torch.bfloat16)


@pytest.mark.parametrize(
    "ranks,layouts",
    [
        (1, {(1, 1): [name for name in family_models.CASES if name not in ALIKE]}),
        pytest.param(2, {(2, 1): CUT, (1, 1): REPLICATED}, marks=pytest.mark.slow),
        pytest.param(4, {(2, 2): STAGED}, marks=pytest.mark.slow),
        pytest.param(1, {(1, 1): ALIKE}, marks=pytest.mark.matrix),
        pytest.param(4, {(2, 2): CUT, (2, 1): REPLICATED}, marks=[pytest.mark.slow, pytest.mark.matrix]),
    ],
    ids=["one", "two", "four", "one, alike", "four, alike"],
)
def test_logits_and_losses_equal_those_of_transformers(wide, ranks, layouts):
    layouts = {sizes: _served(names) for sizes, names in layouts.items()}
    names = [name for each in layouts.values() for name in each]
    root = wide.of(names)
    for name in names:
        if not (root / name / "logits.pt").exists():
            torch.save(family_models.logits(wide.models[name]), root / name / "logits.pt")
    (errors, *_) = run_ranks(ranks, _errors, str(root), layouts, timeout=280)
    assert len(errors) == len(names) + sum(name in _at_home(ranks) for name in names)
    assert max(errors.values()) <= TOLERANCE, {name: error for name, error in errors.items() if error > TOLERANCE}


def _round_trips(root, target, layouts):
    """Read folders in bfloat16 and write them again."""
    warnings.filterwarnings("ignore")
    import torch.distributed as dist

    from distca.models.description import read_config
    from distca.models.folder import ExportedModel
    from megatron_patches.hugging_face.export import export_weights
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    for (tp, pp), names in layouts.items():
        for path in (Path(root, name) for name in names):
            folder = Path(target) / f"{path.name}, {tp}, {pp}"
            if dist.get_rank() == 0:
                folder.mkdir()
            dist.barrier()
            described, _, ddp = _model(path, tp, pp, True, torch.bfloat16)
            export_weights(ddp, ExportedModel.after(described, read_config(path), path), folder)


def _tensors(folder):
    from safetensors.torch import load_file

    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


TRIPS = {
    1: {
        (1, 1): (
            *("dynamic", "seed_oss", "mistral3", "gemma3", "exaone4", "glm4", "ernie4_5", "hunyuan"),
            *("gemma3 with images", "qwen3_moe", "deepseek_v3", "qwen3_next"),
        )
    },
    2: {
        (1, 1): ("gpt_oss", "glm4_moe", "moonlight", *family_models.FUSED),
        (2, 1): (*CUT, "olmo3", "cohere2", "mixtral", "olmoe"),
    },
    4: {(2, 2): ("qwen2, tied", "qwen3_5 with images, tied", "nemotron_h", "gpt_oss"), (2, 1): ("gpt_oss",)},
}
"""By ranks and their layout: cases that together have every way in which a weight is stored and put together."""
FURTHER_TRIPS = {
    1: {
        (1, 1): (
            *("llama3", "yarn, two magnitudes", "mistral", "qwen2, tied", "qwen3", "phi3", "mistral, windows"),
            *("gemma2", "olmo3", "smollm3", "granite", "ministral3", "cohere2", "phi4_mini"),
            *("gpt_oss, dense", "arcee, biases", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "moonlight"),
            *family_models.FUSED,
            *("qwen3_5 with images, tied", "nemotron_h"),
        )
    },
    4: {
        (2, 2): (*CUT, "olmo3", "cohere2", "gemma3", "olmoe"),
        (2, 1): ("mixtral", "glm4_moe", "deepseek_v3"),
    },
}
"""The same cases on other ranks, and cases that are stored as another is."""


@pytest.mark.parametrize(
    "ranks,layouts",
    [
        (1, TRIPS[1]),
        (2, TRIPS[2]),
        pytest.param(4, TRIPS[4], marks=pytest.mark.slow),
        pytest.param(1, FURTHER_TRIPS[1], marks=pytest.mark.matrix),
        pytest.param(4, FURTHER_TRIPS[4], marks=[pytest.mark.slow, pytest.mark.matrix]),
    ],
    ids=["one", "two", "four", "one, further", "four, further"],
)
def test_a_round_trip_is_equal_to_the_last_bit_and_reloads(narrow, ranks, layouts, tmp_path):
    layouts = {sizes: _served(names) for sizes, names in layouts.items()}
    root, target = narrow.of([name for names in layouts.values() for name in names]), tmp_path / "to"
    target.mkdir()
    run_ranks(ranks, _round_trips, str(root), str(target), layouts, timeout=200)
    assert len(list(target.iterdir())) == sum(map(len, layouts.values()))
    for folder in target.iterdir():
        source = root / folder.name.rsplit(", ", 2)[0]
        before, after = _tensors(source), _tensors(folder)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(after[name].dtype == before[name].dtype for name in before)
        assert torch.bfloat16 in {tensor.dtype for tensor in after.values()}
        assert json.loads((folder / "config.json").read_text()) == json.loads((source / "config.json").read_text())
        assert (folder / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
        ours = family_models.loaded(folder)
        if ranks > 1:  # files alone could differ
            continue
        theirs = family_models.loaded(source)
        assert type(ours) is type(theirs)
        for expected, got in zip(family_models.logits(theirs), family_models.logits(ours), strict=True):
            assert torch.equal(expected, got)


def _packed(name, weight, generator):
    """Random numbers of MXFP4 in place of a tensor of experts, and what transformers reads them as."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, columns, rows = weight.shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


def _scaled(name, weight, generator):
    """A weight in FP8 with a random factor for each block, and the products in bfloat16."""
    values = (64 * weight).to(torch.float8_e4m3fn)
    factors = torch.rand(*(-(-size // 128) for size in weight.shape), generator=generator) / 64
    spread = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return {name: values, f"{name}_scale_inv": factors}, (values.float() * spread).to(torch.bfloat16)


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
QUANTISED = {
    "gpt_oss": (_packed, ("experts.gate_up_proj", "experts.down_proj"), {"quant_method": "mxfp4"}),
    "qwen3_moe": (_scaled, ("_proj.weight",), _FP8),
    "deepseek_v3": (_scaled, ("_proj.weight", "_proj_with_mqa.weight"), _FP8 | {"activation_scheme": "dynamic"}),
}
WIDE = {"hidden_size": 160, "intermediate_size": 264, "moe_intermediate_size": 136}
"""Sizes of more than one block."""


@pytest.mark.parametrize("name", _served(QUANTISED))
def test_quantised_weights_are_trained_and_exported_as_bfloat16(name, tmp_path, monkeypatch):
    """With two tensor-parallel ranks, which share the experts too. What transformers makes of the export is what it
    makes of the same numbers in bfloat16."""
    from safetensors.torch import load_file, save_file

    made, ends, said = QUANTISED[name]
    plain, source, target = tmp_path / "plain", tmp_path / "from" / name, tmp_path / "to"
    if made is _scaled:
        kind, fields = family_models.CASES[name]
        monkeypatch.setitem(family_models.CASES, name, (kind, fields | WIDE))
    family_models.write_folder(name, plain, torch.bfloat16, shard="5GB")
    source.mkdir(parents=True)
    target.mkdir()
    stored = load_file(plain / "model.safetensors")
    packed, generator = dict(stored), torch.Generator().manual_seed(1)
    for tensor in [tensor for tensor in stored if tensor.endswith(ends)]:
        packed.pop(tensor)
        parts, stored[tensor] = made(tensor, stored[tensor], generator)
        packed |= parts
    save_file(packed, source / "model.safetensors")
    save_file(stored, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    run_ranks(2, _round_trips, str(tmp_path / "from"), str(target), {(2, 1): [name]}, timeout=100)
    (folder,) = target.iterdir()
    assert json.loads((folder / "config.json").read_text()) == config
    after = _tensors(folder)
    assert len(packed) > len(stored) and after.keys() == stored.keys()
    assert all(torch.equal(after[tensor], stored[tensor]) for tensor in after)
    theirs, ours = family_models.loaded(plain), family_models.loaded(folder)
    for expected, got in zip(family_models.logits(theirs), family_models.logits(ours), strict=True):
        assert torch.equal(expected, got)


def _unwritable(root, target, full):
    """The sentence of a rank that cannot write, or with ``full`` has no memory to put shares together; on all ranks."""
    warnings.filterwarnings("ignore")
    import torch.distributed as dist

    from distca.errors import CheckpointError
    from distca.models.folder import ExportedModel
    from megatron_patches.hugging_face.export import export_weights
    from megatron_patches.hugging_face.slots import Columns
    from megatron_patches.patches.cpu import use_cpu

    def without_memory(slot, shares):
        raise RuntimeError("out of memory")

    use_cpu()
    described, _, ddp = _model(Path(root), 2, 1, True)
    if full and dist.get_rank() == 0:
        Columns.tensors = without_memory
    try:
        export_weights(ddp, ExportedModel(described, {}, "float32"), Path(target))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_folder_that_cannot_be_written_is_a_sentence_on_every_rank(wide, tmp_path):
    (tmp_path / "file").write_text("")
    said = run_ranks(2, _unwritable, str(wide.of(["llama"]) / "llama"), str(tmp_path / "file"), False)
    assert len(set(said)) == 1 and said[0].startswith(f"{tmp_path / 'file'} could not be written (rank 0: ")


def test_a_rank_whose_memory_is_full_is_a_sentence_on_every_rank(wide, tmp_path):
    said = run_ranks(2, _unwritable, str(wide.of(["llama"]) / "llama"), str(tmp_path / "to"), True)
    assert said == [f"{tmp_path / 'to'} could not be written (rank 0: out of memory)."] * 2


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral, fused", "gpt_oss, mxfp4"])
def test_a_rank_reads_its_own_experts_alone(wide, name):
    from distca.models.description import describe_folder
    from distca.models.tensors import TensorFiles
    from megatron_patches.hugging_face.weights import slot_of

    root, ranks, read = wide.of([name]), 2, []
    described = describe_folder(root / name)

    class Recorded(TensorFiles):
        def read(self, name, *ranges):
            read.append(name)
            return super().read(name, *ranges)

    own, files = described.experts.count // ranks, Recorded(root / name)
    for rank in range(ranks):
        read.clear()
        for local in range(own):
            for linear in ("linear_fc1", "linear_fc2"):
                parameter = f"decoder.layers.1.mlp.experts.local_experts.{local}.{linear}.weight"
                slot_of(parameter, 1, described, ranks).share(files, rank, ranks)
        numbers = {int(re.search(r"(?:experts\.|#)(\d+)", each)[1]) for each in read}
        assert numbers == set(range(rank * own, (rank + 1) * own)), numbers


def test_any_error_of_the_first_rank_is_said_to_the_others(monkeypatch):
    from megatron_patches.hugging_face import export

    said = []
    monkeypatch.setattr(export.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(export.dist, "broadcast_object_list", said.extend)
    assert export._on_first_rank(lambda: Path("").joinpath(None)) == said[0]
    assert said[0].startswith("rank 0: ")
